"""From feature maps to the first capsules."""

from __future__ import annotations

from torch import Tensor, nn

from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.ops import strided_conv2d


class PrimaryCapsules(nn.Module):
    """A strided convolution whose channels, at each place of the map, are grouped into capsules.

    A capsule's components are ``size`` neighbouring channels at one place, and the capsules of one place
    are neighbours: capsule ``i`` of a ``capsules``-type map of width ``w`` is type ``i % capsules`` at row
    ``i // capsules // w``, column ``i // capsules % w``.
    """

    def __init__(self, channels: int, capsules: int, size: int, *, kernel: int = 9, stride: int = 2) -> None:
        super().__init__()
        self.size = size
        self.stride = stride
        self.conv = nn.Conv2d(channels, capsules * size, kernel, stride)

    def forward(self, features: Tensor) -> Capsules:
        """(B, C, H, W) -> capsules (B, H' * W' * types, size)."""
        maps = strided_conv2d(features, self.conv.weight, self.conv.bias, stride=self.stride)
        # Channels last before grouping, or a capsule would be made of neighbouring places of one channel.
        return self.group(maps.permute(0, 2, 3, 1))

    def group(self, places: Tensor) -> Capsules:
        """Channels-last convolution outputs (B, H', W', types * size) -> capsules (B, H' * W' * types, size)."""
        return capsules_from_totals(places.reshape(places.shape[0], -1, self.size))
