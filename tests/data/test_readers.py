from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.data.readers import class_names, read_cifar, read_folder, read_idx, read_image
from torchcaps.errors import UserError

RED, GREY = (200, 40, 20), 90


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


@pytest.mark.parametrize("content", [b"", b"\0\0", idx(5, 28, 28)[:-1], idx(7) + b"x", b"\0\0\x0d" + idx(7)[3:]])
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


def file_of(folder: Path, mode: str) -> tuple[Path, int | tuple[int, int, int]]:
    """A one-coloured image file in a mode, and the colour it should be read as."""
    size = (20, 10)
    if mode == "1":
        Image.new("1", size, 1).save(folder / "x.png")
        return folder / "x.png", 255
    if mode == "L":
        Image.new("L", size, GREY).save(folder / "x.png")
        return folder / "x.png", GREY
    if mode == "I;16":
        Image.fromarray(np.full(size[::-1], GREY << 8 | 17, dtype=np.uint16)).save(folder / "x.png")
        return folder / "x.png", GREY
    if mode == "F":
        Image.fromarray(np.full(size[::-1], GREY / 255 + 1e-4, dtype=np.float32)).save(folder / "x.tif")
        return folder / "x.tif", GREY
    if mode == "LA":
        Image.new("LA", size, (0, 0)).save(folder / "x.png")
        return folder / "x.png", 255
    if mode == "RGBA":
        Image.new("RGBA", size, (*RED, 128)).save(folder / "x.png")
        return folder / "x.png", (227, 147, 137)  # half way to white
    if mode == "P":
        Image.new("RGB", size, RED).quantize(4).save(folder / "x.gif")
        return folder / "x.gif", RED
    if mode == "P transparent":
        Image.new("P", size, 0).save(folder / "x.png", transparency=0)
        return folder / "x.png", 255
    if mode == "RGB transparent":
        Image.new("RGB", size, RED).save(folder / "x.png", transparency=RED)
        return folder / "x.png", 255
    if mode == "CMYK":
        Image.new("CMYK", size, (0, 255, 255, 0)).save(folder / "x.tif")
        return folder / "x.tif", (255, 0, 0)
    Image.new("RGB", size, RED).save(folder / "x.bmp")
    return folder / "x.bmp", RED


MODES = ["1", "L", "I;16", "F", "LA", "RGB", "RGBA", "P", "P transparent", "RGB transparent", "CMYK"]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_read_as_its_colour(tmp_path: Path, mode: str) -> None:
    path, colour = file_of(tmp_path, mode)
    red, green, blue = (colour,) * 3 if isinstance(colour, int) else colour
    pixels = read_image(path, image_shape=(3, 8, 9))
    assert pixels.dtype == torch.uint8
    expected = torch.tensor([red, green, blue])[:, None, None].expand(3, 8, 9)
    assert (pixels.int() - expected).abs().max() <= 1

    grey = read_image(path, image_shape=(1, 8, 9))
    assert grey.shape == (1, 8, 9)
    assert abs(int(grey[0, 0, 0]) - (0.299 * red + 0.587 * green + 0.114 * blue)) <= 1.5


def test_exif_orientation_is_obeyed(tmp_path: Path) -> None:
    lying = Image.new("L", (20, 10))
    lying.paste(255, (0, 0, 10, 10))  # the left half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn me clockwise to look at me"
    lying.save(tmp_path / "x.jpg", exif=exif, quality=95)
    pixels = read_image(tmp_path / "x.jpg", image_shape=(1, 20, 10))
    assert pixels[0, :8].min() > 240  # now the upper half
    assert pixels[0, 12:].max() < 15


