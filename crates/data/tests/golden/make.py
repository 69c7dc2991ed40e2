"""Makes what crates/data's tests hold their transforms and decoders against, with torchvision and Pillow.

Usage: python make.py, in this folder. Prints the constants of src/transform/colour.rs and
tests/transforms.rs and writes the files here.
"""
import pickle

import numpy as np
from PIL import Image
import PIL
import torch
import torchvision
import torchvision.transforms.functional as F

print(f"Pillow {PIL.__version__}, torchvision {torchvision.__version__}")


def fold(array):
    h = 0
    for byte in array.reshape(-1).tolist():
        h = (h * 31 + byte) % 2**64
    return h


def planes(image):
    return np.asarray(image).transpose(2, 0, 1)


# Every fifth value of each colour, as one row of pixels.
levels = np.arange(0, 256, 5, dtype=np.uint8)
sweep = Image.fromarray(np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(1, -1, 3))
for factor in (0.0, 0.4, 1.0, 1.7):
    for name, change in (("Brightness", F.adjust_brightness), ("Contrast", F.adjust_contrast), ("Saturation", F.adjust_saturation)):
        print(f"        (Change::{name}({factor}), {fold(planes(change(sweep, factor))):#x}),")
for turn in (-0.5, -0.1, 0.0, 0.07, 0.5):
    print(f"        (Change::Hue({int(turn * 255) % 256}), {fold(planes(F.adjust_hue(sweep, turn))):#x}),")

# A picture with edges, gradients and noise. None of these sizes is one for which Pillow 13 has begun to resize columns first,
# which can change a byte by one. Each row: the new height and width, and the fold of the result.
rng = np.random.default_rng(1)
y, x = np.mgrid[0:37, 0:53]
picture = np.stack([x * 4, y * 6, (x // 8 + y // 8) % 2 * 255], -1) + rng.integers(-20, 21, (37, 53, 3))
picture = np.clip(picture, 0, 255).astype(np.uint8)
image = Image.fromarray(picture)
resized = []
for height, width in ((37, 53), (74, 106), (224, 224), (8, 8), (1, 1), (100, 3), (36, 52)):
    resized.append([height, width, fold(planes(F.resize(image, [height, width])))])
np.save("picture.npy", picture)
print("RESIZED", [(h, w, f"{f:#x}") for h, w, f in resized])
print("SHORTER", [(size, *planes(F.resize(image, size)).shape[1:]) for size in (10, 37, 64)])

# One file of CIFAR-10's Python format, as Python 2 and NumPy write it and as they do today: images 0 and 1 of ascending bytes.
batch = {
    b"batch_label": b"training batch 1 of 5",
    b"labels": [3, 9],
    b"data": np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072),
    b"filenames": [b"camera_s_000001.png", b"lorry_s_000002.png"],
}
for protocol in (3, 4):
    pickle.dump(batch, open(f"batch.{protocol}.pickle", "wb"), protocol=protocol)


def python2(value):
    """Protocol 2 as Python 2 wrote it: bytes as BINSTRING, names as NumPy's old ones."""

    if isinstance(value, bytes):
        return b"T" + len(value).to_bytes(4, "little") + value
    if isinstance(value, int):
        return b"K" + bytes([value])
    if isinstance(value, list):
        return b"](" + b"".join(map(python2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(k) + python2(v) for k, v in value.items()) + b"u"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"(" + b"".join(b"M" + n.to_bytes(2, "little") for n in value.shape) + b"t"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    return array + b"(K\x01" + shape + dtype + b"\x89" + python2(value.tobytes()) + b"tb"


text = b"\x80\x02" + python2(batch) + b"."
assert (pickle.loads(text, encoding="bytes")[b"data"] == batch[b"data"]).all()
open("batch.2.pickle", "wb").write(text)

bits = torch.tensor([[0, 255], [77, 128], [200, 1]], dtype=torch.uint8).reshape(3, 1, 2)
bits = torchvision.transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])(bits.float().div(255))
print("NUMBERS", [f"{b % 2**32:#x}" for b in bits.view(torch.int32).reshape(-1).tolist()])

# The picture as files of every kind, and what Pillow reads in them: the fold of a PNG's planes, the pixels of a JPEG (whose
# decoders may differ by some levels).
grey = image.convert("L")
alpha = image.convert("RGBA")
alpha.putalpha(grey)
files = {
    "rgb.png": image,
    "rgba.png": alpha,
    "grey.png": grey,
    "grey-alpha.png": alpha.convert("LA"),
    "palette.png": image.quantize(16),
    "bits.png": grey.convert("1"),
    "sixteen.png": Image.fromarray(np.asarray(grey).astype(np.uint16) * 257),
}
for name, file in files.items():
    file.save(name)
    if name != "sixteen.png":
        print(f'    ("{name}", {fold(planes(Image.open(name).convert("RGB"))):#x}),')
image.save("baseline.jpg", quality=90)
image.save("progressive.jpg", quality=90, progressive=True, subsampling=0)
grey.save("grey.jpg", quality=90)
image.convert("CMYK").save("cmyk.jpg", quality=90)
for name in ("baseline", "progressive", "grey"):
    np.save(f"{name}.npy", np.asarray(Image.open(f"{name}.jpg").convert("RGB")))
