"""From a list of image files to a data set: reading, and dividing what is not divided yet."""

from __future__ import annotations

import hashlib
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.data.config import DataConfig
from torchcaps.data.files import BadFile, shown
from torchcaps.data.images import image_facts
from torchcaps.data.listing import Listing, Picture
from torchcaps.data.readers import Images, read_images
from torchcaps.data.report import FileReport, counted, listed
from torchcaps.data.splits import places_in_class
from torchcaps.errors import UserError

TEST_SHARE = 0.2  # of images that do not come with a split
SMALLEST_SIDE, LARGEST_SIDE = 20, 64  # chosen without being asked; more can be asked for
_SAMPLE = 200  # files that the usual size is found from


def read_listing(config: DataConfig, listing: Listing) -> tuple[dict[str, Images], FileReport, tuple[str, ...]]:
    """The images of each split, "train" and "test" at least, what their files are like, and the test files' names.

    Without a test split a fixed fifth of each class becomes one, chosen by the hash of the files' paths. Images that
    cannot be read are all named in one error, or left out if ``config.skip_unreadable`` says so.
    """
    side = config.image_size or usual_side([picture.path for picture in listing.pictures()])
    channels = config.channels
    _check_memory(len(listing.pictures()), channels or 3, side)
    bad = list(listing.bad)
    facts = []
    names: dict[str, list[str]] = {}
    images: dict[str, Images] = {}
    for split, pictures in sorted(listing.splits.items(), key=lambda item: item[0] != "train"):
        shape = (channels or 3, side, side)
        read = read_images([picture.path for picture in pictures], image_shape=shape, fit=config.fit)
        pixels = read.pixels
        if channels is None:  # the training images, which come first, decide
            channels = 1 if bool((pixels == pixels[:, :1]).all()) else 3
            pixels = pixels[:, :channels].contiguous()
        kept = [pictures[number] for number in read.readable]
        names[split] = [_name(picture.path, listing.root) for picture in kept]
        images[split] = pixels, _labels(kept, listing)
        bad += read.bad
        facts += read.facts
    if bad and not config.skip_unreadable:
        lines = "\n  ".join(listed(bad))
        raise UserError(
            f"{counted(len(bad), 'image file')} cannot be read:\n  {lines}\n"
            "Mend or remove them, or leave them out with --skip-unreadable."
        )
    _check_classes(listing, images["train"])
    if "test" not in images:
        divided, names["test"] = _divided(images["train"], names["train"])
        images |= divided
    if not len(images["test"][1]):
        raise UserError(f"{shown(listing.root)} has no image to test with; add some")
    if "validation" in images and not len(images["validation"][1]):
        raise UserError(f"{shown(listing.root)} has no readable image to validate with; add some, or remove that part")
    return images, FileReport.of(facts, listing.ignored, bad), tuple(names["test"])


def _name(path: Path, root: Path) -> str:
    try:
        return Path(os.path.relpath(path, root)).as_posix()
    except ValueError:  # on another drive
        return path.as_posix()


def _check_memory(images: int, channels: int, side: int) -> None:
    needed = images * channels * side * side
    there = physical_memory()
    if there is not None and needed > there // 2:
        raise UserError(
            f"{images:,} images of {side} x {side} pixels need {needed / 1e9:.1f} GB, more than half of this machine's "
            f"memory ({there / 1e9:.1f} GB); choose a smaller --image-size, or --channels 1"
        )


def physical_memory() -> int | None:
    """The machine's memory in bytes, if it can be found out."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def usual_side(paths: Sequence[Path]) -> int:
    """The side that images are resized to if nothing else is asked for.

    It is the median of their shorter sides, from a sample: small images keep their size. Images above 64 pixels become
    64, which trains in reasonable time on an ordinary machine, and none fewer than 20.
    """
    sides = []
    for path in sorted(paths, key=lambda path: _hash(os.fsencode(path.name)))[:_SAMPLE]:
        try:
            facts = image_facts(path)
        except BadFile:
            continue  # reading it will say so
        sides.append(min(facts.width, facts.height))
    usual = round(statistics.median(sides)) if sides else SMALLEST_SIDE
    return min(max(usual, SMALLEST_SIDE), LARGEST_SIDE)


def _labels(pictures: Sequence[Picture], listing: Listing) -> Tensor:
    """(N,) int64, or (N, J) bool if images may show several classes."""
    if not listing.multi_label:
        return torch.tensor([picture.labels[0] for picture in pictures], dtype=torch.int64)
    presence = torch.zeros(len(pictures), len(listing.classes), dtype=torch.bool)
    for row, picture in zip(presence, pictures):
        row[list(picture.labels)] = True
    return presence


def _check_classes(listing: Listing, train: Images) -> None:
    labels = train[1]
    counts = labels.sum(0) if listing.multi_label else torch.bincount(labels, minlength=len(listing.classes))
    if empty := [shown(name) for name, count in zip(listing.classes, counts.tolist()) if not count]:
        raise UserError(
            f"{shown(listing.root)} has no training image that can be read of {', '.join(empty[:20])}; "
            "add some, or remove the class"
        )


def _divided(images: Images, names: Sequence[str]) -> tuple[dict[str, Images], list[str]]:
    """A fixed fifth of each class for testing, and their names. A class with one image keeps it for training."""
    pixels, labels = images
    hashes = [_hash(os.fsencode(name)) for name in names]
    shuffled = torch.tensor(sorted(range(len(names)), key=lambda number: hashes[number]))
    rank, share, size = places_in_class(labels, shuffled)
    held_out = ((share < TEST_SHARE) | (rank == 0)) & (size > 1)
    if labels.ndim == 2:  # an image shows other classes than the one it was counted for
        for label in (~labels[~held_out].any(0)).nonzero().flatten().tolist():
            held_out[labels[:, label].nonzero()[0]] = False
    divided = {"train": (pixels[~held_out], labels[~held_out]), "test": (pixels[held_out], labels[held_out])}
    return divided, [name for name, held in zip(names, held_out.tolist()) if held]


def _hash(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=16).digest()
