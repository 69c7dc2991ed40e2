"""Figures for tests/transformer.rs: PyTorch's encoder layer, filled by the formula of gpt.py.

Usage: python transformer.py > transformer.json
"""

import json

import torch
import torch.nn as nn

from gpt import unit

torch.set_default_dtype(torch.float64)
SAMPLES, TIME, WIDTH, HEADS, HIDDEN = 2, 4, 6, 2, 10
# Which positions of each sample may be seen.
SEEN = [[1, 1, 1, 1], [1, 1, 0, 0]]


def values(stream, *shape):
    n = torch.Size(shape).numel()
    return torch.tensor([unit(stream, i) for i in range(n)]).view(shape)


def case(norm_first, activation, is_masked):
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, dropout=0.0, activation=activation, norm_first=norm_first, batch_first=True
    )
    with torch.no_grad():
        for k, p in enumerate(layer.parameters()):
            p.copy_(0.5 * values(k, *p.shape))
    x = values(100, SAMPLES, TIME, WIDTH).requires_grad_()
    hidden = torch.tensor(SEEN) == 0 if is_masked else None
    y = layer(x, src_key_padding_mask=hidden)
    (y * values(101, SAMPLES, TIME, WIDTH)).sum().backward()
    return {
        "output": y.flatten().tolist(),
        "input": x.grad.norm().item(),
        "parameters": [[name, list(p.shape), p.grad.norm().item()] for name, p in layer.named_parameters()],
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "after": case(False, "relu", False),
                "after, masked": case(False, "relu", True),
                "first, masked": case(True, "gelu", True),
            },
            indent=1,
        )
    )
