"""From images in memory to batches: which images, in what order, changed how.

`Split` -> `Batches.at(step)` -> `Augmentation` -> `Batch.on(device)`. Images stay bytes until the last step.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchcaps.data import stateless
from torchcaps.errors import UserError

Shape = tuple[int, int, int]  # (C, H, W)


class Batch(NamedTuple):
    """Some images with the classes that are in them (K of them in every image)."""

    images: Tensor  # (B, C, H, W) uint8; float32 in [0, 1] after `on`
    labels: Tensor  # (B, K) int64
    parts: Tensor  # (B, K, C, H, W): what each class present looks like alone

    def on(self, device: torch.device | str) -> "Batch":
        """The batch on a device as float32 in [0, 1]. Bytes travel, floats are made there."""
        images = _as_float(self.images.to(device))
        alone = self.labels.shape[1] == 1
        parts = images[:, None] if alone else _as_float(self.parts.to(device))
        return Batch(images, self.labels.to(device), parts)


def _as_float(images: Tensor) -> Tensor:
    return images.float().div_(255) if images.dtype == torch.uint8 else images


class Split(ABC):
    """One part of a data set (train, validation or test)."""

    labels_per_image: int
    image_shape: Shape

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: Tensor) -> Batch:
        """The images with these numbers, as bytes."""


class ImageSplit(Split):
    """Images that each show one class: pixels (N, C, H, W) uint8, labels (N,) int64."""

    labels_per_image = 1

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels = pixels
        self.labels = labels
        self.image_shape = _shape_of(pixels)

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor) -> Batch:
        images = self.pixels[indices]
        return Batch(images, self.labels[indices, None], images[:, None])


class OverlappingDigits(Split):
    """Every base image, `copies` times, each time with another one of a different class on top.

    Image number i has base image i mod N below and, drawn by hashing i, a partner and two shifts. Nothing
    is stored, so 60 million images cost no memory and are the same every time.

    Sabour, Frosst and Hinton, "Dynamic Routing Between Capsules" (2017), section 6 (MultiMNIST).
    """

    labels_per_image = 2

    def __init__(self, pixels: Tensor, labels: Tensor, *, name: str, copies: int = 1000, shift: int = 4) -> None:
        if bool((labels == labels[0]).all()):
            raise UserError("overlapping digits need images of at least two classes; hold out more of them")
        self.pixels = pixels
        self.labels = labels
        self.copies = copies
        self.shift = shift
        self._key = stateless.key("overlapping", name)
        channels, height, width = _shape_of(pixels)
        self.image_shape = channels, height + 2 * shift, width + 2 * shift
        # With the images sorted by class, "any of another class" is everything but one stretch.
        self._by_class = torch.argsort(labels, stable=True)
        self._class_size = torch.bincount(labels)
        self._class_start = self._class_size.cumsum(0) - self._class_size

    def __len__(self) -> int:
        return self.copies * len(self.labels)

    def fetch(self, indices: Tensor) -> Batch:
        first = indices % len(self.labels)
        pair = torch.stack([first, self._partners(first, indices)], dim=1)  # (B, 2)
        room = 2 * self.shift
        counters = indices[:, None] * 5 + torch.arange(1, 5)  # 5 numbers per image; number 0 is the partner
        offsets = stateless.random_integers(self._key, counters, room + 1)  # (B, 4)

        digits = self.pixels[pair.flatten()]  # (2B, C, h, w)
        padded = F.pad(digits, [room] * 4)
        top, left = (room - offsets).view(-1, 2).unbind(1)  # a window further up shows the digit further down
        _, height, width = self.image_shape
        parts = cut(padded, top, left, (height, width)).view(len(indices), 2, *self.image_shape)
        below, above = parts.unbind(1)
        images = below + torch.minimum(above, 255 - below)  # add and clip, without leaving bytes
        return Batch(images, self.labels[pair], parts)

    def _partners(self, first: Tensor, indices: Tensor) -> Tensor:
        own = self.labels[first]
        others = len(self.labels) - self._class_size[own]
        place = stateless.random_integers(self._key, indices * 5, others)
        skipped = torch.where(place >= self._class_start[own], self._class_size[own], 0)
        return self._by_class[place + skipped]


def _shape_of(pixels: Tensor) -> Shape:
    _, channels, height, width = pixels.shape
    return channels, height, width


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of training images, the whole batch at once, on bytes. What comes from outside is zero.

    shift: move by up to this many pixels in each direction.
    crop: cut out a random square of this side (evaluation uses the centre).
    flip: mirror half of the images left to right.
    rotate: turn by up to this many degrees.  scale: enlarge or shrink by up to this fraction.
    cutout: blank a square of this side, centred anywhere in the image.
    """

    shift: int = 0
    flip: bool = False
    crop: int = 0
    cutout: int = 0
    rotate: float = 0.0
    scale: float = 0.0

    def __post_init__(self) -> None:
        for name in ("shift", "crop", "cutout", "rotate", "scale"):
            if getattr(self, name) < 0:
                raise UserError(f"augmentation {name} is {getattr(self, name)}: give 0 (off) or more")
        if self.scale >= 1:
            raise UserError(f"augmentation scale is {self.scale}: give a fraction below 1, for example 0.1")

    def image_shape(self, shape: Shape) -> Shape:
        """The shape of images of this shape once they are augmented."""
        channels, height, width = shape
        if self.crop > min(height, width):
            raise UserError(f"cannot crop {self.crop} x {self.crop} pixels out of images of {height} x {width}")
        return channels, self.crop or height, self.crop or width

    def __call__(self, batch: Batch, *, seed: int, epoch: int, positions: Tensor) -> Batch:
        """The batch as seen in training, a function of (seed, epoch, position in the epoch's order)."""

        def drawn(what: str, high: int) -> Tensor:  # (B,) integers in [0, high)
            return stateless.random_integers(stateless.key(seed, epoch, what), positions, high)

        def spread(what: str) -> Tensor:  # (B,) numbers in [-1, 1)
            return stateless.random_uniform(stateless.key(seed, epoch, what), positions)

        planes = _to_planes(batch)
        if self.rotate or self.scale:
            planes = turn(planes, spread("rotate") * self.rotate, 1 + spread("scale") * self.scale)
        if self.flip:
            planes = torch.where(drawn("flip", 2).bool()[:, None, None, None], planes.flip(3), planes)
        if self.shift or self.crop:
            planes = F.pad(planes, [self.shift] * 4)
            _, height, width = self.image_shape(_shape_of(batch.images))
            top = drawn("top", planes.shape[2] - height + 1)
            left = drawn("left", planes.shape[3] - width + 1)
            planes = cut(planes, top, left, (height, width))
        if self.cutout:
            row, column = drawn("cutout row", planes.shape[2]), drawn("cutout column", planes.shape[3])
            planes = blank(planes, row, column, self.cutout)
        return _from_planes(planes, batch)

    def centre(self, batch: Batch) -> Batch:
        """What evaluation uses instead: the centre of the image if training crops, else the image itself."""
        if not self.crop:
            return batch
        planes = _to_planes(batch)
        _, height, width = self.image_shape(_shape_of(batch.images))
        top, left = (planes.shape[2] - height) // 2, (planes.shape[3] - width) // 2
        return _from_planes(planes[:, :, top : top + height, left : left + width], batch)


