"""Six steps of optimizers with parameter groups by PyTorch in float32, on the gradients that the Rust test computes too:
the bias without weight decay, the second layer with a tenth of the learning rate.
Usage: python groups.py > groups.json"""
import json, torch

start = {"0.weight": [0.5, -1.0, 2.0, 0.0], "0.bias": [1.0, -2.0], "1.weight": [0.25, 1.5], "1.bias": [3.0]}
cases = {
    "sgd": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.1)),
    "adam": (torch.optim.Adam, dict(lr=0.01, weight_decay=0.1)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01, weight_decay=0.1)),
    "adadelta": (torch.optim.Adadelta, dict(lr=1.0, weight_decay=0.1)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.01, weight_decay=0.1, momentum=0.9)),
}
out = {}
for name, (make, options) in cases.items():
    p = {k: torch.tensor(v, requires_grad=True) for k, v in start.items()}
    second = [p["1.weight"], p["1.bias"]]
    optimizer = make([
        {"params": [p["0.weight"]]},
        {"params": [p["0.bias"]], "weight_decay": 0.0},
        {"params": second, "lr": options["lr"] * 0.1},
    ], **options)
    steps = []
    for step in range(6):
        for tensor in p.values():
            push = torch.tensor([0.1, -0.2, 0.3, 0.4])[: tensor.numel()]
            tensor.grad = tensor.detach() * 0.5 + push * (step + 1)
        optimizer.step()
        steps.append({k: v.tolist() for k, v in p.items()})
    out[name] = steps
print(json.dumps(out, indent=1))
