"""The one reader of image files. What it is given may be damaged or made to do harm.

Only the formats of :data:`FORMATS` are tried, only regular files are opened, and the size is checked in the header
before a pixel is decoded. Whatever goes wrong is one :class:`~torchcaps.data.files.BadFile`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from torchcaps.data.config import FITS
from torchcaps.data.files import BadFile, open_regular, read_bytes, shown
from torchcaps.settings import SettingError

logging.getLogger("PIL").addHandler(logging.NullHandler())  # what is wrong with an image is told once, by us

ImageShape = tuple[int, int, int]  # (C, H, W)

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".pnm")
MAX_PIXELS = 50_000_000
MAX_BYTES = 256 << 20
_LARGE = 4_000_000  # pixels from which images are decoded one at a time, so that threads do not add up their memory
_ORIENTATION = 0x0112  # an EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_ITS_SIDE = (5, 6, 7, 8)


class ImageFacts(NamedTuple):
    """What the header of an image file says."""

    width: int
    height: int
    mode: str  # as Pillow calls it: "L" is grey, "RGB" colour, "RGBA" colour with transparency


def read_image(path: Path, *, image_shape: ImageShape, fit: str = "stretch") -> Tensor:
    """An image file of any size and mode as pixels.

    Args:
        path: a PNG, JPEG, GIF, BMP, TIFF, WebP or PPM file. Of several frames, the first is taken.
        image_shape: (C, H, W) of the result: grey if C is 1, red, green and blue if it is 3.
        fit: "stretch" changes the proportions, "pad" adds black bars, "crop" cuts off what is too much.

    Returns:
        (C, H, W) uint8, upright and white where it was transparent.

    Raises:
        BadFile: the file cannot be read, is too large, damaged, or no image.
    """
    return read_with_facts(path, image_shape=image_shape, fit=fit)[0]


def read_with_facts(path: Path, *, image_shape: ImageShape, fit: str) -> tuple[Tensor, ImageFacts]:
    """As :func:`read_image`, with what the header says."""
    return _decode(read_bytes(path, MAX_BYTES), name=shown(path), image_shape=image_shape, fit=fit)


def decode_image(
    data: bytes | bytearray, *, image_shape: ImageShape, fit: str = "stretch", name: str = "the image"
) -> Tensor:
    """As :func:`read_image`, from the bytes of a file. ``name`` is what an error calls it."""
    return _decode(data, name=name, image_shape=image_shape, fit=fit)[0]


def _decode(data: bytes | bytearray, *, name: str, image_shape: ImageShape, fit: str) -> tuple[Tensor, ImageFacts]:
    """As :func:`decode_image`, with what the header says."""
    channels, height, width = image_shape
    if fit not in FITS:
        raise SettingError("fit", f"must be one of {', '.join(FITS)}, not {fit!r}")
    if channels not in (1, 3):
        raise SettingError("image_shape", f"must have 1 channel (grey) or 3 (colour), not {channels}")
    if len(data) > MAX_BYTES:
        raise BadFile(name, f"is too large: it has {len(data):,} bytes, the limit is {MAX_BYTES:,}")
    with _opened(io.BytesIO(data), name) as (image, facts):
        image.draft(None, (2 * width, 2 * height))  # JPEG can be decoded at 1/2, 1/4 or 1/8 of its size
        image.load()
        upright = _upright(_reduced(image, (4 * width, 4 * height)), _orientation(image))
        fitted = _fitted(_plain(upright).convert("L" if channels == 1 else "RGB"), (width, height), fit)
        pixels = torch.from_numpy(np.array(fitted))
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1).contiguous(), facts


def read_whole(path: Path) -> tuple[Image.Image, ImageFacts]:
    """An image file at its full size, upright, in mode L or RGB, and what its header says."""
    with _opened(io.BytesIO(read_bytes(path, MAX_BYTES)), shown(path)) as (image, facts):
        image.load()
        return _plain(_upright(image, _orientation(image))), facts


def image_facts(path: Path) -> ImageFacts:
    """What the header of an image file says; nothing is decoded."""
    with open_regular(path) as stream, _opened(stream, shown(path)) as (_, facts):
        return facts


@contextlib.contextmanager
def _opened(stream: IO[bytes], name: str) -> Iterator[tuple[Image.Image, ImageFacts]]:
    """Open an image and check its size. Whatever Pillow raises inside becomes a `BadFile`."""
    try:
        with _QUIET, Image.open(stream, formats=FORMATS) as image:
            pixels = image.width * image.height
            if pixels > MAX_PIXELS:
                raise BadFile(name, f"is too large: it has {pixels:,} pixels, the limit is {MAX_PIXELS:,}")
            with _ONE_LARGE_IMAGE if pixels > _LARGE else contextlib.nullcontext():
                turned = _orientation(image) in _ON_ITS_SIDE
                yield image, ImageFacts(*(image.size[::-1] if turned else image.size), image.mode)
    except BadFile:
        raise
    except Image.DecompressionBombError as error:
        raise BadFile(name, "is too large to be read safely; make it smaller") from error
    except Exception as error:  # damaged files make Pillow raise nearly anything
        raise BadFile(name, f"is not an image that can be read ({_in_short(error)})") from error


class _Quiet:
    """While any thread is inside, warnings from Pillow are dropped.

    `warnings.catch_warnings` puts back what it found, which goes wrong if threads enter and leave it crosswise. So
    only the first to enter and the last to leave use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._catcher = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._catcher = warnings.catch_warnings()
                self._catcher.__enter__()
                warnings.filterwarnings("ignore", module="PIL")
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._catcher.__exit__(None, None, None)


_QUIET = _Quiet()
_ONE_LARGE_IMAGE = threading.Lock()


def _in_short(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"it is none of {', '.join(FORMATS)}"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    return shown(str(error).strip().split("\n")[0][:200]) or type(error).__name__


def _reduced(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """A large image averaged down to about this size or more, so that all that follows needs little memory."""
    factor = min(image.width // size[0], image.height // size[1])
    if factor < 2 or image.mode not in ("L", "LA", "RGB", "RGBA", "CMYK") or "transparency" in image.info:
        return image
    return image.reduce(factor)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF data; the pixels may be fine
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _plain(image: Image.Image) -> Image.Image:
    """The image as L or RGB: 8 bits, white where it was transparent."""
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion would clip instead of scaling
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        return Image.fromarray((values.clip(0, 255) * (255 if values.max() <= 1 else 1)).astype(np.uint8))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        alpha = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", alpha.size, "white"), alpha).convert("RGB")
    return image if image.mode == "L" else image.convert("RGB")


def _fitted(image: Image.Image, size: tuple[int, int], fit: str) -> Image.Image:
    smooth = Image.Resampling.BICUBIC
    if fit == "crop":
        return ImageOps.fit(image, size, smooth)
    if fit == "stretch":
        return image.resize(size, smooth)
    ratio = min(size[0] / image.width, size[1] / image.height)
    inner = max(1, round(image.width * ratio)), max(1, round(image.height * ratio))
    canvas = Image.new(image.mode, size)
    canvas.paste(image.resize(inner, smooth), ((size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2))
    return canvas
