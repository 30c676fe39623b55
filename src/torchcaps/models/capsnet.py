"""The capsule network of the paper: convolution, primary capsules, class capsules, decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchcaps.functional import Capsules
from torchcaps.layers import CapsuleLayer, Decoder, PrimaryCapsules
from torchcaps.models.base import Network, check_image_size
from torchcaps.ops import TransformedKernel, conv_pair, transform_kernel
from torchcaps.routing import Routing


@final
class CapsuleNetwork(Network):
    """images in [0, 1] -> convolution -> primary capsules -> capsule layers -> class capsules.

    ``routings`` has one routing for each capsule layer; ``hidden`` the number of capsules and their size for
    each capsule layer between the primary and the class capsules (none in the paper's network).
    ``kept_capsules`` are the numbers of the primary capsules that a pruned network still uses (all if not given).
    ``present`` is how many classes an image shows.
    """

    kept: Tensor | None

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
        kept_capsules: Sequence[int] | None = None,
        decoder: bool = True,
        present: int = 1,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__(classes, present=present, mean=mean, std=std)
        if len(routings) != len(hidden) + 1:
            raise ValueError(f"{len(hidden) + 1} capsule layers need as many routings, not {len(routings)}")
        check_image_size(image_shape, kernel)
        channels, *sides = image_shape
        self.negative_slope = negative_slope

        self.conv = nn.Conv2d(channels, conv_channels, kernel)
        self.primary = PrimaryCapsules(conv_channels, primary_capsules, primary_size, kernel=kernel)
        rows, columns = ((side - kernel + 1 - kernel) // self.primary.stride + 1 for side in sides)
        self.map_shape = (rows, columns, primary_capsules)
        kept = None if kept_capsules is None else torch.tensor(kept_capsules)
        self.register_buffer("kept", kept, persistent=False)
        inputs = rows * columns * primary_capsules if kept is None else len(kept)
        sizes = [(inputs, primary_size), *hidden, (classes, class_size)]
        self.layers = nn.ModuleList(
            CapsuleLayer(*below, *above, routing, weight_std=weight_std)
            for below, above, routing in zip(sizes, sizes[1:], routings)
        )
        if any(routing.holds_votes for routing in routings):
            self.evaluation_batch = 100
        self.decoder = Decoder(classes, class_size, image_shape) if decoder else None
        self._kernel: TransformedKernel | None = None

    def primary_capsules(self, images: Tensor) -> Capsules:
        """(B, C, H, W) -> (B, I, D)."""
        places = conv_pair(
            self.normalised(images),
            self.conv.weight,
            self.conv.bias,
            self.primary.conv.weight,
            self.primary.conv.bias,
            stride=self.primary.stride,
            negative_slope=self.negative_slope,
            kernel=self._kernel,
        )  # (B, H', W', types * D)
        return self.primary.group(places)

    def route(self, capsules: Capsules) -> Capsules:
        """Primary capsules (B, I, D) -> class capsules (B, J, E)."""
        if self.kept is not None:
            capsules = Capsules(*(each[:, self.kept] for each in capsules))
        for layer in self.layers:
            capsules = layer(capsules.poses, capsules.activations)
        return capsules

    def folded(self) -> Self:
        network = super().folded()
        primary = network.primary
        network._kernel = transform_kernel(primary.conv.weight, stride=primary.stride, size=self.map_shape[:2])
        return network
