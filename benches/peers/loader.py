"""Images a second of torch's DataLoader on images of CIFAR-10's form with the tutorial's transforms: flip, tensor, normalise.

Usage: python loader.py [WORKERS...]; 0 by default. Needs torch and torchvision.
"""
import sys
import time

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

IMAGES = 20_000
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Noise(Dataset):
    def __init__(self):
        random = np.random.default_rng(1)
        self.pixels = random.integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
        self.transform = transforms.Compose(
            [transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        )

    def __len__(self):
        return IMAGES

    def __getitem__(self, i):
        return self.transform(Image.fromarray(self.pixels[i])), i % 10


data = Noise()
for workers in [int(n) for n in sys.argv[1:]] or [0]:
    start = time.perf_counter()
    seen = sum(len(labels) for _, labels in DataLoader(data, 64, shuffle=True, num_workers=workers))
    print(f"{workers} workers: {seen / (time.perf_counter() - start):.0f} images/s")
