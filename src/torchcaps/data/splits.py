"""Images in memory as bytes: the parts of a data set, and the batches that are taken out of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchcaps.data import stateless
from torchcaps.data.images import ImageShape
from torchcaps.errors import UserError

NO_LABEL = -1  # fills the rows of images that show fewer classes than others


class Batch(NamedTuple):
    """Some images with the classes that are in them."""

    images: Tensor
    """(B, C, H, W) uint8; float32 in [0, 1] after :meth:`on`. Float32 from the start if they are standardised."""
    labels: Tensor
    """(B, K) int64: the classes of each image, filled up with -1."""
    parts: Tensor
    """(B, P, C, H, W): what each class present looks like alone, or the whole image if that is not known (P = 1)."""

    def on(self, device: torch.device | str) -> Batch:
        """The batch on a device, its pixels as float32. Bytes travel, floats are made there."""
        images = _as_float(self.images.to(device))
        same = self.parts.shape[1] == 1 and self.parts.dtype == self.images.dtype
        parts = images[:, None] if same else _as_float(self.parts.to(device))
        return Batch(images, self.labels.to(device), parts)


def _as_float(images: Tensor) -> Tensor:
    return images.float().div_(255) if images.dtype == torch.uint8 else images


class Split(ABC):
    """One part of a data set: the images for training, validation or testing."""

    labels_per_image: int | None
    """How many classes every image shows; None if that differs from image to image."""
    image_shape: ImageShape

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: Tensor) -> Batch:
        """The images with these numbers (B,), as bytes."""

    @abstractmethod
    def class_counts(self, classes: int) -> Tensor:
        """(J,) int64: how many images show each of the J classes."""

    def sample(self, count: int) -> Tensor:
        """The numbers of ``count`` images, in order, from all over it: folders have one class after another."""
        chosen = stateless.permute(torch.arange(min(count, len(self))), len(self), stateless.key("sample"))
        return chosen.sort().values


class ImageSplit(Split):
    """Images that each show one class.

    Args:
        pixels: (N, C, H, W) uint8.
        labels: (N,) int64.
    """

    labels_per_image = 1

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels = pixels
        self.labels = labels
        self.image_shape = shape_of(pixels)

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor) -> Batch:
        images = self.pixels[indices]
        return Batch(images, self.labels[indices, None], images[:, None])

    def class_counts(self, classes: int) -> Tensor:
        return torch.bincount(self.labels, minlength=classes)


class MultiLabelSplit(Split):
    """Images that each show any number of classes.

    Args:
        pixels: (N, C, H, W) uint8.
        presence: (N, J) bool: which classes each image shows.
    """

    labels_per_image = None

    def __init__(self, pixels: Tensor, presence: Tensor) -> None:
        self.pixels = pixels
        self.presence = presence
        self.image_shape = shape_of(pixels)
        self._labels = padded_labels(presence)

    def __len__(self) -> int:
        return len(self.pixels)

    def fetch(self, indices: Tensor) -> Batch:
        images = self.pixels[indices]
        return Batch(images, self._labels[indices], images[:, None])

    def class_counts(self, classes: int) -> Tensor:
        return F.pad(self.presence.sum(0), [0, classes - self.presence.shape[1]])


def padded_labels(presence: Tensor) -> Tensor:
    """The numbers of the classes present, in order, from presence (N, J) to labels (N, K) filled up with -1.

    >>> padded_labels(torch.tensor([[True, False, True], [False, True, False]])).tolist()
    [[0, 2], [1, -1]]
    """
    widest = max(1, int(presence.sum(1).max())) if len(presence) else 1
    numbers = torch.where(presence, torch.arange(presence.shape[1]), presence.shape[1]).sort(1).values[:, :widest]
    return numbers.masked_fill(numbers == presence.shape[1], NO_LABEL)


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
        channels, height, width = shape_of(pixels)
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

    def sample(self, count: int) -> Tensor:
        """The first images: their base images are all different for as long as there are others."""
        return torch.arange(min(count, len(self)))

    def class_counts(self, classes: int) -> Tensor:
        """Expected numbers: each class as the base image, and as the partner of all others."""
        sizes = F.pad(self._class_size, [0, classes - len(self._class_size)]).double()
        others = len(self.labels) - sizes  # images that can be the partner of one of this class
        as_partner = sizes * ((sizes / others).sum() - sizes / others)
        return (self.copies * (sizes + as_partner)).round().long()

    def _partners(self, first: Tensor, indices: Tensor) -> Tensor:
        own = self.labels[first]
        others = len(self.labels) - self._class_size[own]
        place = stateless.random_integers(self._key, indices * 5, others)
        skipped = torch.where(place >= self._class_start[own], self._class_size[own], 0)
        return self._by_class[place + skipped]


def shape_of(pixels: Tensor) -> ImageShape:
    """(C, H, W) of images (N, C, H, W)."""
    _, channels, height, width = pixels.shape
    return channels, height, width


def cut(planes: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """From each image (M, H, W) the window (M, h, w) that starts at its own (top, left)."""
    windows = planes.unfold(2, size[0], 1).unfold(3, size[1], 1)  # a view: (B, M, tops, lefts, h, w)
    return windows[torch.arange(len(planes)), :, top, left]


def hold_out(labels: Tensor, count: int, purpose: str) -> tuple[Tensor, Tensor]:
    """Numbers of ``count`` images with the classes in proportion, and of all others. Always the same ones.

    Args:
        labels: (N,) classes, or (N, J) presence, of which the first class counts.
        count: how many to hold out.
        purpose: another one chooses other images.
    """
    shuffled = stateless.permute(torch.arange(len(labels)), len(labels), stateless.key("hold out", purpose))
    _, share, _ = places_in_class(labels, shuffled)
    order = torch.argsort(share, stable=True)
    return order[:count].sort().values, order[count:].sort().values


def places_in_class(labels: Tensor, shuffled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each image's place in a line of its class.

    Args:
        labels: as for :func:`hold_out`.
        shuffled: (N,) the numbers of all images in the order in which they queue up.

    Returns:
        Three of (N,): the place, the place as a fraction of the line, and the length of the line.
    """
    if labels.ndim == 2:
        labels = labels.int().argmax(1)
    line = shuffled[torch.argsort(labels[shuffled], stable=True)]  # class after class
    sizes = torch.bincount(labels)
    starts = sizes.cumsum(0) - sizes
    rank = torch.empty_like(labels)
    rank[line] = torch.arange(len(labels)) - starts[labels[line]]
    return rank, (rank + 0.5) / sizes[labels], sizes[labels]
