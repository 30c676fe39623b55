"""The coefficient steps of discriminative routing (Algorithm 1, lines 7 to 9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning_fabric import Fabric
from torch import Tensor

from torchcaps.functional import at_least_float32, class_powers, class_signs, discriminative_power, ratio_signs
from torchcaps.routing import DiscriminativeRouting
from torchcaps.train.options import TrainOptions

Directions = Sequence[Tensor]
MOMENTUM = 0.9


class Ascent:
    """Moves the coefficients of all discriminative layers up the gradient of ``r``.

    ``r`` depends on the last layer's totals alone; the coefficients of layers before it get their gradient
    by the chain rule. In the last layer, automatic differentiation computes what
    :func:`torchcaps.functional.ascent_direction` spells out.
    """

    def __init__(
        self,
        fabric: Fabric,
        routings: Sequence[DiscriminativeRouting],
        options: TrainOptions,
        *,
        types: int | None = None,
    ) -> None:
        """``types`` is how many types of input capsules the first of the layers has."""
        self._fabric = fabric
        self._routings = routings
        self._balanced = options.balanced
        self._ratio = options.objective == "ratio"
        self._shrinkage = options.shrinkage
        self._groups = [len(routing.coefficients) for routing in routings]
        if options.shrinkage == "types" and types is not None:
            self._groups[0] = types
        self._decaying = options.decaying_gamma
        self._gamma = options.gamma
        self.coefficients = [routing.coefficients for routing in routings]
        self._norms = [_norms(each) for each in self.coefficients] if options.projected else None
        self.optimizer: torch.optim.Optimizer
        if options.ascent == "adam":
            self.optimizer = torch.optim.Adam(self.coefficients, lr=options.gamma, maximize=True)
        else:  # Eq. gaobj2, gaobj3
            momentum = MOMENTUM if options.ascent == "momentum" else 0.0
            self.optimizer = torch.optim.SGD(self.coefficients, lr=options.gamma, momentum=momentum, maximize=True)

    def directions(self, totals: Tensor, present: Tensor, *, retain_graph: bool = False) -> Directions:
        """∂r/∂b of the global batch for every layer, given this process's class totals (B, J, E)."""
        totals = at_least_float32(totals)
        objective = discriminative_power(totals, self._signs(totals.detach(), present))
        for routing in self._routings:
            if self._shrinkage == "gradient":  # else step() deals with the penalty
                objective = objective - routing.regulariser()
        directions = torch.autograd.grad(objective, self.coefficients, retain_graph=retain_graph)
        return [self._global_mean(each) for each in directions]

    def _signs(self, totals: Tensor, present: Tensor) -> Tensor:
        if not self._ratio:
            return class_signs(present, balanced=self._balanced)
        right, wrong = (self._global_mean(each) for each in class_powers(totals, present))
        return ratio_signs(present, right, wrong)

    def _global_mean(self, value: Tensor) -> Tensor:
        return self._fabric.all_reduce(value, reduce_op="mean")  # type: ignore[return-value]

    def step(self, directions: Directions, factor: float = 1.0) -> None:
        """One step of all coefficients; ``factor`` is the learning rate as a share of its highest."""
        gamma = self._gamma * factor if self._decaying else self._gamma
        self.optimizer.param_groups[0]["lr"] = gamma
        for coefficients, direction in zip(self.coefficients, directions):
            coefficients.grad = direction
        self.optimizer.step()
        if self._shrinkage != "gradient":
            self._shrink(gamma)
        if self._norms is not None:
            self._project(self._norms)

    def _shrink(self, gamma: float) -> None:
        for routing, groups in zip(self._routings, self._groups):
            if self._shrinkage == "proximal":
                routing.shrink(gamma)
            else:
                routing.shrink_groups(gamma, groups)

    @torch.no_grad()
    def _project(self, norms: Sequence[Tensor]) -> None:
        for coefficients, start in zip(self.coefficients, norms):
            now = _norms(coefficients)
            scale = start.to(now.device) / now.clamp_min(torch.finfo(now.dtype).tiny)
            coefficients.mul_(torch.where(now > 0, scale, torch.zeros_like(scale)))  # what is all zero remains so


def _norms(coefficients: Tensor) -> Tensor:
    """‖b_j‖ of every output capsule, (J,)."""
    norms: Tensor = torch.linalg.vector_norm(coefficients.detach(), dim=0)
    return norms