def test_fits(tmp_path: Path) -> None:
    wide = Image.new("L", (40, 10), 100)
    wide.paste(200, (0, 0, 12, 10))
    wide.save(tmp_path / "x.png")

    def read(fit: str) -> torch.Tensor:
        return read_image(tmp_path / "x.png", image_shape=(1, 20, 20), fit=fit)[0]

    assert read("stretch")[:, :5].float().mean() > 195
    padded = read("pad")
    assert (padded[:7] == 0).all()
    assert (padded[13:] == 0).all()
    assert padded[8:12].min() > 90
    assert ((read("crop") < 110) & (read("crop") > 90)).all()  # the 10 columns in the middle
    with pytest.raises(UserError, match="stretch, pad, crop"):
        read("squash")


def test_a_line_of_one_pixel_can_be_padded(tmp_path: Path) -> None:
    Image.new("L", (1000, 1), 255).save(tmp_path / "x.png")
    assert read_image(tmp_path / "x.png", image_shape=(1, 8, 8), fit="pad").sum() == 8 * 255


def test_unreadable_images_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.jpg").write_bytes(b"")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.png")
    (tmp_path / "short.png").write_bytes((tmp_path / "whole.png").read_bytes()[:3000])
    Image.fromarray(noise).save(tmp_path / "whole.jpg")
    (tmp_path / "short.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:2000])
    for name in ("text.png", "empty.jpg", "short.png", "short.jpg"):
        with pytest.raises(UserError, match=name):
            read_image(tmp_path / name, image_shape=(1, 8, 8))
    with pytest.raises(UserError, match="no file"):
        read_image(tmp_path / "none.png", image_shape=(1, 8, 8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UserError, match=r"whole.*too large"):
        read_image(tmp_path / "whole.png", image_shape=(1, 8, 8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, name in enumerate(("cats", "dogs")):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("RGB", (10 + i, 20), (label * 100, label * 100, label * 100)).save(tmp_path / name / f"{i}.PNG")
        (tmp_path / name / ".hidden.png").write_text("not an image")
        (tmp_path / name / "notes.txt").write_text("not an image either")
    (tmp_path / ".git").mkdir()
    return tmp_path


def test_folder(folder: Path) -> None:
    classes = class_names(folder)
    assert classes == ("cats", "dogs")
    pixels, labels = read_folder(folder, classes, image_size=8, channels=None, fit="stretch")
    assert pixels.shape == (6, 1, 8, 8)  # no colour anywhere
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (pixels[:3] == 0).all()
    assert (pixels[3:] == 100).all()
    assert read_folder(folder, classes, image_size=8, channels=3, fit="stretch")[0].shape == (6, 3, 8, 8)

    Image.new("RGB", (9, 9), RED).save(folder / "dogs" / "red.jpg")
    assert read_folder(folder, classes, image_size=8, channels=None, fit="stretch")[0].shape == (7, 3, 8, 8)
    assert read_folder(folder, classes, image_size=8, channels=1, fit="stretch")[0].shape == (7, 1, 8, 8)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        class_names(tmp_path / "none")
    with pytest.raises(UserError, match="is empty"):
        class_names(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="holds only files"):
        class_names(tmp_path)
    with pytest.raises(UserError, match="a file, not a folder"):
        class_names(tmp_path / "file")
    (tmp_path / "cats").mkdir()
    with pytest.raises(UserError, match="only the class 'cats'"):
        class_names(tmp_path)


def test_class_without_images(folder: Path) -> None:
    (folder / "birds").mkdir()
    (folder / "birds" / ".DS_Store").write_text("x")
    with pytest.raises(UserError, match=r"birds has no images \(found nothing\)"):
        read_folder(folder, class_names(folder), image_size=8, channels=None, fit="stretch")
    (folder / "birds" / "a.svg").write_text("x")
    with pytest.raises(UserError, match=r"found only things like a\.svg"):
        read_folder(folder, class_names(folder), image_size=8, channels=None, fit="stretch")


def test_folder_with_a_broken_image_names_it(folder: Path) -> None:
    (folder / "dogs" / "broken.jpg").write_bytes(b"\xff\xd8\xff not really")
    with pytest.raises(UserError, match=r"dogs.broken\.jpg"):
        read_folder(folder, class_names(folder), image_size=8, channels=None, fit="stretch")
