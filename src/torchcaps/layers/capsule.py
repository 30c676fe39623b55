"""A layer of capsules above another."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchcaps.functional import Capsules
from torchcaps.routing import LinearVotes, Routing, SharedRouting, UniformRouting, Votes


class CapsuleLayer(nn.Module):
    """The weights W_ij between two layers of capsules, and the routing that combines the votes they give."""

    make_votes: ClassVar[Callable[[Tensor, Tensor], Votes]] = LinearVotes
    """From poses and weights to votes; benchmarks put the dense form here to compare with."""

    def __init__(
        self,
        inputs: int,
        input_size: int,
        outputs: int,
        output_size: int,
        routing: Routing,
        *,
        weight_std: float | None = None,
    ) -> None:
        super().__init__()
        std = routing.weight_std if weight_std is None else weight_std
        self.weight = nn.Parameter(std * torch.randn(inputs, input_size, outputs, output_size))  # (I, D, J, E)
        self.routing = routing
        routing.connect(inputs, outputs, output_size)

    def forward(self, poses: Tensor, activations: Tensor) -> Capsules:
        """(B, I, D), (B, I) -> capsules (B, J, E)."""
        routed: Capsules = self.routing(type(self).make_votes(poses, self.weight), activations)
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
