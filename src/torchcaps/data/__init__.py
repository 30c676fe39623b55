"""Data sets in memory as bytes, and batches as a pure function of (seed, epoch, position).

`sources` (facts) -> `fetch` (files) -> `readers` (bytes to tensors) -> `datasets` (splits) -> `batches`.
"""

import difflib
from pathlib import Path
from typing import NamedTuple

from torchcaps.data import datasets
from torchcaps.data import fetch as _fetch
from torchcaps.data.batches import (
    Augmentation,
    Batch,
    Batches,
    ImageSplit,
    OverlappingDigits,
    Split,
    evaluation_batches,
)
from torchcaps.data.datasets import DataSet, Entry, Request
from torchcaps.data.readers import read_image
from torchcaps.data.sources import SAME_FILES, SOURCES
from torchcaps.errors import UserError

__all__ = [
    "DATASETS",
    "Augmentation",
    "Batch",
    "Batches",
    "DataSet",
    "ImageSplit",
    "OverlappingDigits",
    "Split",
    "describe",
    "evaluation_batches",
    "load",
    "read_image",
]

DATASETS: dict[str, Entry] = {
    "digits": Entry(
        datasets.load_digits,
        "handwritten digits that come with scikit-learn",
        "1,437 + 360",
        (1, 28, 28),
        10,
    ),
    "mnist": Entry(
        datasets.load_mnist,
        "handwritten digits",
        "60,000 + 10,000",
        (1, 28, 28),
        10,
    ),
    "fashion-mnist": Entry(
        datasets.load_fashion_mnist,
        "pictures of clothes",
        "60,000 + 10,000",
        (1, 28, 28),
        10,
    ),
    "cifar-10": Entry(
        datasets.load_cifar_10,
        "small colour photographs",
        "50,000 + 10,000",
        (3, 32, 32),
        10,
    ),
    "multi-mnist": Entry(
        datasets.load_multi_mnist,
        "two overlapping digits, made from mnist",
        "60,000,000 + 10,000,000",
        (1, 36, 36),
        10,
    ),
    "multi-digits": Entry(
        datasets.load_multi_digits,
        "two overlapping digits, made from digits",
        "1,437,000 + 360,000",
        (1, 36, 36),
        10,
    ),
    "folder": Entry(
        datasets.load_folder,
        "your own images: folder:PATH, with a sub-folder for each class",
        "yours",
        None,
        None,
    ),
}


def load(
    name: str,
    *,
    cache: Path | None = None,
    validation: int = 0,
    image_size: int | None = None,
    channels: int | None = None,
    fit: str = "stretch",
    download: bool = True,
) -> DataSet:
    """A data set by its name: one of DATASETS, or "folder:PATH".

    validation: hold this many training images out, always the same ones.
    image_size, channels, fit: for the images of a folder (see `read_image`).
    """
    kind = name.partition(":")[0]
    if kind not in DATASETS or (kind != "folder" and kind != name):
        close = difflib.get_close_matches(kind.lower(), DATASETS, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        raise UserError(f"unknown data set '{name}'{hint}; valid ones are: {', '.join(_valid_names())}")
    entry = DATASETS[kind]
    if entry.image_shape:
        own_channels, own_size, _ = entry.image_shape
        if image_size not in (None, own_size) or channels not in (None, own_channels):
            raise UserError(
                f"the images of {name} are {own_size} x {own_size} with {own_channels} channel(s); "
                "another image size or number of channels can only be asked for with folder:PATH"
            )
    return entry.load(Request(name, cache, validation, image_size, channels, fit, download))


def _valid_names() -> list[str]:
    return ["folder:PATH" if name == "folder" else name for name in DATASETS]


class Row(NamedTuple):
    """A line of `torchcaps data list`."""

    name: str
    summary: str
    images: str
    image_shape: str
    classes: str
    megabytes: int  # on disk
    cached: str  # "yes", "no", "damaged", or "built in" if there is nothing to fetch


def describe(cache: Path | None = None) -> list[Row]:
    """What can be loaded, and what is already there."""
    rows = []
    for name, entry in DATASETS.items():
        source = SOURCES.get(SAME_FILES.get(name, name))
        shape = " x ".join(map(str, entry.image_shape)) if entry.image_shape else "as asked"
        classes = str(entry.classes) if entry.classes else "yours"
        size = source.megabytes if source else 0
        cached = _cached(name, cache) if source else "built in"
        rows.append(Row(name, entry.summary, entry.images, shape, classes, size, cached))
    return rows


def _cached(name: str, cache: Path | None) -> str:
    files = _fetch.verify(name, cache)
    if all(file.ok for file in files):
        return "yes"
    return "no" if all(file.problem == _fetch.MISSING for file in files) else "damaged"
