"""Figures for tests/transformer.rs: PyTorch's layers of an encoder and of a decoder, filled by the formula of gpt.py.

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


def decoder_case(norm_first, activation):
    layer = nn.TransformerDecoderLayer(
        WIDTH, HEADS, HIDDEN, dropout=0.0, activation=activation, norm_first=norm_first, batch_first=True
    )
    with torch.no_grad():
        for k, p in enumerate(layer.parameters()):
            p.copy_(0.5 * values(k, *p.shape))
    x = values(100, SAMPLES, TIME - 1, WIDTH).requires_grad_()
    memory = values(102, SAMPLES, TIME, WIDTH).requires_grad_()
    later = torch.ones(TIME - 1, TIME - 1).triu(1).bool()
    y = layer(x, memory, tgt_mask=later, memory_key_padding_mask=torch.tensor(SEEN) == 0)
    (y * values(101, SAMPLES, TIME - 1, WIDTH)).sum().backward()
    return {
        "output": y.flatten().tolist(),
        "input": x.grad.norm().item(),
        "memory": memory.grad.norm().item(),
        "parameters": [[name, list(p.shape), p.grad.norm().item()] for name, p in layer.named_parameters()],
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "after": case(False, "relu", False),
                "after, masked": case(False, "relu", True),
                "first, masked": case(True, "gelu", True),
                "decoder, after": decoder_case(False, "relu"),
                "decoder, first": decoder_case(True, "gelu"),
            },
            indent=1,
        )
    )
