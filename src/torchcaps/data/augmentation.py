"""Random changes of training images, and the views of an image that evaluation can average over.

Everything is computed on bytes, in whole numbers: an image comes out the same in a batch of any size, on any number of
processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torchcaps.data import stateless
from torchcaps.data.config import AugmentationConfig
from torchcaps.data.images import ImageShape
from torchcaps.data.splits import Batch, cut, shape_of
from torchcaps.settings import SettingError

VIEWS = ("flip", "shift")


class Augmentation:
    """Changes a whole batch at once. What comes from outside of an image is zero.

    Args:
        config: which changes, and how strong. Without one, nothing is changed.
    """

    def __init__(self, config: AugmentationConfig | None = None) -> None:
        self.config = config or AugmentationConfig(shift=0)

    def image_shape(self, shape: ImageShape) -> ImageShape:
        """The shape of images of this shape once they are augmented."""
        channels, height, width = shape
        crop = self.config.crop
        if crop > min(height, width):
            raise SettingError("crop", f"is too large: cannot crop {crop} x {crop} pixels out of {height} x {width}")
        return channels, crop or height, crop or width

    def __call__(self, batch: Batch, *, seed: int, epoch: int, positions: Tensor, indices: Tensor) -> Batch:
        """The batch as seen in training.

        Args:
            batch: images as bytes.
            seed, epoch, positions: what the changes are drawn from; positions (B,) are places in the epoch's order.
            indices: (B,) the numbers of the images in their split.
        """

        def drawn(what: str, high: int) -> Tensor:  # (B,) integers in [0, high)
            return stateless.random_integers(stateless.key(seed, epoch, what), positions, high)

        def spread(what: str) -> Tensor:  # (B,) numbers in [-1, 1)
            return stateless.random_uniform(stateless.key(seed, epoch, what), positions)

        config = self.config
        planes = _to_planes(batch)
        if config.rotate or config.scale:
            planes = turn(planes, spread("rotate") * config.rotate, 1 + spread("scale") * config.scale)
        if config.flip != "none":
            if config.flip == "random":
                mirrored = drawn("flip", 2)
            else:
                mirrored = (stateless.random_integers(stateless.key(seed, "alternate"), indices, 2) + epoch) % 2
            planes = torch.where(mirrored.bool()[:, None, None, None], planes.flip(3), planes)
        if config.shift or config.crop:
            planes = F.pad(planes, [config.shift] * 4)
            _, height, width = self.image_shape(shape_of(batch.images))
            top = drawn("top", planes.shape[2] - height + 1)
            left = drawn("left", planes.shape[3] - width + 1)
            planes = cut(planes, top, left, (height, width))
        if config.brightness or config.contrast:
            brightness, contrast = spread("brightness") * config.brightness, spread("contrast") * config.contrast
            planes = relight(planes, batch.images.shape[1], brightness, 1 + contrast)
        if config.cutout:
            row, column = drawn("cutout row", planes.shape[2]), drawn("cutout column", planes.shape[3])
            planes = blank(planes, row, column, config.cutout)
        return self._finished(_from_planes(planes, batch))

    def centre(self, batch: Batch) -> Batch:
        """The batch as seen in evaluation: the centre of each image if training crops, else the image itself."""
        return self._finished(self._window(batch, 0, 0))

    def views(self, batch: Batch, kinds: Sequence[str]) -> Iterator[Batch]:
        """The batch as seen in evaluation, then changed versions of it, to average a network's answers over.

        Args:
            batch: images as bytes, as a split gives them.
            kinds: "flip" adds the mirrored images, "shift" the images moved by a pixel up, down, left and right.
        """
        for kind in kinds:
            if kind not in VIEWS:
                raise SettingError("views", f"must be among {', '.join(VIEWS)}, not {kind!r}")
        yield self.centre(batch)
        if "flip" in kinds:
            yield self.centre(_from_planes(_to_planes(batch).flip(3), batch))
        if "shift" in kinds:
            for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                yield self._finished(self._window(batch, down, right))

    def _window(self, batch: Batch, down: int, right: int) -> Batch:
        """The centre of the images, moved so that what they show moves by that many pixels down and right."""
        _, height, width = self.image_shape(shape_of(batch.images))
        full_height, full_width = batch.images.shape[2:]
        if (height, width, down, right) == (full_height, full_width, 0, 0):
            return batch
        planes = F.pad(_to_planes(batch), [1] * 4)
        top, left = 1 + (full_height - height) // 2 - down, 1 + (full_width - width) // 2 - right
        return _from_planes(planes[:, :, top : top + height, left : left + width], batch)

    def _finished(self, batch: Batch) -> Batch:
        # The parts stay as they are: a decoder draws pixels in [0, 1].
        return batch._replace(images=standardised(batch.images)) if self.config.standardise else batch


def _to_planes(batch: Batch) -> Tensor:
    """All pictures of an image, whole and parts, as planes (B, M, H, W), so that they are changed alike."""
    if batch.parts.shape[1] == 1:
        return batch.images
    return torch.cat([batch.images[:, None], batch.parts], dim=1).flatten(1, 2)


def _from_planes(planes: Tensor, batch: Batch) -> Batch:
    if batch.parts.shape[1] == 1:
        return Batch(planes, batch.labels, planes[:, None])
    size, channels = batch.images.shape[:2]
    pictures = planes.reshape(size, -1, channels, *planes.shape[2:])  # (B, 1 + P, C, H, W)
    return Batch(pictures[:, 0], batch.labels, pictures[:, 1:])


def standardised(images: Tensor) -> Tensor:
    """Each image less its mean and divided by its standard deviation, over all its pixels and channels.

    An image of one colour becomes zero. The sums are whole numbers, so their order does not matter.

    Args:
        images: (B, C, H, W) uint8.

    Returns:
        (B, C, H, W) float32.
    """
    count = math.prod(images.shape[1:])
    values = images.flatten(1).long()
    total, squares = values.sum(1), (values * values).sum(1)
    mean = total.double() / count
    deviation = (squares * count - total * total).double().sqrt() / count
    factor = 1 / deviation.clamp_min(1 / math.sqrt(count))
    return (images.double() - mean[:, None, None, None]).mul_(factor[:, None, None, None]).float()


def relight(planes: Tensor, channels: int, brightness: Tensor, contrast: Tensor) -> Tensor:
    """Change brightness and contrast of each image by its own amounts.

    Each channel keeps its mean but for the brightness. Parts of an image change exactly as the image itself does.

    Args:
        planes: (B, M, H, W) uint8, of which the first ``channels`` are the image.
        brightness: (B,) what is added, as a fraction of the range.
        contrast: (B,) what the distance to the mean is multiplied with.
    """
    count = planes.shape[2] * planes.shape[3]
    pictures = planes.reshape(len(planes), -1, channels, *planes.shape[2:]).int()  # (B, 1 + P, C, H, W)
    mean = (pictures[:, :1].sum((3, 4), keepdim=True) * 256 // count).int()  # in 1/256
    factor = (contrast * 1024).round().int()[:, None, None, None, None]
    added = (brightness * 255 * 256 * 1024).round().int()[:, None, None, None, None]
    changed = ((pictures * 256 - mean) * factor + mean * 1024 + added + (1 << 17)) >> 18
    return changed.clamp_(0, 255).to(torch.uint8).flatten(1, 2)


def blank(planes: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Zero in each image the square of this side around its own (row, column)."""

    def inside(centre: Tensor, length: int) -> Tensor:
        distance = torch.arange(length) - centre[:, None] + side // 2
        return (distance >= 0) & (distance < side)  # (B, length)

    rows, columns = inside(row, planes.shape[2]), inside(column, planes.shape[3])
    return planes.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)


