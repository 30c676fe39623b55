"""Fronts for images that are too large for the paper's pair of convolutions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchcaps.functional import Capsules
from torchcaps.layers.primary import PrimaryCapsules
from torchcaps.settings import SettingError

LARGEST_MAP = 8
"""Side of the feature map at which :class:`SmallStem` stops halving."""


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Within it the network is in evaluation mode; afterwards each of its modules is in the mode it was in."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class SmallStem(nn.Sequential):
    """Pairs of 3x3 convolutions, each pair halving the image, until its map is at most 8x8.

    Channels double from pair to pair. Normalised by groups, so that the batch does not matter.

    Args:
        image_shape: (C, H, W) of the images.
        width: channels of the last pair.

    >>> SmallStem((3, 64, 64))(torch.rand(2, 3, 64, 64)).shape
    torch.Size([2, 128, 8, 8])
    """

    def __init__(self, image_shape: tuple[int, int, int], width: int = 128) -> None:
        channels, height, width_in_pixels = image_shape
        halvings = 0
        while max(height, width_in_pixels) > LARGEST_MAP << halvings:
            halvings += 1
        layers: list[nn.Module] = []
        for left in reversed(range(halvings)):
            outputs = max(16, width >> left)
            layers += _block(channels, outputs, stride=2) + _block(outputs, outputs, stride=1)
            channels = outputs
        super().__init__(*layers)


def _block(inputs: int, outputs: int, *, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return [convolution, nn.GroupNorm(max(1, outputs // 16), outputs), nn.ReLU()]


class StemCapsules(nn.Module):
    """Any module that makes feature maps of images, and primary capsules on top of them.

    Args:
        image_shape: (C, H, W) of the images.
        stem: images (B, C, H, W) -> feature maps (B, channels, h, w).
        types: of capsules at each place.
        size: components of a capsule.
        frozen: the stem stays as it is: its weights, and what it would count or average in training.

    >>> front = StemCapsules((3, 64, 64), SmallStem((3, 64, 64)))
    >>> front(torch.rand(2, 3, 64, 64)).poses.shape, front.map_shape
    (torch.Size([2, 1152, 8]), (6, 6, 32))
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        stem: nn.Module,
        types: int = 32,
        size: int = 8,
        *,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.image_shape = image_shape
        self.stem = stem
        self.frozen = frozen
        if frozen:
            stem.requires_grad_(False).eval()
        channels, height, width = _map_of(stem, image_shape)
        kernel = min(3, height, width)
        self.primary = PrimaryCapsules(channels, types, size, kernel=kernel, stride=1)
        self.map_shape = (height - kernel + 1, width - kernel + 1, types)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of training, or of evaluation, in which a frozen stem always is."""
        super().train(mode)
        if self.frozen:
            self.stem.eval()
        return self

    def field(self, row: int, column: int) -> tuple[int, int, int]:
        """The square of the image that a place of the map mainly sees: its top, its left and its side, in pixels."""
        kernel = self.primary.conv.kernel_size[0]
        height, width = (side / (places + kernel - 1) for side, places in zip(self.image_shape[1:], self.map_shape))
        return round(height * row), round(width * column), round(kernel * max(height, width))

    @torch.no_grad()
    def numbers_per_image(self) -> int:
        """Roughly how many numbers training holds for each image: what all modules put out, and its gradient."""
        counted = 0

        def count(module: nn.Module, inputs: object, output: object) -> None:
            nonlocal counted
            counted += output.numel() if isinstance(output, Tensor) else 0

        leaves = [module for module in self.stem.modules() if not [*module.children()]]
        hooks = [leaf.register_forward_hook(count) for leaf in leaves if not isinstance(leaf, torch.jit.ScriptModule)]
        features = _map_of(self.stem, self.image_shape)
        for hook in hooks:
            hook.remove()
        return 2 * max(counted, math.prod(self.image_shape), math.prod(features))

    def over_pixels(self, maps: Tensor) -> Tensor:
        """Spread numbers of the map's places smoothly over the image: (N, h, w) -> (N, H, W), the same sums."""
        kernel = self.primary.conv.kernel_size[0]
        down, across = (
            _shares(places, pixels, kernel).to(maps) for places, pixels in zip(maps.shape[1:], self.image_shape[1:])
        )
        return down.mT @ maps @ across

    def forward(self, images: Tensor) -> Capsules:
        """(B, C, H, W) -> capsules (B, h' * w' * types, size)."""
        capsules: Capsules = self.primary(self.stem(images))
        return capsules


def _shares(places: int, pixels: int, kernel: int) -> Tensor:
    """What part of a place's number each pixel of a line gets, falling to both sides: (places, pixels).

    A place sees ``kernel`` neighbouring cells of the map that the stem makes.
    """
    cells = F.interpolate(torch.eye(places + kernel - 1)[None], pixels, mode="linear", align_corners=False)[0]
    cells = cells / cells.sum(1, keepdim=True).clamp_min(1e-6)
    return cells.unfold(0, kernel, 1).mean(-1)


@torch.no_grad()
def _map_of(stem: nn.Module, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """(channels, h, w) of the feature maps that a stem makes of one image."""
    like = next(stem.parameters(), torch.empty(0, device="cpu"))
    with torch.device(like.device), evaluating(stem):
        try:
            features = stem(torch.zeros(1, *image_shape, device=like.device, dtype=like.dtype))
        except Exception as error:  # whatever it does with images that it was not made for
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            by = "x".join(map(str, image_shape))
            raise SettingError("backbone", f"does not take images of {by} (channels first): {reason}") from error
    if not isinstance(features, Tensor) or features.ndim != 4:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise SettingError("backbone", f"must give feature maps (B, channels, h, w), not {shape}")
    _, channels, height, width = features.shape
    return channels, height, width
