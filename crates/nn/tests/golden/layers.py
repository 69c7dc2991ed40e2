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


class First(nn.Module):
    """The first of what a layer gives, by the layer's own names of parameters."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]

    def named_parameters(self):
        return self.layer.named_parameters()


def norm(layer):
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


def rms_norm(width):
    layer = nn.RMSNorm(width)
    nn.init.normal_(layer.weight)
    return layer


def resized(size, mode, align_corners=None):
    return Function(lambda x: F.interpolate(x, size=size, mode=mode, align_corners=align_corners))


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
    "layer_norm": case(norm(nn.LayerNorm(6)), torch.randn(2, 3, 6)),
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
    # What came later comes last, so that the numbers of what was there stay.
    "silu": case(nn.SiLU(), torch.randn(3, 4)),
    "softplus": case(nn.Softplus(), torch.randn(3, 4)),
    "leaky_relu": case(nn.LeakyReLU(0.01), torch.randn(3, 4)),
    "elu": case(nn.ELU(1.5), torch.randn(3, 4)),
    "conv1d": case(nn.Conv1d(2, 3, 3), torch.randn(2, 2, 6)),
    "conv1d_all_options": case(nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), torch.randn(2, 4, 9)),
    "conv_transpose": case(nn.ConvTranspose2d(3, 2, 3), image(3, 3, 4)),
    "conv_transpose_all_options": case(
        nn.ConvTranspose2d(4, 6, 3, stride=3, padding=2, output_padding=1, dilation=2, groups=2), image(4, 3, 4)
    ),
    "conv_transpose_without_bias": case(nn.ConvTranspose2d(2, 3, 4, stride=2, padding=1, bias=False), image(2, 3, 3)),
    "max_pool1d": case(nn.MaxPool1d(3, stride=2, padding=1), torch.randn(2, 3, 8)),
    "avg_pool1d": case(nn.AvgPool1d(3, stride=2, padding=1), torch.randn(2, 3, 8)),
    "upsample": case(nn.Upsample(scale_factor=2), image(2, 2, 3)),
    "group_norm": case(norm(nn.GroupNorm(2, 6)), image(6, 3, 2)),
    "group_norm_of_rows": case(norm(nn.GroupNorm(2, 6)), torch.randn(3, 6)),
    "instance_norm": case(norm(nn.InstanceNorm2d(3, affine=True)), image(3, 3, 4)),
    "rms_norm": case(rms_norm(6), torch.randn(2, 3, 6)),
    "batch_norm1d": case(norm(nn.BatchNorm1d(3)), torch.randn(5, 3)),
    "batch_norm1d_of_sequences": case(norm(nn.BatchNorm1d(3)), torch.randn(2, 3, 4)),
    "lstm": case(First(nn.LSTM(3, 5, batch_first=True)), torch.randn(2, 4, 3)),
    "lstm_all_options": case(First(nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)), torch.randn(2, 5, 3)),
    "gru": case(First(nn.GRU(3, 5, batch_first=True)), torch.randn(2, 4, 3)),
    "gru_all_options": case(First(nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)), torch.randn(2, 5, 3)),
    "bilinear": case(resized((5, 8), "bilinear"), image(2, 3, 4)),
    "bilinear_to_corners": case(resized((4, 7), "bilinear", align_corners=True), image(2, 6, 3)),
    "bicubic": case(resized((7, 3), "bicubic"), image(2, 3, 5)),
    "bicubic_to_corners": case(resized((6, 6), "bicubic", align_corners=True), image(2, 4, 3)),
    "area": case(resized((2, 5), "area"), image(2, 3, 4)),
    "linear_of_sequences": case(nn.Upsample(scale_factor=3, mode="linear"), torch.randn(2, 3, 4)),
    "trilinear": case(nn.Upsample(scale_factor=2, mode="trilinear"), torch.randn(1, 2, 2, 3, 2)),
    "conv_of_rows": case(nn.Conv2d(2, 3, (1, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2)), image(2, 4, 5)),
    "conv_transpose_of_columns": case(
        nn.ConvTranspose2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), output_padding=(1, 0)), image(2, 3, 4)
    ),
    "max_pool_of_rows": case(nn.MaxPool2d((1, 3), stride=(2, 1)), image(2, 4, 5)),
    "conv_transpose1d": case(nn.ConvTranspose1d(3, 2, 3), torch.randn(2, 3, 4)),
    "conv_transpose1d_all_options": case(
        nn.ConvTranspose1d(4, 6, 3, stride=3, padding=2, output_padding=1, dilation=2, groups=2), torch.randn(2, 4, 4)
    ),
    "prelu": case(nn.PReLU(), torch.randn(3, 4)),
    "prelu_of_channels": case(nn.PReLU(3), image(3, 2, 2)),
    "embedding_with_padding": case(nn.Embedding(6, 3, padding_idx=2), torch.tensor([[1, 2], [2, 5]])),
}
print(json.dumps(dict(cases=cases, labels=labels.tolist(), soft=numbers(soft))))
