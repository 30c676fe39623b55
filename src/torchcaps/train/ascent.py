"""The coefficient steps of discriminative routing (Algorithm 1, lines 7 to 9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning_fabric import Fabric
from torch import Tensor

from torchcaps.functional import at_least_float32, class_signs, discriminative_power
from torchcaps.routing import DiscriminativeRouting
from torchcaps.train.options import TrainOptions

Directions = Sequence[Tensor]


class Ascent:
    """Moves the coefficients of all discriminative layers up the gradient of ``r``.

    ``r`` depends on the last layer's totals alone; the coefficients of layers before it get their gradient
    by the chain rule. In the last layer, automatic differentiation computes what
    :func:`torchcaps.functional.ascent_direction` spells out.
    """

    def __init__(self, fabric: Fabric, routings: Sequence[DiscriminativeRouting], options: TrainOptions) -> None:
        self._fabric = fabric
        self._routings = routings
        self._balanced = options.balanced
        self._proximal = options.shrinkage == "proximal"
        self._gamma = options.gamma
        self.coefficients = [routing.coefficients for routing in routings]
        self.optimizer: torch.optim.Optimizer
        if options.ascent == "adam":
            self.optimizer = torch.optim.Adam(self.coefficients, lr=options.gamma, maximize=True)
        else:
            self.optimizer = torch.optim.SGD(self.coefficients, lr=options.gamma, maximize=True)  # Eq. gaobj2, gaobj3

    def directions(self, totals: Tensor, present: Tensor, *, retain_graph: bool = False) -> Directions:
        """∂r/∂b of the global batch for every layer, given this process's class totals (B, J, E)."""
        signs = class_signs(present, balanced=self._balanced)
        objective = discriminative_power(at_least_float32(totals), signs)
        for routing in self._routings:
            if not self._proximal:  # else step() deals with the penalty
                objective = objective - routing.regulariser()
        directions = torch.autograd.grad(objective, self.coefficients, retain_graph=retain_graph)
        return [self._fabric.all_reduce(each, reduce_op="mean") for each in directions]  # type: ignore[misc]

    def step(self, directions: Directions) -> None:
        for coefficients, direction in zip(self.coefficients, directions):
            coefficients.grad = direction
        self.optimizer.step()
        if self._proximal:
            for routing in self._routings:
                routing.shrink(self._gamma)
