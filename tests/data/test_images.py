import io
import os
import random
import stat
import struct
import subprocess
import threading
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.data import images
from torchcaps.data.files import BadFile
from torchcaps.data.images import FORMATS, decode_image, image_facts, read_image
from torchcaps.errors import UserError
from torchcaps.settings import SettingError

RED, GREY = (200, 40, 20), 90


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
    with pytest.raises(SettingError, match="stretch, pad, crop"):
        read("squash")
    with pytest.raises(SettingError, match="not 4"):
        read_image(tmp_path / "x.png", image_shape=(4, 20, 20))


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
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)  # Pillow would only warn
    monkeypatch.setattr(images, "MAX_PIXELS", 4000)
    with pytest.raises(UserError, match=r"whole.*too large: it has 4,096 pixels, the limit is 4,000"):
        read_image(tmp_path / "whole.png", image_shape=(1, 8, 8))
    monkeypatch.setattr(images, "MAX_BYTES", 1000)
    with pytest.raises(UserError, match=r"whole.*too large: it has .* bytes, the limit is 1,000"):
        read_image(tmp_path / "whole.png", image_shape=(1, 8, 8))


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def noise(width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_from_bytes_and_from_files(tmp_path: Path, form: str) -> None:
    data = encoded(Image.new("RGB", (40, 30), RED), form)
    pixels = decode_image(data, image_shape=(3, 5, 6))
    assert (pixels.int() - torch.tensor(RED)[:, None, None]).abs().max() <= 3
    (tmp_path / "x.any").write_bytes(data)
    assert torch.equal(read_image(tmp_path / "x.any", image_shape=(3, 5, 6)), pixels)
    assert image_facts(tmp_path / "x.any")[:2] == (40, 30)


def test_no_other_format_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EPS file would start Ghostscript."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    (tmp_path / "x.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\n(/tmp/x) (w) file\nshowpage\n%%EOF\n"
    )
    with pytest.raises(BadFile, match="none of PNG, JPEG"):
        read_image(tmp_path / "x.png", image_shape=(3, 5, 6))
    for form in ("ICO", "TGA", "PCX", "SGI", "PDF"):
        with pytest.raises(BadFile):
            decode_image(encoded(noise(), form), image_shape=(3, 5, 6))


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "pipe.png")
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    for name, problem in (
        ("pipe.png", "not a regular file"),
        ("link.png", "not a regular file"),
        ("dangling.png", "does not exist"),
        ("loop.png", "cannot be read"),
        (".", "is a folder"),
        ("a\0b.png", "null"),
    ):
        with pytest.raises(BadFile, match=problem):  # and does not wait
            read_image(tmp_path / name, image_shape=(3, 5, 6))
    if Path("/dev/zero").exists():
        with pytest.raises(BadFile, match="not a regular file"):
            read_image(Path("/dev/zero"), image_shape=(3, 5, 6))
    noise().save(tmp_path / "good.png")
    (tmp_path / "to-good").symlink_to(tmp_path / "good.png")
    assert stat.S_ISLNK(os.lstat(tmp_path / "to-good").st_mode)
    assert read_image(tmp_path / "to-good", image_shape=(3, 5, 6)).shape == (3, 5, 6)


def png(width: int, height: int, content: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def test_a_bomb_is_refused_by_its_header() -> None:
    bomb = png(30_000, 30_000, zlib.compress(bytes(1 << 20)))
    between = png(10_000, 9_500, zlib.compress(b""))  # Pillow would only warn about it
    tracemalloc.start()
    for data in (bomb, between):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(BadFile, match="too large"):
                decode_image(data, image_shape=(3, 32, 32))
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_large_images_are_reduced_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = Image.linear_gradient("L").resize((2000, 1600)).convert("RGB")
    small = gradient.resize((20, 20), Image.Resampling.BICUBIC)
    expected = torch.from_numpy(np.array(small)).permute(2, 0, 1).int()
    sizes: list[tuple[int, int]] = []
    fitted = images._fitted

    def noting(image: Image.Image, size: tuple[int, int], fit: str) -> Image.Image:
        sizes.append(image.size)
        return fitted(image, size, fit)

    monkeypatch.setattr(images, "_fitted", noting)
    for form in ("PNG", "JPEG"):
        pixels = decode_image(encoded(gradient, form), image_shape=(3, 20, 20))
        assert (pixels.int() - expected).abs().max() <= 3
    assert all(width <= 300 for width, _ in sizes)
    assert len(sizes) == 2


@pytest.mark.parametrize("form", ["GIF", "TIFF", "WEBP", "PNG"])
def test_of_several_frames_the_first(form: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, (0, 0, 255), (0, 255, 0))]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert (decode_image(data, image_shape=(3, 8, 8)).int() - torch.tensor(RED)[:, None, None]).abs().max() <= 8


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_every_orientation_in_every_format(form: str, orientation: int) -> None:
    picture = Image.new("L", (32, 16))
    picture.paste(255, (0, 0, 16, 8))
    picture.paste(128, (16, 0, 32, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = decode_image(encoded(picture.convert("RGB"), form, exif=exif), image_shape=(1, 8, 8))[0].int()
    corners = [int(turned[row, column]) for row in (1, -2) for column in (1, -2)]
    expected = {
        1: [255, 128, 0, 0],
        2: [128, 255, 0, 0],
        3: [0, 0, 128, 255],
        4: [0, 0, 255, 128],
        5: [255, 0, 128, 0],
        6: [0, 255, 0, 128],
        7: [0, 128, 0, 255],
        8: [128, 0, 255, 0],
    }[orientation]
    assert max(abs(found - right) for found, right in zip(corners, expected)) < 30


def test_not_a_number_in_a_float_image() -> None:
    values = np.full((8, 8), np.nan, dtype=np.float32)
    values[:, 4:] = 0.5
    values[0, 0] = np.inf
    assert decode_image(encoded(Image.fromarray(values), "TIFF"), image_shape=(1, 8, 8)).shape == (1, 8, 8)


def test_warnings_of_pillow_stay_inside_also_with_threads() -> None:
    palette = Image.new("P", (40, 30))
    data = encoded(palette, "PNG", transparency=bytes(range(256)))  # Pillow warns when it is converted
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: decode_image(data, image_shape=(3, 8, 8)), range(200)))
    assert warnings.filters == before
    assert threading.active_count() < 50


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_images_are_read_or_refused(form: str) -> None:
    """Whatever the bytes are, the outcome is pixels or the project's own error."""
    whole = encoded(noise(), form)
    generator = random.Random(form)
    reasons = []
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(generator.choice((0, 1, 1, 3, 30))):
            data[generator.randrange(min(len(data), generator.choice((30, 200, 10**6))))] = generator.randrange(256)
        if generator.random() < 0.5:
            del data[generator.randrange(1, len(data)) :]
        try:
            assert decode_image(data, image_shape=(3, 8, 8)).shape == (3, 8, 8)
        except BadFile as error:
            reasons.append(error.reason)
    assert len(reasons) > 100
    assert all(reasons)


def test_random_bytes_are_refused() -> None:
    generator = random.Random(0)
    for length in (0, 1, 2, 10, 100, 1000):
        for start in (
            b"",
            b"\x89PNG\r\n\x1a\n",
            b"\xff\xd8\xff",
            b"GIF89a",
            b"BM",
            b"II*\0",
            b"RIFF\0\0\0\0WEBP",
            b"P6\n",
        ):
            with pytest.raises(BadFile):
                decode_image(start + generator.randbytes(length), image_shape=(3, 8, 8))
