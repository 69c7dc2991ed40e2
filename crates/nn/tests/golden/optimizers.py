"""Six steps of each optimizer by PyTorch in float32, on the gradients that the Rust test computes too.
Usage: python optimizers.py > optimizers.json"""
import json, torch

start = [0.5, -1.0, 2.0, 0.0]
cases = {
    "sgd": (torch.optim.SGD, dict(lr=0.1)),
    "sgd_decay": (torch.optim.SGD, dict(lr=0.1, weight_decay=0.1)),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01)),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    "adam": (torch.optim.Adam, dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01)),
    "adadelta": (torch.optim.Adadelta, dict(lr=1.0, weight_decay=0.01)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.01)),
    "rmsprop_all": (torch.optim.RMSprop, dict(lr=0.01, momentum=0.9, centered=True, weight_decay=0.1)),
}
out = {}
for name, (make, options) in cases.items():
    p = torch.tensor(start, requires_grad=True)
    optimizer, steps = make([p], **options), []
    for step in range(6):
        p.grad = p.detach() * 0.5 + torch.tensor([0.1, -0.2, 0.3, 0.4]) * (step + 1)
        optimizer.step()
        steps.append(p.tolist())
    out[name] = steps
print(json.dumps(out, indent=1))
