"""Peer of crates/nn/examples/functions.rs: the same layers and operations by PyTorch.

Usage: functions.py THREADS [PART OF A NAME]
Prints a line each: ms of a training step (forward, sum, backward) and of a forward pass alone, medians.
"""
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

CALLS = (3, 15)
torch.set_num_threads(int(sys.argv[1]))
only = sys.argv[2] if len(sys.argv) > 2 else ""


def median_ms(f):
    for _ in range(CALLS[0]):
        f()
    times = []
    for _ in range(CALLS[1]):
        start = time.perf_counter()
        f()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]


def op(name, shape, f, parameters=()):
    if only not in name:
        return
    x = torch.randn(*shape, requires_grad=True)

    def step():
        for parameter in parameters:
            parameter.grad = None
        x.grad = None
        f(x).sum().backward()

    def forward():
        with torch.no_grad():
            f(x)

    print(f"{name:40} {median_ms(step):9.2f} {median_ms(forward):9.2f}", flush=True)


def layer(name, shape, module):
    first = lambda y: y[0] if isinstance(y, tuple) else y
    op(name, shape, lambda x: first(module(x)), list(module.parameters()))


layer("lstm", (32, 64, 128), nn.LSTM(128, 256, batch_first=True))
layer("lstm of 64", (16, 100, 64), nn.LSTM(64, 64, batch_first=True))
layer("gru", (32, 64, 128), nn.GRU(128, 256, batch_first=True))
layer("encoder", (16, 64, 256), nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True))
layer("group_norm", (32, 64, 32, 32), nn.GroupNorm(8, 64))
layer("rms_norm", (4096, 512), nn.RMSNorm(512))
layer("conv1d", (32, 64, 256), nn.Conv1d(64, 64, 5, padding=2))
layer("conv_transpose", (32, 64, 16, 16), nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1))
for n in [1, 2, 3, 4, 6]:

    def conv(inputs, outputs, size, name="", **how):
        kernel = how.pop("kernel", 3)
        layer(f"conv {inputs}-{outputs} of {size}{name}, batch {n}", (n, inputs, size, size), nn.Conv2d(inputs, outputs, kernel, **how))

    conv(16, 16, 64, padding=1)
    conv(64, 64, 64, padding=1)
    conv(256, 256, 14, padding=1)
    conv(512, 512, 7, padding=1)
    conv(64, 128, 56, ", stride 2", stride=2, padding=1)
    conv(64, 256, 56, ", kernel 1", kernel=1)
    conv(32, 64, 28, ", kernel 5", kernel=5, padding=2)
    conv(64, 64, 28, ", kernel 3 dilated", padding=2, dilation=2)
for n in [1, 8]:

    def depthwise(channels, size, name="", kernel=3, **how):
        module = nn.Conv2d(channels, channels, kernel, groups=channels, **how)
        layer(f"depthwise {channels} of {size}{name}, batch {n}", (n, channels, size, size), module)

    depthwise(144, 56, padding=1)
    depthwise(576, 14, padding=1)
    depthwise(960, 7, padding=1)
    depthwise(96, 112, ", stride 2", stride=2, padding=1)
    depthwise(96, 56, ", kernel 7", kernel=7, padding=3)
    inverted = [nn.Conv2d(32, 192, 1), nn.ReLU(), nn.Conv2d(192, 192, 3, padding=1, groups=192), nn.ReLU(), nn.Conv2d(192, 32, 1)]
    layer(f"inverted bottleneck, batch {n}", (n, 32, 28, 28), nn.Sequential(*inverted))
for n in [1, 2, 4]:
    through = [nn.Conv2d(256, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 256, 1)]
    layer(f"bottleneck, batch {n}", (n, 256, 56, 56), nn.Sequential(*through))
rows = (4096, 512)
targets = torch.rand(*rows)
op("mse_loss", rows, lambda x: F.mse_loss(x, targets))
op("bce_with_logits", rows, lambda x: F.binary_cross_entropy_with_logits(x, targets))
op("softmax", rows, lambda x: x.softmax(1))
op("log_softmax", rows, lambda x: x.log_softmax(1))
op("logsumexp", rows, lambda x: x.logsumexp(1))
op("gelu", rows, F.gelu)
op("silu", rows, F.silu)
op("softplus", rows, F.softplus)
op("elu", rows, F.elu)
op("tanh", rows, torch.tanh)
op("ln", rows, lambda x: x.abs().log())
op("sin", rows, torch.sin)
op("powf", rows, lambda x: x.abs().pow(1.7))
op("sqrt", rows, lambda x: x.abs().sqrt())
op("cumsum", rows, lambda x: x.cumsum(1))
op("cumsum of columns", rows, lambda x: x.cumsum(0))
op("var", rows, lambda x: x.var(1))
op("sum", rows, lambda x: x.sum(1))
op("max", rows, lambda x: x.max(1)[0])
op("product", rows, lambda x: x * x)
op("transpose", rows, lambda x: x.t().contiguous())
op("heads", (32, 128, 8, 64), lambda x: x.transpose(1, 2).contiguous())
seen = torch.ones(8, 1, 1, 512, dtype=torch.bool)
seen[1::2, :, :, 256:] = False


def attention(**how):
    def of(x):
        q, k, v = x.view(8, 512, 3, 8, 64).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2).reshape(8, 512, 512)

    return of


qkv = (8, 512, 3 * 512)
op("attention", qkv, attention())
op("attention masked", qkv, attention(attn_mask=seen))
op("attention causal", qkv, attention(is_causal=True))
images = (4, 32, 64, 64)
op("bilinear", images, lambda x: F.interpolate(x, (128, 128), mode="bilinear"))
op("bicubic", images, lambda x: F.interpolate(x, (128, 128), mode="bicubic"))
op("nearest", images, lambda x: F.interpolate(x, (128, 128)))
op("bilinear smaller", images, lambda x: F.interpolate(x, (32, 32), mode="bilinear"))
op("flip", rows, lambda x: x.flip(1))
op("cat", rows, lambda x: torch.cat([x] * 4))
op("masked_fill", rows, lambda x: x.masked_fill(x > 0.5, 1.0))
row, short, column, columns = (torch.randn(*shape) for shape in [(64,), (8,), (100_352, 1), (1000, 1)])
op("broadcast row of 64", (100_352, 64), lambda x: x + row)
op("broadcast row of 8", (100_352, 8), lambda x: x + short)
op("broadcast column to 8", (100_352, 8), lambda x: x * column)
op("broadcast column to 1000", (1000, 1000), lambda x: x * columns)
op("permuted rows of 4", (4096, 16, 8, 4), lambda x: x.transpose(1, 2).contiguous())
op("sum of the middle", (32, 512, 64), lambda x: x.sum(1))
op("a hundred sums of ten", (10,), lambda x: sum([x] * 100, x))
