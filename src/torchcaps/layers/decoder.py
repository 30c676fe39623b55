"""The reconstruction network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchcaps.functional import presence


class Decoder(nn.Module):
    """Fully connected layers that draw an image from one class capsule, all others set to zero.

    Args:
        classes: number of class capsules.
        size: components of a class capsule.
        image_shape: (C, H, W) of what is drawn.
        hidden: widths of the layers in between.

    >>> import torch
    >>> Decoder(10, 16, (1, 28, 28))(torch.rand(2, 10, 16), torch.tensor([[3], [5]])).shape
    torch.Size([2, 1, 1, 28, 28])
    """

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
        """Draw images.

        Args:
            poses: of the class capsules, (B, J, E).
            labels: the classes to draw, (B,) or (B, K); an entry of -1 draws nothing in particular.

        Returns:
            (B, K, C, H, W)
        """
        B, J, _ = poses.shape
        if labels.ndim not in (1, 2) or labels.shape[0] != B:
            raise ValueError(f"labels must be ({B},) or ({B}, K), not {tuple(labels.shape)}")
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise ValueError("labels must be the numbers of the classes to draw, not presence")
        labels = labels[:, None] if labels.ndim == 1 else labels
        K = labels.shape[1]
        masks = presence(labels.reshape(B * K), J).view(B, K, J, 1).to(poses.dtype)
        masked = masks * poses[:, None]  # (B, K, J, E)
        images: Tensor = self.layers(masked.flatten(2))
        return images.view(B, K, *self.image_shape)
