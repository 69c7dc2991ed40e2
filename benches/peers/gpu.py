"""The same jobs in PyTorch on a GPU, to measure against. Each call prints one JSON object a line.

gpu.py step MODEL BATCH STEPS HOW TYPE   a training step of samples that are on the GPU already: MODEL is mnist, resnet18, resnet50 or gpt2
gpu.py epoch MODEL EPOCHS DATA           whole epochs as the tutorials write them, images from files: MODEL is mnist or resnet18
gpu.py images DIR                        makes up files in CIFAR-10's binary format, 50,000 and 10,000 images
gpu.py reached SHARE                     of a run's lines on standard input, when its test accuracy first was that much, in seconds of training
gpu.py rates                             the GPU's rate of bfloat16 products, and of copies within its memory
HOW is eager or compile (mode max-autotune, channels last for images); TYPE is float32, tf32 or bfloat16 (autocast).
DATA is torchvision's folder for mnist (MNIST/raw) and one that `images` made for resnet18.
"""
import json
import os
import statistics
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

GPU = torch.device(os.environ.get("BENCH_DEVICE", "cuda:0"))


class Digits(nn.Module):
    """The tutorials' network."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.channels = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.max_pool2d(self.conv1(x), 2).relu()
        x = F.max_pool2d(self.channels(self.conv2(x)), 2).relu()
        x = F.dropout(self.fc1(x.flatten(1)).relu(), training=self.training)
        return self.fc2(x)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, seq, width = x.shape
        parts = self.qkv(self.ln_1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, seq, width))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2 of 124 million parameters, without dropout, whose last layer is its table of words."""

    def __init__(self, words, layers=12, width=768, heads=12, seq=1024):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        return (self.ln_f(self.blocks(x)) @ self.wte.weight.T).flatten(0, 1)


def residual(name):
    import torchvision

    return getattr(torchvision.models, name)(num_classes=10)


def job(model, batch):
    """A network, its optimizer, and a batch."""
    fused = {"fused": GPU.type == "cuda"}
    if model == "gpt2":
        # The number of words that makes products fall into whole tiles, as everybody has it.
        words, seq = 50304, 1024
        ids = torch.randint(0, words, (batch, seq + 1), device=GPU)
        net = Gpt2(words).to(GPU)
        return net, torch.optim.AdamW(net.parameters(), lr=3e-4, **fused), ids[:, :-1].contiguous(), ids[:, 1:].flatten()
    labels = torch.arange(batch, device=GPU) % 10
    if model == "mnist":
        net = Digits().to(GPU)
        return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5), torch.rand(batch, 1, 28, 28, device=GPU), labels
    side = {"resnet18": 32, "resnet50": 224}[model]
    net = residual(model).to(GPU)
    return net, torch.optim.Adam(net.parameters(), lr=1e-3, **fused), torch.rand(batch, 3, side, side, device=GPU), labels


def wait():
    if GPU.type == "cuda":
        torch.cuda.synchronize()


def wait_for_turn():
    """Where BENCH_GATE names a file, says by FILE.ready that all is compiled, and waits until there is FILE.go: so several compile at once,
    which takes minutes, and are measured one after the other."""
    gate = os.environ.get("BENCH_GATE")
    if gate:
        wait()
        open(gate + ".ready", "w").close()
        while not os.path.exists(gate + ".go"):
            time.sleep(0.02)


