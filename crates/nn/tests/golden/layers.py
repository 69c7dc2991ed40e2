"""Each layer and loss by PyTorch in float32: input, parameters, output, and the gradients of sum(output * weights).
Usage: python layers.py > layers.json"""
import json, torch, torch.nn as nn, torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def numbers(t):
    # Nine digits tell every float32 from its neighbours.
    return dict(shape=list(t.shape), values=[float(f"{v:.9g}") for v in t.detach().flatten().tolist()])


def case(module, x):
    out = dict(x=numbers(x))
    if x.is_floating_point():
        x.requires_grad_()
    y = module(x)
    push = torch.randn_like(y)
    (y * push).sum().backward()
    out.update(y=numbers(y), push=numbers(push))
    if x.is_floating_point():
        out["dx"] = numbers(x.grad)
    out["parameters"] = {name: numbers(p) for name, p in module.named_parameters()}
    out["gradients"] = {name: numbers(p.grad) for name, p in module.named_parameters()}
    return out


def norm(width):
    layer = nn.LayerNorm(width)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


image = lambda c, h, w: torch.randn(2, c, h, w)
labels = torch.tensor([2, 0, 4, 2])
soft = torch.rand(4, 5)
cases = {
    "linear": case(nn.Linear(5, 3), torch.randn(2, 4, 5)),
    "linear_without_bias": case(nn.Linear(5, 3, bias=False), torch.randn(4, 5)),
    "conv": case(nn.Conv2d(2, 3, 3), image(2, 5, 6)),
    "conv_all_options": case(nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), image(4, 7, 8)),
    "conv_depthwise_without_bias": case(nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False), image(3, 4, 4)),
    "max_pool": case(nn.MaxPool2d(2), image(2, 5, 6)),
    "max_pool_all_options": case(nn.MaxPool2d(3, stride=2, padding=1), image(2, 7, 6)),
    "avg_pool": case(nn.AvgPool2d(2), image(2, 5, 6)),
    "avg_pool_all_options": case(nn.AvgPool2d(3, stride=2, padding=1), image(2, 7, 6)),
    "embedding": case(nn.Embedding(6, 3), torch.tensor([[0, 5, 2], [2, 2, 1]])),
    "layer_norm": case(norm(6), torch.randn(2, 3, 6)),
    "relu": case(nn.ReLU(), torch.randn(3, 4)),
    "gelu": case(nn.GELU(), torch.randn(3, 4)),
    "tanh": case(nn.Tanh(), torch.randn(3, 4)),
    "sigmoid": case(nn.Sigmoid(), torch.randn(3, 4)),
    "log_softmax": case(nn.LogSoftmax(dim=-1), torch.randn(3, 4)),
    "sequential": case(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3), nn.Tanh()), image(1, 4, 5)),
    "nll": case(Function(lambda x: F.nll_loss(x, labels)), torch.randn(4, 5)),
    "cross_entropy": case(Function(lambda x: F.cross_entropy(x, labels)), torch.randn(4, 5)),
    "cross_entropy_smoothed": case(Function(lambda x: F.cross_entropy(x, labels, label_smoothing=0.2)), torch.randn(4, 5)),
    "mse": case(Function(lambda x: F.mse_loss(x, soft)), torch.randn(4, 5)),
    "bce_with_logits": case(Function(lambda x: F.binary_cross_entropy_with_logits(x, soft)), torch.randn(4, 5)),
}
print(json.dumps(dict(cases=cases, labels=labels.tolist(), soft=numbers(soft))))
