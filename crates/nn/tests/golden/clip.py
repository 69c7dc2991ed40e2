"""Gradients of two parameters before and after PyTorch cut them.
Usage: python clip.py > clip.json"""
import json, torch

torch.manual_seed(0)
start = [torch.randn(5, 7) * 2, torch.randn(13)]


def case(norm=None, value=None):
    params = [torch.zeros_like(g, requires_grad=True) for g in start]
    for p, g in zip(params, start):
        p.grad = g.clone()
    if value is not None:
        torch.nn.utils.clip_grad_value_(params, value)
    total = None if norm is None else torch.nn.utils.clip_grad_norm_(params, norm).item()
    return {"norm": norm, "value": value, "total": total, "grads": sum((p.grad.flatten().tolist() for p in params), [])}


grads = sum((g.flatten().tolist() for g in start), [])
print(json.dumps({"grads": grads, "cases": [case(norm=1.0), case(norm=100.0), case(value=0.5), case(1.5, 0.5)]}, indent=1))