def _to_planes(batch: Batch) -> Tensor:
    """All pictures of an image, whole and parts, as planes (B, M, H, W), so that they are changed alike."""
    if batch.labels.shape[1] == 1:
        return batch.images
    return torch.cat([batch.images[:, None], batch.parts], dim=1).flatten(1, 2)


def _from_planes(planes: Tensor, batch: Batch) -> Batch:
    if batch.labels.shape[1] == 1:
        return Batch(planes, batch.labels, planes[:, None])
    size, channels = batch.images.shape[:2]
    pictures = planes.reshape(size, -1, channels, *planes.shape[2:])  # (B, 1 + K, C, H, W)
    return Batch(pictures[:, 0], batch.labels, pictures[:, 1:])


def cut(planes: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """From each image (M, H, W) the window (M, h, w) that starts at its own (top, left)."""
    windows = planes.unfold(2, size[0], 1).unfold(3, size[1], 1)  # a view: (B, M, tops, lefts, h, w)
    return windows[torch.arange(len(planes)), :, top, left]


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


class Batches:
    """Training batches as a pure function of the step.

    `batch_size` counts all processes together: process `rank` gets its stretch of the same global batch.
    The images left over at the end of an epoch's order are not used in that epoch.
    """

    def __init__(
        self,
        split: Split,
        *,
        batch_size: int,
        seed: int,
        augmentation: Augmentation | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"the batch size is {batch_size}: give 1 or more")
        if batch_size > len(split):
            raise UserError(
                f"a batch of {batch_size} is larger than the data: there are {len(split)} training images; "
                f"give a batch size of {len(split)} or less"
            )
        if batch_size % world_size:
            raise UserError(f"a batch of {batch_size} cannot be shared equally by {world_size} processes")
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.augmentation = augmentation
        self.steps_per_epoch = len(split) // batch_size
        share = batch_size // world_size
        self._own = torch.arange(rank * share, (rank + 1) * share)

    def at(self, step: int) -> Batch:
        """This process's part of the batch of a step, counted from 0."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        positions = step_of_epoch * self.batch_size + self._own
        order = stateless.key(self.seed, epoch, "order")
        batch = self.split.fetch(stateless.permute(positions, len(self.split), order))
        if self.augmentation is None:
            return batch
        return self.augmentation(batch, seed=self.seed, epoch=epoch, positions=positions)


def evaluation_batches(
    split: Split,
    *,
    batch_size: int,
    augmentation: Augmentation | None = None,
    limit: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """The images in order, each once, the last batch ragged; `limit` stops after that many images.

    With several processes, each gets every `world_size`-th batch.
    """
    end = len(split) if limit is None else min(limit, len(split))
    for start in range(rank * batch_size, end, world_size * batch_size):
        batch = split.fetch(torch.arange(start, min(start + batch_size, end)))
        yield augmentation.centre(batch) if augmentation else batch
