"""ResNet9 in PyTorch: the losses of some steps in float32 and in float64, and the norm of the parameters after them. Parameters
and images come from the integer hash that golden.rs describes; normalisations begin with weights 1 and biases 0.
The learning rate is low, as rounding alone can send a gradient to another pixel where two are nearly the largest.
Usage: python resnet9.py > resnet9_sgd.txt"""
import math, numpy as np, torch, torch.nn as nn, torch.nn.functional as F

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def unit(stream, n):
    with np.errstate(over="ignore"):
        z = (np.uint64(stream) << np.uint64(40)) + np.arange(1, n + 1, dtype=np.uint64)
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(40)).astype(np.float64) / 2**23 - 1


def conv(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)


class ConvNormRelu(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv, self.norm = conv(inputs, outputs), nn.BatchNorm2d(outputs)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = conv(width, width), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)


class ResNet9(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.prep, self.layer1, self.residual1 = ConvNormRelu(3, 64), ConvNormRelu(64, 128), Block(128)
        self.layer2, self.layer3, self.residual3 = ConvNormRelu(128, 256), ConvNormRelu(256, 512), Block(512)
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        x = self.residual1(F.max_pool2d(self.layer1(self.prep(x)), 2))
        x = F.max_pool2d(self.layer3(F.max_pool2d(self.layer2(x), 2)), 2)
        x = F.adaptive_max_pool2d(self.residual3(x), 1).flatten(1)
        return self.fc(x) * 0.125


def run(dtype, steps=6, batch=4, n=32):
    model = ResNet9(10)
    with torch.no_grad():
        for k, (name, p) in enumerate(model.named_parameters()):
            if "norm" in name or "bn" in name:
                p.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                fan_in = math.prod(p.shape[1:]) if p.ndim > 1 else 100
                p.copy_(torch.from_numpy((unit(k, p.numel()) * math.sqrt(3 / fan_in)).astype(np.float32)).view(p.shape))
    model = model.to(dtype)
    images = torch.from_numpy(unit(1000, n * 3 * 32 * 32).astype(np.float32)).view(n, 3, 32, 32).to(dtype)
    labels = torch.arange(n) % 10
    rule = torch.optim.SGD(model.parameters(), lr=0.0005, momentum=0.9, nesterov=True, weight_decay=0.0005)
    losses = []
    for step in range(steps):
        at = slice(step * batch % n, step * batch % n + batch)
        loss = F.cross_entropy(model(images[at]), labels[at], label_smoothing=0.1)
        rule.zero_grad()
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return losses, math.sqrt(sum((p.double() ** 2).sum().item() for p in model.parameters()))


(single, norm), (double, _) = run(torch.float32), run(torch.float64)
print(
    "# ResNet9, 10 classes, SGD lr=0.0005 momentum=0.9 nesterov weight_decay=0.0005, cross_entropy label_smoothing=0.1, batch 4,",
    "formula images 32x3x32x32, label of image j is j % 10. PyTorch 2.15: step, loss, loss of the run in float64.",
)
for step, pair in enumerate(zip(single, double)):
    print(step, *pair)
print("norm", norm)
