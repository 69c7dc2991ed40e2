"""The models by PyTorch, filled by formula: names and shapes of the parameters, outputs without dropout, and the norms of
the parameters' gradients for a loss. unit(k, i) maps a stream k and an index i to [-1, 1) by an integer hash; element i of
the k-th parameter is unit(k, i) * sqrt(3 / fan_in), with fan_in 100 for one-dimensional ones; element i of the images is
(unit(1000, i) + 1) / 2.
Usage: python models.py > models.json"""
import json, math, numpy as np, torch, torch.nn as nn, torch.nn.functional as F

torch.set_num_threads(1)


def unit(stream, n):
    with np.errstate(over="ignore"):
        z = (np.uint64(stream) << np.uint64(40)) + np.arange(1, n + 1, dtype=np.uint64)
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(40)).astype(np.float64) / 2**23 - 1


class Mnist(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), 1)


class MnistHpc(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), 1)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32))
        self.decoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 784), nn.Sigmoid())

    def forward(self, x):
        return self.decoder(self.encoder(x))


x = torch.from_numpy(((unit(1000, 3 * 784) + 1) / 2).astype(np.float32)).view(3, 1, 28, 28)
nll = lambda y: F.nll_loss(y, torch.tensor([0, 7, 3]))
mse = lambda y: F.mse_loss(y, x.flatten(1))
out = {}
for name, model, loss in ("mnist", Mnist(), nll), ("mnist_hpc", MnistHpc(), nll), ("autoencoder", Autoencoder(), mse):
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            fan_in = math.prod(p.shape[1:]) if p.ndim > 1 else 100
            p.copy_(torch.from_numpy((unit(k, p.numel()) * math.sqrt(3 / fan_in)).astype(np.float32)).view(p.shape))
    y = model(x)
    value = loss(y)
    value.backward()
    out[name] = dict(
        parameters=[[n, list(p.shape), p.grad.double().norm().item()] for n, p in model.named_parameters()],
        output=y[:, :10].flatten().tolist(),
        loss=value.item(),
    )
print(json.dumps(out))