def turn(planes: Tensor, degrees: Tensor, scale: Tensor) -> Tensor:
    """Rotate and scale each image about its centre by its own amounts, with bilinear interpolation.

    In whole numbers (1/65536 pixel): floats could differ in the last bit with the size of the batch, and
    with it from one number of processes to another.
    """
    batch, _, height, width = planes.shape
    angle = torch.deg2rad(degrees.double())
    cosine = (torch.cos(angle) / scale * 65536).round().int()[:, None, None]
    sine = (torch.sin(angle) / scale * 65536).round().int()[:, None, None]
    down = torch.arange(1 - height, height, 2, dtype=torch.int32)[:, None]  # twice the distance to the centre
    across = torch.arange(1 - width, width, 2, dtype=torch.int32)
    y = (cosine * down + sine * across + (height - 1) * 65536) >> 1  # (B, H, W): where the pixel comes from
    x = (cosine * across - sine * down + (width - 1) * 65536) >> 1

    # A rim of zeros catches all that lies outside. The four neighbours of a place are packed into one
    # number, so that each place is looked up once instead of four times.
    padded = F.pad(planes, [2] * 4).int()
    pairs = padded[..., :-1] | padded[..., 1:] << 8
    squares = (pairs[..., :-1, :] | pairs[..., 1:, :] << 16).flatten(2)  # (B, M, (H + 3) * (W + 3))
    rows, columns = (y >> 16).clamp(-2, height) + 2, (x >> 16).clamp(-2, width) + 2
    index = (rows * (width + 3) + columns).view(batch, 1, -1).long().expand(-1, planes.shape[1], -1)
    found = squares.gather(2, index).view_as(planes)

    wy, wx = ((y & 0xFFFF) >> 8)[:, None], ((x & 0xFFFF) >> 8)[:, None]
    upper = (found & 255) * (256 - wx) + (found >> 8 & 255) * wx
    lower = (found >> 16 & 255) * (256 - wx) + (found >> 24 & 255) * wx
    return ((upper * (256 - wy) + lower * wy + 32768) >> 16).to(torch.uint8)
