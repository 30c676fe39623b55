"""What all networks have in common."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchcaps.errors import UserError
from torchcaps.functional import Capsules, at_least_float32, margin_loss
from torchcaps.layers import CapsuleLayer, Decoder
from torchcaps.routing import DiscriminativeRouting


class Output(NamedTuple):
    """What the network makes of a batch of images."""

    capsules: Capsules
    """The class capsules; ``capsules.activations`` (B, J) are the lengths that decide."""
    reconstructions: Tensor | None
    """(B, K, C, H, W) one image for each class asked for, when labels were given and there is a decoder."""


class Network(nn.Module, ABC):
    """Images in [0, 1] -> primary capsules -> class capsules, and back to images if there is a decoder."""

    evaluation_batch: int = 500
    """Images to classify at a time."""
    decoder: Decoder | None
    map_shape: tuple[int, int, int]
    """(rows, columns, types) of the primary capsules, in the order of their numbering."""
    mean: Tensor
    std: Tensor

    def __init__(self, classes: int, *, present: int, mean: Sequence[float], std: Sequence[float]) -> None:
        """``present`` is how many classes an image shows; ``mean`` and ``std`` normalise each channel."""
        super().__init__()
        self.classes = classes
        self.present = present
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def normalised(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std

    @abstractmethod
    def primary_capsules(self, images: Tensor) -> Capsules:
        """(B, C, H, W) -> (B, I, D)."""

    @abstractmethod
    def route(self, capsules: Capsules) -> Capsules:
        """Primary capsules (B, I, D) -> class capsules (B, J, E)."""

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Output:
        """Images (B, C, H, W) and, to have them reconstructed, the classes (B, K) to draw."""
        capsules = self.route(self.primary_capsules(images))
        reconstructions = None
        if self.decoder is not None and labels is not None:
            reconstructions = self.decoder(capsules.poses, labels)
        return Output(capsules, reconstructions)

    def loss(self, capsules: Capsules, present: Tensor, progress: float) -> Tensor:
        """What training descends for the class capsules, given the classes present (B, J).

        ``progress`` is how far training has come, from 0 to 1.
        """
        return margin_loss(at_least_float32(capsules.activations), present)

    def predict(self, capsules: Capsules) -> Tensor:
        """The classes (B, K) with the longest capsules, longest first."""
        return capsules.activations.topk(self.present, dim=1).indices

    def reconstruct(self, capsules: Capsules) -> Tensor:
        """Draw the predicted classes: (B, K, C, H, W)."""
        if self.decoder is None:
            raise UserError("This network was trained without reconstruction: it has no decoder.")
        images: Tensor = self.decoder(capsules.poses, self.predict(capsules))
        return images

    def ascending(self) -> list[DiscriminativeRouting]:
        """The routings whose coefficients ascend ``r`` instead of descending the loss."""
        return [module for module in self.modules() if isinstance(module, DiscriminativeRouting)]

    def matrices(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """The weights that are large matrices, with the axes that count as their rows."""
        convolutions = [(module.weight, (0,)) for module in self.modules() if isinstance(module, nn.Conv2d)]
        layers = [(module.weight, (2, 3)) for module in self.modules() if isinstance(module, CapsuleLayer)]
        return [*convolutions, *layers]

    def copy_with(self, state: Mapping[str, Tensor]) -> Self:
        """A copy with these weights, named as in :meth:`state_dict`."""
        network = copy.deepcopy(self)
        network.load_state_dict(state)
        return network

    def folded(self) -> Self:
        """A copy for inference, with shared coefficients multiplied into the weights; later changes do not reach it."""
        network = copy.deepcopy(self).eval().requires_grad_(False)
        for module in network.modules():
            if isinstance(module, CapsuleLayer):
                module.fold()
        return network


def check_image_size(image_shape: tuple[int, int, int], kernel: int) -> None:
    """Refuse images that two convolutions with this kernel leave nothing of."""
    _, height, width = image_shape
    smallest = 2 * kernel - 1
    if min(height, width) < smallest:
        raise UserError(
            f"Images of {height}x{width} are too small for two {kernel}x{kernel} convolutions: "
            f"the smallest size is {smallest}x{smallest}. Enlarge them, or choose a smaller kernel."
        )
