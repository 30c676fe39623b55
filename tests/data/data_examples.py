"""What the tests of splits, batches and augmentation share."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from torchcaps.data.augmentation import Augmentation
from torchcaps.data.config import AugmentationConfig
from torchcaps.data.splits import Batch


def random_images(count: int, shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    return pixels, torch.randint(0, classes, (count,), generator=generator)


def augmentation(**settings: Any) -> Augmentation:
    """These changes and no others."""
    return Augmentation(AugmentationConfig(**{"shift": 0, **settings}))


EVERYTHING = augmentation(shift=2, flip="random", crop=16, cutout=5, rotate=15, scale=0.1, brightness=0.2, contrast=0.5)


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


def picture_folder(folder: Path, counts: dict[str, int], colour: bool = True) -> Path:
    """A sub-folder for each class with that many images of 12 x 9 pixels, all different."""
    for shade, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (12, 9), (shade * 50, number, 99) if colour else (number,) * 3).save(
                folder / name / f"{number:03}.png"
            )
    return folder
