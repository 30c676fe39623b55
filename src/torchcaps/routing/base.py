"""What a routing is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.routing.votes import Votes


class Routing(nn.Module, ABC):
    """Turns votes for output capsules into output capsules.

    A routing is an object made from its options alone and given to a capsule layer, which tells it the
    sizes once by :meth:`connect`. ``docs/adding-a-routing.md`` shows how to write one.
    """

    weight_std: ClassVar[float] = 0.01
    """Standard deviation that starts the layer's weights at a useful scale under this routing."""

    holds_votes: ClassVar[bool] = False
    """Whether it asks for all votes at once, so that fewer images should be evaluated at a time."""

    def connect(self, inputs: int, outputs: int, output_size: int) -> None:
        """Make what depends on the number of capsules, such as coefficients. Called once, by the layer."""

    @abstractmethod
    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        """Route the votes of input capsules with these activations (B, I)."""


class SharedRouting(Routing):
    """A routing whose coefficients are the same for all images, so that they can be folded into the weights."""

    coefficients: Tensor | float
    """(I, J), or one number for all pairs."""

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return capsules_from_totals(votes.combine(self.coefficients))
