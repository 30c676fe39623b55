"""The capsule network of the paper: convolution, primary capsules, class capsules, decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from torchcaps.errors import UserError
from torchcaps.functional import Capsules
from torchcaps.layers import CapsuleLayer, Decoder, PrimaryCapsules
from torchcaps.models.base import Network
from torchcaps.ops import conv_pair
from torchcaps.routing import Routing


@final
class CapsuleNetwork(Network):
    """images in [0, 1] -> convolution -> primary capsules -> capsule layers -> class capsules.

    ``routings`` has one routing for each capsule layer; ``hidden`` the number of capsules and their size for
    each capsule layer between the primary and the class capsules (none in the paper's network).
    ``present`` is how many classes an image shows.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        classes: int,
        routings: Sequence[Routing],
        *,
        hidden: Sequence[tuple[int, int]] = (),
        conv_channels: int = 256,
        primary_capsules: int = 32,
        primary_size: int = 8,
        class_size: int = 16,
        kernel: int = 9,
        negative_slope: float = 0.0,
        weight_std: float | None = None,
        decoder: bool = True,
        present: int = 1,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__()
        if len(routings) != len(hidden) + 1:
            raise ValueError(f"{len(hidden) + 1} capsule layers need as many routings, not {len(routings)}")
        channels, *sides = image_shape
        smallest = 2 * kernel - 1
        if min(sides) < smallest:
            raise UserError(
                f"Images of {sides[0]}x{sides[1]} are too small for two {kernel}x{kernel} convolutions: "
                f"the smallest size is {smallest}x{smallest}. Enlarge them, or choose a smaller kernel."
            )
        self.classes = classes
        self.negative_slope = negative_slope
        self.present = present
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

        self.conv = nn.Conv2d(channels, conv_channels, kernel)
        self.primary = PrimaryCapsules(conv_channels, primary_capsules, primary_size, kernel=kernel)
        rows, columns = ((side - kernel + 1 - kernel) // self.primary.stride + 1 for side in sides)
        self.map_shape = (rows, columns, primary_capsules)
        sizes = [(rows * columns * primary_capsules, primary_size), *hidden, (classes, class_size)]
        self.layers = nn.ModuleList(
            CapsuleLayer(*below, *above, routing, weight_std=weight_std)
            for below, above, routing in zip(sizes, sizes[1:], routings)
        )
        self.decoder = Decoder(classes, class_size, image_shape) if decoder else None

    def primary_capsules(self, images: Tensor) -> Capsules:
        """(B, C, H, W) -> (B, I, D)."""
        places = conv_pair(
            (images - self.mean) / self.std,
            self.conv.weight,
            self.conv.bias,
            self.primary.conv.weight,
            self.primary.conv.bias,
            stride=self.primary.stride,
            negative_slope=self.negative_slope,
        )  # (B, H', W', types * D)
        return self.primary.group(places)

    def route(self, capsules: Capsules) -> Capsules:
        """Primary capsules (B, I, D) -> class capsules (B, J, E)."""
        for layer in self.layers:
            capsules = layer(capsules.poses, capsules.activations)
        return capsules
