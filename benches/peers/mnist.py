"""The tutorials' MNIST job in PyTorch, to measure against.

python mnist.py step THREADS            median milliseconds of one training step on a fixed batch of 64
python mnist.py epoch THREADS DATA_DIR  seconds of one epoch as the tutorials write it (torchvision, DataLoader, SGD)
torchrun --nproc-per-node 2 mnist.py epoch 1 DATA_DIR   the same under DistributedDataParallel over gloo
DATA_DIR is torchvision's: the files lie in DATA_DIR/MNIST/raw.
"""
import os
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
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
        return F.log_softmax(self.fc2(x), dim=1)


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.nll_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def main():
    what, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    if what == "step":
        x, y, times = torch.rand(64, 1, 28, 28), torch.arange(64) % 10, []
        for _ in range(600):
            start = time.perf_counter()
            step(model, optimizer, x, y).item()
            times.append(1e3 * (time.perf_counter() - start))
        print(f"{statistics.median(times[100:]):.3f} ms")
        return
    import torch.distributed as dist
    from torchvision import datasets, transforms

    world = int(os.environ.get("WORLD_SIZE", 1))
    normalise = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train = datasets.MNIST(sys.argv[3], train=True, transform=normalise)
    sampler = None
    if world > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        sampler = torch.utils.data.distributed.DistributedSampler(train)
    loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=sampler is None, sampler=sampler)
    start = time.perf_counter()
    for x, y in loader:
        step(model, optimizer, x, y)
    if world == 1 or dist.get_rank() == 0:
        print(f"{time.perf_counter() - start:.2f} s")
    if world > 1:
        dist.destroy_process_group()


main()
