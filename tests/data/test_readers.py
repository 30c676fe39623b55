import contextlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.data.files import BadFile
from torchcaps.data.readers import read_arrays, read_cifar, read_idx, read_idx_images, read_images
from torchcaps.errors import UserError


def idx(*shape: int) -> bytes:
    content = bytes(range(256)) * (int(np.prod(shape)) // 256 + 1)
    header = b"\0\0\x08" + bytes([len(shape)]) + b"".join(axis.to_bytes(4, "big") for axis in shape)
    return header + content[: int(np.prod(shape))]


@pytest.mark.parametrize("shape", [(7,), (5, 28, 28)])
def test_idx(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "file"
    path.write_bytes(idx(*shape))
    assert torch.equal(read_idx(path).flatten(), torch.arange(int(np.prod(shape))).to(torch.uint8))
    assert read_idx(path).shape == shape


WRONG_IDX = [
    b"\0\0\x08\xff" + b"\xff" * 1020,  # 255 axes whose product overflows
    b"\0\0\x08\3" + b"\x80\0\0\0" * 2 + b"\0\0\0\4",  # 2^64 bytes, 0 if counted carelessly
    b"\0\0\x08\1\0\0\0\0",  # nothing
    b"\0\0\x08\0x",
]


@pytest.mark.parametrize(
    "content", [b"", b"\0\0", idx(5, 28, 28)[:-1], idx(7) + b"x", b"\0\0\x0d" + idx(7)[3:], *WRONG_IDX]
)
def test_idx_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="not an IDX file"):
        read_idx(tmp_path / "file")


def test_cifar(tmp_path: Path) -> None:
    first = bytes([3]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes(range(256)) * 4
    second = bytes([9]) + bytes(3072)
    (tmp_path / "a.bin").write_bytes(first)
    (tmp_path / "b.bin").write_bytes(second + first)
    pixels, labels = read_cifar([tmp_path / "a.bin", tmp_path / "b.bin"])
    assert labels.tolist() == [3, 9, 3]
    assert pixels.shape == (3, 3, 32, 32)
    assert (pixels[0, 0] == 1).all()
    assert (pixels[2, 1] == 2).all()
    assert pixels[0, 2, 0].tolist() == list(range(32))  # row by row


@pytest.mark.parametrize("content", [b"", b"\3" * 3072, b"\3" * 3074, b"\x0a" + bytes(3072)])
def test_cifar_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.bin (is not a CIFAR-10 file|has a label 10)"):
        read_cifar([tmp_path / "a.bin"])
    with pytest.raises(UserError, match="does not exist"):
        read_cifar([tmp_path / "none.bin"])


def test_idx_images(tmp_path: Path) -> None:
    def write(name: str, *shape: int, most: int = 255) -> Path:
        content = idx(*shape)
        start = 4 + 4 * len(shape)
        (tmp_path / name).write_bytes(content[:start] + bytes(min(value, most) for value in content[start:]))
        return tmp_path / name

    def read(images: Path, labels: Path) -> tuple[torch.Tensor, torch.Tensor]:
        return read_idx_images(images, labels, image_shape=(1, 4, 4), classes=10)

    images, labels = write("images", 12, 4, 4), write("labels", 12, most=9)
    pixels, numbers = read(images, labels)
    assert pixels.shape == (12, 1, 4, 4)
    assert numbers.dtype == torch.int64
    for wrong_images, wrong_labels, problem in (
        (write("a", 12, 4, 5), labels, "4 x 5 pixels, not 4 x 4"),
        (write("b", 12), labels, "no pixels"),
        (images, write("c", 11, most=9), "11 labels for 12 images"),
        (images, write("d", 12, 1), "labels for"),
        (images, write("e", 12), "label 11, but there are 10"),
        (images, tmp_path / "none", "does not exist"),
        (images, tmp_path, "is a folder"),
    ):
        with pytest.raises(UserError, match=problem):
            read(wrong_images, wrong_labels)


def test_files_are_not_read_beyond_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)  # takes no space
    for read in (read_idx, lambda path: read_cifar([path])):
        with pytest.raises(BadFile, match="too large"):
            read(tmp_path / "huge")


class TestArrays:
    def test_what_was_saved(self, tmp_path: Path) -> None:
        numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        for save in (np.savez, np.savez_compressed):
            save(tmp_path / "x.npz", a=numbers, b=np.asfortranarray(numbers), c=np.array(["é", "bc"]), d=np.uint8(3))
            a, b, c, d = read_arrays(tmp_path / "x.npz", ["a", "b", "c", "d"])
            assert np.array_equal(a, numbers)
            assert np.array_equal(b, numbers)
            assert c.tolist() == ["é", "bc"]
            assert d.shape == ()

    def test_objects_are_never_made(self, tmp_path: Path) -> None:
        class Trap:
            def __reduce__(self) -> tuple[object, tuple[str]]:
                return (Path.touch, (tmp_path / "sprung",))

        np.savez(tmp_path / "x.npz", a=np.array([Trap()], dtype=object))
        with pytest.raises(UserError, match="something else than numbers"):
            read_arrays(tmp_path / "x.npz", ["a"])
        assert not (tmp_path / "sprung").exists()

    def test_a_bomb_is_not_unpacked(self, tmp_path: Path) -> None:
        header = str({"descr": "|u1", "fortran_order": False, "shape": (1 << 40,)}).ljust(117) + "\n"
        content = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode() + bytes(100)
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("a.npy", content)
        with pytest.raises(UserError, match="too large"):
            read_arrays(tmp_path / "x.npz", ["a"])

    def test_missing_and_damaged(self, tmp_path: Path) -> None:
        np.savez_compressed(tmp_path / "x.npz", a=np.arange(1000))
        with pytest.raises(UserError, match=r"no array b; it holds a"):
            read_arrays(tmp_path / "x.npz", ["a", "b"])
        (tmp_path / "text.npz").write_text("hello")
        with pytest.raises(UserError, match=r"not an \.npz file"):
            read_arrays(tmp_path / "text.npz", ["a"])
        whole = (tmp_path / "x.npz").read_bytes()
        generator = np.random.default_rng(0)
        for _ in range(300):
            damaged = bytearray(whole)
            for place in generator.integers(0, len(whole), 3):
                damaged[place] = generator.integers(0, 256)
            (tmp_path / "y.npz").write_bytes(damaged[: generator.integers(1, len(whole) + 1)])
            with contextlib.suppress(UserError):  # and nothing else
                read_arrays(tmp_path / "y.npz", ["a"])


def test_many_images_go_on_past_bad_ones(tmp_path: Path) -> None:
    for number in range(30):
        Image.new("L", (10, 10 + number), number).save(tmp_path / f"{number}.png")
    (tmp_path / "7.png").write_text("hello")
    (tmp_path / "8.png").unlink()
    paths = [tmp_path / f"{number}.png" for number in range(30)]
    read = read_images(paths, image_shape=(1, 8, 8), fit="stretch")
    assert [file.name for file in read.bad] == [str(paths[7]), str(paths[8])]
    assert read.readable == [*range(7), *range(9, 30)]
    assert read.pixels[:, 0, 0, 0].tolist() == read.readable
    assert [facts.height for facts in read.facts] == [10 + number for number in read.readable]
    assert read_images([], image_shape=(1, 8, 8), fit="stretch").pixels.shape == (0, 1, 8, 8)
