"""From files to tensors of bytes: IDX (MNIST), the binary layout of CIFAR-10, arrays of NumPy, and many images at once.

Sizes are checked before anything is read into memory. Nothing is unpickled.
"""

from __future__ import annotations

import math
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcaps.data.files import BadFile, open_regular, read_bytes, shown
from torchcaps.data.images import ImageFacts, ImageShape, read_with_facts

Images = tuple[Tensor, Tensor]
"""Pixels (N, C, H, W) uint8; labels (N,) int64, or presence (N, J) bool if images may show several classes."""

MAX_BINARY_BYTES = 1 << 30
MAX_ARRAY_BYTES = 2 << 30
_CIFAR_RECORD = 3073


def read_idx(path: Path) -> Tensor:
    """An IDX file of bytes: two zeros, the type (8), the number of axes, the axes, the content.

    Returns:
        uint8 of the shape that the file states.
    """
    content = read_bytes(path, MAX_BINARY_BYTES)
    axes = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    shape = [int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(axes)]
    start = 4 + 4 * axes
    if not axes or len(content) != start + math.prod(shape) or 0 in shape:
        raise BadFile(shown(path), "is not an IDX file of bytes")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def read_idx_images(images: Path, labels: Path, *, image_shape: ImageShape, classes: int) -> Images:
    """Images and labels from two IDX files that belong together.

    Args:
        images, labels: the files.
        image_shape: (1, H, W) that the images must have.
        classes: labels must be below this number.
    """
    pixels, numbers = read_idx(images), read_idx(labels)
    if pixels.shape[1:] != image_shape[1:]:
        shape = " x ".join(map(str, pixels.shape[1:]))
        raise BadFile(shown(images), f"holds images of {shape or 'no'} pixels, not {image_shape[1]} x {image_shape[2]}")
    if numbers.ndim != 1 or len(numbers) != len(pixels):
        raise BadFile(shown(labels), f"has {len(numbers):,} labels for {len(pixels):,} images")
    _check_labels(labels, numbers, classes)
    return pixels[:, None], numbers.long()


def read_cifar(paths: Sequence[Path]) -> Images:
    """CIFAR-10 binary files: pixels (N, 3, 32, 32) and labels (N,)."""
    pixels, labels = [], []
    for path in paths:
        content = read_bytes(path, MAX_BINARY_BYTES)
        if not content or len(content) % _CIFAR_RECORD:
            raise BadFile(shown(path), f"is not a CIFAR-10 file: its records have {_CIFAR_RECORD} bytes each")
        records = torch.frombuffer(content, dtype=torch.uint8).view(-1, _CIFAR_RECORD)
        _check_labels(path, records[:, 0], 10)
        labels.append(records[:, 0].long())
        pixels.append(records[:, 1:].reshape(-1, 3, 32, 32))
    return torch.cat(pixels), torch.cat(labels)


def _check_labels(path: Path, labels: Tensor, classes: int) -> None:
    if int(labels.max()) >= classes:
        raise BadFile(shown(path), f"has a label {int(labels.max())}, but there are {classes} classes from 0")


def read_arrays(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Arrays of numbers or texts from a file that ``numpy.savez`` wrote.

    Args:
        path: the ``.npz`` file.
        names: of the arrays; all must be there.
    """
    with open_regular(path) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                members = {entry.filename: entry for entry in archive.infolist()}
                if missing := [name for name in names if f"{name}.npy" not in members]:
                    there = ", ".join(shown(member.removesuffix(".npy")) for member in members) or "nothing"
                    raise BadFile(shown(path), f"has no array {', '.join(missing)}; it holds {there[:200]}")
                return [_read_array(path, archive, members[f"{name}.npy"]) for name in names]
        except BadFile:
            raise
        except Exception as error:  # damaged archives raise nearly anything
            reason = shown(str(error).split("\n")[0][:200]) or type(error).__name__
            raise BadFile(shown(path), f"is not an .npz file that can be read ({reason})") from error


def _read_array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """An array whose size is known from its header before its content is read; objects are refused."""
    name = member.filename.removesuffix(".npy")
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(
            version
        )
        if read_header is None:
            raise ValueError(f"{name} has the unknown version {version}")
        shape, by_columns, kind = read_header(stream)
        if kind.hasobject or kind.kind not in "biufU":
            raise BadFile(shown(path), f"holds something else than numbers or texts in {name}")
        size = math.prod(shape) * kind.itemsize
        if size > MAX_ARRAY_BYTES or min(shape, default=0) < 0:
            raise BadFile(shown(path), f"is too large: {name} has {size:,} bytes, the limit is {MAX_ARRAY_BYTES:,}")
        content = stream.read(size + 1)
    if len(content) != size:
        raise ValueError(f"{name} is shorter or longer than it says")
    if kind.kind == "U" and (np.frombuffer(content, dtype=f"{kind.byteorder}u4") > sys.maxunicode).any():
        raise ValueError(f"{name} holds texts with letters that do not exist")
    return np.frombuffer(content, dtype=kind).reshape(shape, order="F" if by_columns else "C")


class ReadImages(NamedTuple):
    """Many image files, read."""

    pixels: Tensor
    """(N, C, H, W) uint8; what could not be read is missing."""
    readable: list[int]
    """Which of the files asked for the N images are."""
    facts: list[ImageFacts]
    """What the headers of the N files say."""
    bad: list[BadFile]
    """What could not be read."""


def read_images(paths: Sequence[Path], *, image_shape: ImageShape, fit: str) -> ReadImages:
    """Read image files in parallel and go on past bad ones; otherwise as :func:`~torchcaps.data.images.read_image`."""

    def read(path: Path) -> tuple[Tensor, ImageFacts] | BadFile:
        try:
            return read_with_facts(path, image_shape=image_shape, fit=fit)
        except BadFile as error:
            return error

    pixels = torch.empty(len(paths), *image_shape, dtype=torch.uint8)
    result = ReadImages(pixels, [], [], [])
    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter's lock
        for number, outcome in enumerate(pool.map(read, paths)):
            if isinstance(outcome, BadFile):
                result.bad.append(outcome)
            else:
                pixels[len(result.readable)], facts = outcome
                result.readable.append(number)
                result.facts.append(facts)
    return result._replace(pixels=pixels[: len(result.readable)])
