"""What all networks have in common."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from typing_extensions import Self

from torchcaps.errors import UserError
from torchcaps.functional import Capsules
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

    classes: int
    present: int
    """How many classes an image shows."""
    decoder: Decoder | None
    map_shape: tuple[int, int, int]
    """(rows, columns, types) of the primary capsules, in the order of their numbering."""

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

    def copy_with(self, state: Mapping[str, Tensor]) -> Self:
        """A copy with these weights, named as in :meth:`state_dict`."""
        network = copy.deepcopy(self)
        network.load_state_dict(state)
        return network

    def folded(self) -> Self:
        """A copy for inference, with shared coefficients multiplied into the weights."""
        network = copy.deepcopy(self).eval().requires_grad_(False)
        for module in network.modules():
            if isinstance(module, CapsuleLayer):
                module.fold()
        return network
