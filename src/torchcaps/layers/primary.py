"""From images or feature maps to the first capsules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchcaps.functional import Capsules
from torchcaps.ops import TransformedKernel, conv_pair, strided_conv2d, transform_kernel
from torchcaps.ops.squash import squashed_capsules
from torchcaps.settings import SettingError


def _group(places: Tensor, size: int) -> Capsules:
    """Channels-last feature maps (B, H, W, types * size) -> capsules (B, H * W * types, size)."""
    B, H, W, channels = places.shape
    return squashed_capsules(places.reshape(B, H * W * channels // size, size))


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody wants to see, or change, what happens when the module is called, as torch's pruning does."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks)


class PrimaryCapsules(nn.Module):
    """A strided convolution whose channels, at each place of the map, are grouped into capsules.

    A capsule's components are ``size`` neighbouring channels at one place, and the capsules of one place
    are neighbours: capsule ``i`` of a map of width ``w`` with ``types`` types is type ``i % types`` at row
    ``i // types // w``, column ``i // types % w``.

    Args:
        channels: of the feature maps.
        types: of capsules at each place.
        size: components of a capsule.
        kernel, stride: of the convolution.

    >>> PrimaryCapsules(64, 32, 8, kernel=3, stride=1)(torch.rand(2, 64, 6, 6)).poses.shape
    torch.Size([2, 512, 8])
    """

    def __init__(self, channels: int, types: int = 32, size: int = 8, *, kernel: int = 9, stride: int = 2) -> None:
        super().__init__()
        self.types = types
        self.size = size
        self.stride = stride
        self.conv = nn.Conv2d(channels, types * size, kernel, stride)

    def forward(self, features: Tensor) -> Capsules:
        """(B, C, H, W) -> capsules (B, H' * W' * types, size)."""
        if _is_hooked(self.conv):
            maps: Tensor = self.conv(features)
        else:
            maps = strided_conv2d(features, self.conv.weight, self.conv.bias, stride=self.stride)
        # Channels last before grouping, or a capsule would be made of neighbouring places of one channel.
        return _group(maps.permute(0, 2, 3, 1), self.size)


class ImageCapsules(nn.Module):
    """The front of the paper's network: convolution, (leaky) ReLU, strided convolution, capsules as in
    :class:`PrimaryCapsules`. Both convolutions in one piece are many times as fast as one after the other.

    Args:
        image_shape: (C, H, W) of the images.
        channels: of the first convolution.
        types: of capsules at each place.
        size: components of a capsule.
        kernel: side of both kernels.
        padding: "valid" as in the paper, or "same", which pads both convolutions by half a kernel.
        negative_slope: of the leaky ReLU; 0 is ReLU.

    >>> ImageCapsules((1, 28, 28))(torch.rand(2, 1, 28, 28)).poses.shape
    torch.Size([2, 1152, 8])
    """

    STRIDE = 2

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        channels: int = 256,
        types: int = 32,
        size: int = 8,
        *,
        kernel: int = 9,
        padding: Literal["valid", "same"] = "valid",
        negative_slope: float = 0.0,
    ) -> None:
        super().__init__()
        self.image_shape = image_shape
        self.size = size
        self.negative_slope = negative_slope
        self.padding = kernel // 2 if padding == "same" else 0
        image_channels, *sides = image_shape
        self.first = nn.Conv2d(image_channels, channels, kernel, padding=self.padding)
        self.second = nn.Conv2d(channels, types * size, kernel, self.STRIDE, padding=self.padding)
        grow = 2 * self.padding - kernel
        rows, columns = ((side + grow + 1 + grow) // self.STRIDE + 1 for side in sides)
        if min(rows, columns) < 1:
            smallest = -2 * grow - 1
            raise SettingError(
                "image_shape",
                f"is too small for two {kernel}x{kernel} convolutions: images have {sides[0]}x{sides[1]} pixels, "
                f"and the smallest size is {smallest}x{smallest}. Enlarge them, or choose a smaller kernel",
            )
        self.map_shape = (rows, columns, types)
        self._transformed: TransformedKernel | None = None

    def numbers_per_image(self) -> int:
        """Roughly how many numbers training holds for each image: the first maps, their transforms and gradients."""
        grow = 2 * self.padding - self.first.kernel_size[0] + 1
        rows, columns = (side + grow for side in self.image_shape[1:])
        return 4 * rows * columns * self.first.out_channels

    def field(self, row: int, column: int) -> tuple[int, int, int]:
        """The square of the image that a place of the map sees: its top, its left and its side, in pixels."""
        side = 2 * self.first.kernel_size[0] - 1
        margin = 2 * self.padding  # above and to the left of the image
        return self.STRIDE * row - margin, self.STRIDE * column - margin, side

    def over_pixels(self, maps: Tensor) -> Tensor:
        """Spread numbers of the map's places over the pixels they come from: (N, H', W') -> (N, H, W).

        The sums stay, but for what lies on the padding.
        A pixel's share in a place is the number of ways that lead from it to there through both kernels.
        """
        kernel = self.first.kernel_size[0]
        ways = torch.zeros(2 * kernel - 1, dtype=maps.dtype, device=maps.device)
        for offset in range(kernel):
            ways[offset : offset + kernel] += 1
        field = torch.outer(ways, ways)[None, None] / ways.sum() ** 2
        spread = F.conv_transpose2d(maps[:, None], field, stride=self.STRIDE)[:, 0]
        margin = 2 * self.padding  # what lies on the padding is not shown
        rows, columns = (side + margin for side in self.image_shape[1:])
        whole = F.pad(spread, (0, columns, 0, rows))  # the last pixels may be under no place
        return whole[:, margin:rows, margin:columns]

    def forward(self, images: Tensor) -> Capsules:
        """(B, C, H, W) -> capsules (B, H' * W' * types, size)."""
        if _is_hooked(self.first) or _is_hooked(self.second):
            maps: Tensor = self.second(F.leaky_relu(self.first(images), self.negative_slope))
            return _group(maps.permute(0, 2, 3, 1), self.size)
        places = conv_pair(
            images,
            self.first.weight,
            self.first.bias,
            self.second.weight,
            self.second.bias,
            stride=self.STRIDE,
            padding=self.padding,
            negative_slope=self.negative_slope,
            kernel=self._transformed,
        )  # (B, H', W', types * size)
        return _group(places, self.size)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._transformed is not None:
            self.fold()
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._transformed = None
        super()._load_from_state_dict(*arguments)

    @torch.no_grad()
    def fold(self) -> None:
        """Transform the second convolution's kernels once, for inference, until others are loaded."""
        self._transformed = transform_kernel(self.second.weight, stride=self.STRIDE, size=self.map_shape[:2])
