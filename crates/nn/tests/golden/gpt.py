"""Figures for tests/gpt.rs: a small GPT-2 in PyTorch, with the names and layouts of its files, filled by the formula of models.py.

Usage: python gpt.py > gpt.json
"""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F

MASK = (1 << 64) - 1


def unit(stream, i):
    """As in models.py."""
    z = ((stream << 40) + i + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    z ^= z >> 31
    return (z >> 40) / 2**23 - 1


torch.set_default_dtype(torch.float64)
LAYERS, WIDTH, HEADS, CONTEXT, WORDS = 2, 12, 3, 9, 17
SAMPLES, TIME = 3, 7


class Conv1D(nn.Module):
    """A dense layer with a weight of (inputs, outputs), as GPT-2's files have it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(WIDTH, 3 * WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, WIDTH))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(WIDTH, 4 * WIDTH), Conv1D(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        if not tied:
            self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.tied = tied

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        return x @ self.wte.weight.T if self.tied else self.lm_head(x)


def case(tied):
    model = Gpt(tied)
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.tensor([0.5 * unit(k, i) for i in range(p.numel())]).view(p.shape))
    ids = torch.tensor([i * i * 7 % WORDS for i in range(SAMPLES * TIME)]).view(SAMPLES, TIME)
    labels = torch.tensor([i * 5 % WORDS for i in range(SAMPLES * TIME)]).view(SAMPLES, TIME)
    logits = model(ids)
    loss = F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))
    loss.backward()
    return {
        "output": logits[1, 3].tolist(),
        "loss": loss.item(),
        "parameters": [[name, list(p.shape), p.grad.norm().item()] for name, p in model.named_parameters()],
    }


if __name__ == "__main__":
    print(json.dumps({"tied": case(True), "own": case(False)}, indent=1))
