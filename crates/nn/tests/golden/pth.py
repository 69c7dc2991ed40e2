"""Small .pth files of every kind that PyTorch writes; `crates/nn/tests/pth.rs` says which tensors are in them.

Of the larger ones beside this script, mnistnet.pth and mnistnet_legacy.pth are what torch.save makes of the state dict in
mnistnet.safetensors, and hostile.pth what it makes of {"conv1.weight": x}, where x.__reduce__() is
(os.system, ("touch hostile-was-run",)).
Usage: python pth.py OUT_DIR"""
import collections, os, sys, zipfile
import torch

out = sys.argv[1]
LEGACY = {"_use_new_zipfile_serialization": False}


def count(*shape, dtype=torch.float32):
    """0, 1, 2, ... in this shape."""
    n = torch.Size(shape).numel()
    return torch.arange(n).to(dtype).view(shape)


def save(name, value, **options):
    torch.save(value, os.path.join(out, name), **options)


# Every dtype, each with values that its neighbours couldn't hold.
dtypes = {
    "f32": torch.tensor([0.1, -1e30, float("inf")]),
    "f64": torch.tensor([0.1, -1.5], dtype=torch.float64),
    "f16": torch.tensor([0.1, -65504.0, 6e-8, 0.0, float("-inf")], dtype=torch.float16),
    "bf16": torch.tensor([0.1, -1e30], dtype=torch.bfloat16),
    "i64": count(2, dtype=torch.int64),
    "i32": count(2, dtype=torch.int32),
    "i16": count(2, dtype=torch.int16),
    "i8": count(2, dtype=torch.int8),
    "u8": count(2, dtype=torch.uint8),
    "bool": count(2, dtype=torch.bool),
}
# Tensors that share a storage, start inside it, skip in it, or repeat it.
whole = count(4, 6)
views = collections.OrderedDict(
    whole=whole, part=whole[1:3, 2:5], transposed=whole.t(), every_second=whole[:, ::2], expanded=count(3).expand(2, 3),
    scalar=torch.tensor(7.0), empty=torch.zeros(0, 3), parameter=torch.nn.Parameter(count(2)), tied=whole,
)
for ending, options in {"": {}, "_legacy": LEGACY}.items():
    save(f"dtypes{ending}.pth", dtypes, **options)
    save(f"views{ending}.pth", views, **options)

# What is stored is the negative of these, of which only a flag tells.
x = count(4)
save("negative.pth", {"imaginary": torch.complex(x, x).conj().imag, "view": torch._neg_view(x), "plain": x})

# A state dict with the counters and the metadata of a module, saved under DDP.
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2))
state = net.state_dict()
save("ddp.pth", collections.OrderedDict(("module." + k, v) for k, v in state.items()))
for protocol in (3, 4, 5):
    save(f"protocol{protocol}.pth", state, pickle_protocol=protocol)
save("protocol4_legacy.pth", state, pickle_protocol=4, **LEGACY)

# Checkpoints: one state dict, two, none, and the whole module.
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
net(torch.ones(1, 1, 2, 2)).sum().backward()
optimizer.step()
for key in ("model", "state_dict", "model_state_dict", "net"):
    save(f"checkpoint_{key}.pth", {
        key: state, "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "epoch": 3,
        "loss": torch.tensor(0.5), "best": 0.25, "history": [1.0, None],
    })
save("two.pth", {"model": state, "net": state, "epoch": 3})
save("none.pth", {"generator": state, "epoch": 3})
save("list.pth", [torch.ones(1)])
save("module.pth", net)

# The same weights as a zip archive whose entries are deflated, as archives that were packed again are.
with zipfile.ZipFile(f"{out}/protocol3.pth") as stored, zipfile.ZipFile(f"{out}/deflated.pth", "w", zipfile.ZIP_DEFLATED) as deflated:
    for entry in stored.namelist():
        deflated.writestr(entry, stored.read(entry))
# And with bytes in the other order, as PyTorch writes them on such a machine.
with zipfile.ZipFile(f"{out}/protocol3.pth") as little, zipfile.ZipFile(f"{out}/big_endian.pth", "w") as big:
    sizes = {"0": 4, "1": 4, "2": 4, "3": 4, "4": 4, "5": 4, "6": 8}
    for entry in little.namelist():
        data = little.read(entry)
        if "/data/" in entry:
            size = sizes[entry.split("/")[-1]]
            data = b"".join(data[i:i + size][::-1] for i in range(0, len(data), size))
        big.writestr(entry, b"big" if entry.endswith("/byteorder") else data)
