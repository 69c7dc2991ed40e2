"""Weights and statistics of a small network, and their average after every step, by PyTorch. The test puts the former in
place of a model's and holds the average against the latter.
Usage: python average.py > average.json"""
import json, torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1, bias=False), torch.nn.BatchNorm2d(2))
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.02)


def floats(model):
    return {k: v.flatten().tolist() for k, v in model.state_dict().items() if v.dtype == torch.float32}


steps = []
for step in range(5):
    optimizer.zero_grad()
    (net(torch.randn(4, 1, 2, 2) + step) ** 3).mean().backward()
    optimizer.step()
    average.update_parameters(net)
    steps.append({"net": floats(net), "average": floats(average.module)})
print(json.dumps(steps, indent=1))