def step(model, batch, steps, how, kind):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind != "float32"
    torch.backends.cudnn.benchmark = True
    net, optimizer, x, y = job(model, batch)
    forward = lambda x, y: F.cross_entropy(net(x), y)
    if how == "compile":
        if x.dim() == 4:
            net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        forward = torch.compile(forward, mode="max-autotune")
    times, begun, before = [], time.perf_counter(), max(steps // 5, 10)
    for number in range(before + steps):
        if number == before:
            wait_for_turn()
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(GPU.type, torch.bfloat16, enabled=kind == "bfloat16"):
            loss = forward(x, y)
        loss.backward()
        # Read before the update, which then goes on beside the next step's beginning, as in ours.
        loss.item()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    wait()
    counted = sorted(times[-steps:])
    taken = {}
    if GPU.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        taken = {"gpu_mb": (total - free) / 1e6, "own_mb": torch.cuda.max_memory_allocated() / 1e6}
    at = lambda share: counted[int((len(counted) - 1) * share)]
    line = {"peer": "step", "model": model, "batch": batch, "how": how, "precision": kind, "torch": torch.__version__}
    warm = time.perf_counter() - begun - sum(times[-steps:]) / 1e3
    print(json.dumps(line | {"median_ms": at(0.5), "p95_ms": at(0.95), "warm_up_s": warm} | taken), flush=True)


def epoch(model, epochs, data):
    from torchvision import datasets, transforms

    # PyTorch's own choice of precision: the factors of convolutions are rounded, those of products aren't.
    if model == "mnist":
        change = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
        images = datasets.MNIST(data, train=True, transform=change)
        net = Digits().to(GPU)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    else:
        from PIL import Image

        change = transforms.Compose([
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ])

        class Images(torch.utils.data.Dataset):
            """What torchvision's CIFAR10 does with an image; its reader wants the real files."""

            def __init__(self):
                folder = os.path.join(data, "cifar-10-batches-bin")
                files = [os.path.join(folder, f"data_batch_{i}.bin") for i in range(1, 6)]
                rows = np.concatenate([np.fromfile(file, np.uint8) for file in files]).reshape(-1, 3073)
                self.labels = rows[:, 0].astype(np.int64)
                self.images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy()

            def __len__(self):
                return len(self.labels)

            def __getitem__(self, i):
                return change(Image.fromarray(self.images[i])), int(self.labels[i])

        images = Images()
        net = residual("resnet18").to(GPU)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(images, batch_size=64, shuffle=True)
    for number in range(epochs):
        start = time.perf_counter()
        for x, y in loader:
            x, y = x.to(GPU), y.to(GPU)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        wait()
        seconds = time.perf_counter() - start
        line = {"peer": "epoch", "model": model, "epoch": number, "seconds": seconds, "precision": "float32, convolutions in tf32"}
        print(json.dumps(line | {"samples_per_s": len(images) / seconds, "torch": torch.__version__}), flush=True)


def images(folder):
    """Labels that can be learned: each class has a colour of its own, under noise."""
    random = np.random.default_rng(0)
    folder = os.path.join(folder, "cifar-10-batches-bin")
    os.makedirs(folder, exist_ok=True)
    colours = random.integers(64, 192, (10, 3, 1))
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        rows = np.empty((10000, 3073), np.uint8)
        rows[:, 0] = random.integers(0, 10, 10000)
        noise = random.integers(-64, 64, (10000, 3, 1024))
        rows[:, 1:] = (colours[rows[:, 0]] + noise).reshape(10000, -1)
        rows.tofile(os.path.join(folder, f"{name}.bin"))


def reached(share):
    seconds, best = 0.0, 0.0
    for line in map(json.loads, sys.stdin):
        if line.get("event") != "epoch":
            continue
        seconds, best = seconds + line["seconds"], max(best, line.get("test_accuracy", 0.0))
        if best >= share:
            print(json.dumps({"reached": share, "epochs": line["epoch"] + 1, "training_seconds": seconds}))
            return
    print(json.dumps({"reached": None, "wanted": share, "best": best, "training_seconds": seconds}))


def rates():
    def median(work):
        times = []
        for _ in range(13):
            wait()
            start = time.perf_counter()
            work()
            wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:])

    size = 8192 if GPU.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    product = median(lambda: a @ b)
    numbers = torch.empty(size * size * 16, device=GPU)
    copied = torch.empty_like(numbers)
    copy = median(lambda: copied.copy_(numbers))
    name = torch.cuda.get_device_name() if GPU.type == "cuda" else "cpu"
    line = {"peer": "rates", "device": name, "torch": torch.__version__, "bfloat16_tflops": 2 * size**3 / product / 1e12}
    print(json.dumps(line | {"copy_gb_s": 2 * 4 * numbers.numel() / copy / 1e9}), flush=True)


def main():
    match sys.argv[1:]:
        case ["step", model, batch, steps, how, kind]:
            step(model, int(batch), int(steps), how, kind)
        case ["epoch", model, epochs, data]:
            epoch(model, int(epochs), data)
        case ["images", folder]:
            images(folder)
        case ["reached", share]:
            reached(float(share))
        case ["rates"]:
            rates()
        case _:
            sys.exit(__doc__)


main()
