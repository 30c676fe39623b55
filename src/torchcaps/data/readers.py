"""From files to tensors of bytes: IDX (MNIST), the CIFAR-10 binary layout, and image files of any kind."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from torchcaps.errors import UserError

IMAGE_ENDINGS = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif"),
    *(".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".pnm"),
)
FITS = ("stretch", "pad", "crop")


def read_idx(path: Path) -> Tensor:
    """An IDX file of bytes: two zeros, the type (8), the number of axes, the axes, the content."""
    content = bytearray(path.read_bytes())
    axes = content[3] if content[:3] == b"\0\0\x08" else 0
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes)]
    start = 4 + 4 * axes
    if not axes or len(content) != start + int(np.prod(shape)):
        raise UserError(f"{path} is not an IDX file of bytes")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def read_cifar(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
    """CIFAR-10 binary files: pixels (N, 3, 32, 32) and labels (N,)."""
    content = bytearray().join(path.read_bytes() for path in paths)
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def read_image(path: Path, *, image_shape: tuple[int, int, int], fit: str = "stretch") -> Tensor:
    """An image file of any size and mode as (C, H, W) uint8, grey if C is 1, else red, green and blue.

    fit: "stretch" changes the proportions, "pad" adds black bars, "crop" cuts off what is too much.
    """
    channels, height, width = image_shape
    if fit not in FITS:
        raise UserError(f"unknown fit '{fit}'; valid ones are: {', '.join(FITS)}")
    try:
        with Image.open(path) as file:
            image = _plain(file).convert("L" if channels == 1 else "RGB")
        image = _fitted(image, (width, height), fit)
    except Image.DecompressionBombError as error:
        raise UserError(f"{path} is too large to be read safely ({error}); make it smaller") from error
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # what Pillow raises for damaged files
        raise UserError(f"{path} is not an image that can be read ({_first_line(error)})") from error
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1).contiguous()


def _plain(image: Image.Image) -> Image.Image:
    """The image as L or RGB: upright, 8 bits, white where it was transparent."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):  # 16 bits; Pillow's own conversion would clip instead of scaling
        return Image.fromarray((np.asarray(upright).clip(0, 65535) >> 8).astype(np.uint8))
    if upright.mode == "F":
        values = np.asarray(upright)
        return Image.fromarray((values * (255 if values.max() <= 1 else 1)).clip(0, 255).astype(np.uint8))
    if upright.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in upright.info:
        alpha = upright.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", alpha.size, "white"), alpha).convert("RGB")
    return upright if upright.mode == "L" else upright.convert("RGB")


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


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def class_names(folder: Path) -> tuple[str, ...]:
    """The sub-folders of a folder, each the images of one class, in sorted order."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UserError(f"the image folder {folder} {what}")
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not _hidden(path.name)))
    if not names:
        found = "holds only files" if any(folder.iterdir()) else "is empty"
        raise UserError(f"the image folder {folder} {found}; put the images of each class in their own sub-folder")
    if len(names) == 1:
        raise UserError(f"the image folder {folder} has only the class '{names[0]}'; at least 2 are needed")
    return names


def read_folder(
    folder: Path, classes: Sequence[str], *, image_size: int, channels: int | None, fit: str
) -> tuple[Tensor, Tensor]:
    """The images of a folder with a sub-folder per class: pixels (N, C, H, W) and labels (N,).

    Without a wish for `channels` there are 3 if any image has colour, else 1.
    """
    files = [_images_in(folder / name) for name in classes]
    paths = [path for group in files for path in group]
    labels = torch.tensor([label for label, group in enumerate(files) for _ in group])
    shape = (channels or 3, image_size, image_size)
    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter's lock
        images = list(pool.map(lambda path: read_image(path, image_shape=shape, fit=fit), paths))
    pixels = torch.stack(images)
    if channels is None and bool((pixels == pixels[:, :1]).all()):
        pixels = pixels[:, :1].contiguous()
    return pixels, labels


def _images_in(folder: Path) -> list[Path]:
    inside = [path for path in sorted(folder.iterdir()) if not _hidden(path.name)]
    images = [path for path in inside if path.suffix.lower() in IMAGE_ENDINGS and path.is_file()]
    if not images:
        found = f"only things like {inside[0].name}" if inside else "nothing"
        raise UserError(
            f"the class folder {folder} has no images (found {found}); "
            f"add some with one of the endings {' '.join(IMAGE_ENDINGS)}, or remove the folder"
        )
    return images


def _hidden(name: str) -> bool:
    return name.startswith(".")
