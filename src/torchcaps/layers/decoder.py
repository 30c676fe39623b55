"""The reconstruction network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn

from torchcaps.functional import multi_hot


class Decoder(nn.Module):
    """Fully connected layers that draw an image from one class capsule, all others set to zero."""

    def __init__(
        self, classes: int, size: int, image_shape: tuple[int, int, int], hidden: Sequence[int] = (512, 1024)
    ) -> None:
        super().__init__()
        self.image_shape = image_shape
        widths = [classes * size, *hidden]
        layers: list[nn.Module] = []
        for width, wider in itertools.pairwise(widths):
            layers += [nn.Linear(width, wider), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], math.prod(image_shape)), nn.Sigmoid())

    def forward(self, poses: Tensor, labels: Tensor) -> Tensor:
        """Poses (B, J, E) and the classes to draw (B, K) -> images (B, K, C, H, W)."""
        B, J, _ = poses.shape
        K = labels.shape[1]
        masks = multi_hot(labels.reshape(B * K, 1), J).view(B, K, J, 1)
        masked = masks * poses[:, None]  # (B, K, J, E)
        images: Tensor = self.layers(masked.flatten(2))
        return images.view(B, K, *self.image_shape)
