"""PyTorch's autocast on a CPU, for two small networks: the losses of some steps in bfloat16 or float16, those of the same run in
float64, and the scale of the loss. Parameters and images come from the integer hash that tests/golden.rs describes; normalisations
begin with weights 1 and biases 0. Layer norms and log-softmax compute in float32, as autocast's lists for GPUs say; those for CPUs
don't name them.
Usage: python precision.py mnist|normed bf16|f16 > precision_mnist_bf16.txt"""
import math, sys
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
STEPS, BATCH, N = 60, 16, 64


def unit(stream, n):
    with np.errstate(over="ignore"):
        z = (np.uint64(stream) << np.uint64(40)) + np.arange(1, n + 1, dtype=np.uint64)
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(40)).astype(np.float64) / 2**23 - 1


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


class MnistNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(wide(self.fc2(x)), 1)


class WideLayerNorm(nn.LayerNorm):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(wide(x))


def normed():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), WideLayerNorm(288), nn.Linear(288, 64), nn.GELU(), nn.Linear(64, 10),
    )


def first_values(model):
    with torch.no_grad():
        one_dimensional = {name for name, p in model.named_parameters() if p.ndim == 1}
        for k, (name, p) in enumerate(model.named_parameters()):
            if name.replace("bias", "weight") in one_dimensional:
                p.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                fan_in = math.prod(p.shape[1:]) if p.ndim > 1 else 100
                p.copy_(torch.from_numpy((unit(k, p.numel()) * math.sqrt(3 / fan_in)).astype(np.float32)).view(p.shape))


def run(which, half):
    model = MnistNet() if which == "mnist" else normed()
    first_values(model)
    dtype = torch.float32 if half else torch.float64
    model = model.to(dtype)
    images = torch.from_numpy(unit(1000, N * 28 * 28).astype(np.float32)).view(N, 1, 28, 28).to(dtype)
    labels = torch.arange(N) % 10
    rule = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=half == torch.float16)
    losses, scales = [], []
    for step in range(STEPS):
        at = slice(step * BATCH % N, step * BATCH % N + BATCH)
        with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
            output = wide(model(images[at]))
            loss = F.nll_loss(output, labels[at]) if which == "mnist" else F.cross_entropy(output, labels[at])
        scales.append(scaler.get_scale())
        rule.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(rule)
        scaler.update()
        losses.append(loss.item())
    return losses, scales


which, name = sys.argv[1:]
losses, scales = run(which, {"bf16": torch.bfloat16, "f16": torch.float16}[name])
double, _ = run(which, None)
print(f"# {which} in {name}, SGD lr=0.02 momentum=0.5, batch {BATCH}, formula images {N}x1x28x28, label of image j is j % 10.")
print("# PyTorch 2.15 with autocast: step, loss, loss of the run in float64, scale of the loss.")
for row in zip(range(STEPS), losses, double, scales):
    print(*row)
