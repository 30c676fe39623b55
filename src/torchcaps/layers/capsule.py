"""A layer of capsules above another."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

from torchcaps.functional import Capsules
from torchcaps.routing.base import Routing, SharedRouting
from torchcaps.routing.discriminative import L2Routing
from torchcaps.routing.uniform import UniformRouting
from torchcaps.routing.votes import LinearVotes


class CapsuleLayer(nn.Module):
    """The weights W_ij between two layers of capsules, and the routing that combines the votes they give.

    Args:
        inputs: number of input capsules, I.
        input_size: components of their poses, D.
        outputs: number of output capsules, J.
        output_size: components of their poses, E.
        routing: an object that belongs to this layer alone, by default :class:`torchcaps.L2Routing`.
        weight_std: standard deviation of the weights' start values, by default the routing's.

    >>> layer = CapsuleLayer(1152, 8, 10, 16)
    >>> layer(torch.rand(2, 1152, 8)).activations.shape
    torch.Size([2, 10])

    Layers can be stacked, and follow primary capsules:

    >>> from torchcaps import PrimaryCapsules
    >>> front = nn.Sequential(PrimaryCapsules(64), CapsuleLayer(128, 8, 6, 12), CapsuleLayer(6, 12, 3, 16))
    >>> front(torch.rand(2, 64, 12, 12)).poses.shape
    torch.Size([2, 3, 16])
    """

    def __init__(
        self,
        inputs: int,
        input_size: int,
        outputs: int,
        output_size: int,
        routing: Routing | None = None,
        *,
        weight_std: float | None = None,
    ) -> None:
        super().__init__()
        routing = L2Routing() if routing is None else routing
        if not isinstance(routing, Routing):
            raise TypeError(f"routing must be an object such as L2Routing(), not {routing!r}")
        sizes = {"inputs": inputs, "input_size": input_size, "outputs": outputs, "output_size": output_size}
        for name, size in sizes.items():
            if operator.index(size) < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        std = routing.start_std(inputs * input_size) if weight_std is None else weight_std
        weight = torch.randn(inputs, input_size, outputs, output_size)  # (I, D, J, E)
        # Without memory nothing is to be scaled, and torch would import its compiler for it.
        self.weight = nn.Parameter(weight if weight.is_meta else weight.mul_(std))
        self.routing = routing
        routing.join(inputs, outputs, output_size)

    def extra_repr(self) -> str:
        I, D, J, E = self.weight.shape
        return f"{I} capsules of {D} -> {J} of {E}"

    def forward(self, poses: Tensor | Capsules, activations: Tensor | None = None) -> Capsules:
        """Route input capsules.

        Args:
            poses: of the input capsules, (B, I, D); or the capsules themselves, as other layers give them.
            activations: of the input capsules, (B, I); by default the lengths of their poses.

        Returns:
            the output capsules: poses (B, J, E), activations (B, J), totals (B, J, E)
        """
        if isinstance(poses, Capsules):
            activations = poses.activations if activations is None else activations
            poses = poses.poses
        I, D = self.weight.shape[:2]
        if poses.ndim != 3 or poses.shape[1:] != (I, D):
            raise ValueError(f"poses must be (B, {I}, {D}), not {tuple(poses.shape)}")
        if activations is None:
            activations = torch.linalg.vector_norm(poses, dim=-1)
        elif activations.shape != poses.shape[:2]:
            raise ValueError(f"activations must be {tuple(poses.shape[:2])}, not {tuple(activations.shape)}")
        routed: Capsules = self.routing(LinearVotes(poses, self.weight), activations)
        return routed

    @torch.no_grad()
    def fold(self) -> None:
        """Multiply shared coefficients into the weights, after which the routing is a plain sum."""
        if not isinstance(self.routing, SharedRouting):
            return
        coefficients = self.routing.coefficients
        pairwise = coefficients[:, None, :, None] if isinstance(coefficients, Tensor) else coefficients
        self.weight = nn.Parameter(self.weight * pairwise, requires_grad=False)
        self.routing = UniformRouting(start=1.0)
