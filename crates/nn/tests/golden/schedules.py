"""The learning rate of every unit of time under PyTorch's schedulers, for an optimizer whose own is 1.
Usage: python schedules.py > schedules.json"""
import json, torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR, LambdaLR, LinearLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR)


def run(make, units):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(units):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warmed(make, units, start=1 / 3):
    return lambda o: SequentialLR(o, [LinearLR(o, start, total_iters=units), make(o)], milestones=[units])


def one_cycle(total, **options):
    return lambda o: OneCycleLR(o, max_lr=1.0, total_steps=total, cycle_momentum=False, **options)


def plateau(losses, **options):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, rates = ReduceLROnPlateau(optimizer, **options), []
    for loss in losses:
        scheduler.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


losses = [2.0, 1.5, 1.5, 1.49995, 1.6, 1.4, 1.4, 1.41, 1.42, 1.3, 1.35, 1.36, 1.37, 1.38, 1.39, 1.4, 1.2, 1.3, 1.3, 1.3]
print(json.dumps({
    "step": run(lambda o: StepLR(o, 3, 0.5), 12),
    "multi_step": run(lambda o: MultiStepLR(o, [2, 5, 9], 0.3), 12),
    "cosine": run(lambda o: CosineAnnealingLR(o, 12), 12),
    "cosine_floor": run(lambda o: CosineAnnealingLR(o, 9, eta_min=0.05), 10),
    "linear": run(lambda o: LinearLR(o, 1.0, 0.0, total_iters=12), 12),
    "linear_floor": run(lambda o: LinearLR(o, 1.0, 0.1, total_iters=6), 10),
    "warm_inverse_sqrt": run(warmed(lambda o: LambdaLR(o, lambda t: (3 / (3 + t)) ** 0.5), 3, 0.1), 12),
    "one_cycle": run(one_cycle(20), 20),
    "one_cycle_linear": run(one_cycle(21, pct_start=0.2, div_factor=10, final_div_factor=100, anneal_strategy="linear"), 21),
    "warm_constant": run(lambda o: LinearLR(o, total_iters=5), 12),
    "warm_step": run(warmed(lambda o: StepLR(o, 3, 0.5), 5), 12),
    "warm_multi_step": run(warmed(lambda o: MultiStepLR(o, [2, 5], 0.3), 3, 0.01), 12),
    "warm_cosine": run(warmed(lambda o: CosineAnnealingLR(o, 10, eta_min=0.1), 2, 0.5), 12),
    "losses": losses,
    "plateau": plateau(losses, patience=1),
    "plateau_cooldown": plateau(losses, patience=1, cooldown=2, factor=0.5),
    "plateau_floor": plateau(losses, patience=0, factor=0.3, min_lr=0.05, threshold=0.01),
}, indent=1))
