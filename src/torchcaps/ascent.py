"""The coefficient steps of discriminative routing (Algorithm 1, lines 7 to 9), as an optimiser.

:class:`RoutingAscent` is put together from three small objects: what is ascended (:class:`Difference`,
:class:`Balanced`, :class:`Ratio`), what holds the coefficients back (:class:`L2Penalty`, :class:`L1Penalty`,
:class:`GroupPenalty`), and what they are brought back to after a step (:class:`FixedNorm`, or nothing).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softshrink
from torch.optim.adam import adam

from torchcaps.functional import (
    Capsules,
    at_least_float32,
    class_powers,
    class_signs,
    classes_shown,
    l1_penalty,
    l2_penalty,
    ratio_signs,
    routing_objective,
)
from torchcaps.routing.discriminative import DiscriminativeRouting

Reduce = Callable[[Tensor], Tensor]
"""From a process's own tensor to its mean over all processes."""


NO_GRAPH = (
    "The class capsules have no graph that leads to the coefficients. Call backward(retain_graph=True) on the loss "
    "before, and step the weights after, or give the capsules of a new forward pass of the same network. If its "
    "coefficients were replaced, by load_state_dict(assign=True), make a new RoutingAscent."
)


class Objective(ABC):
    """What the coefficients ascend: Σ over classes of a weight times the squared length of the class capsule."""

    @abstractmethod
    def weights(self, totals: Tensor, shown: Tensor, reduce: Reduce) -> Tensor:
        """The weight of each squared length, δ in the paper.

        Args:
            totals: class capsules before the squash, without gradient, (B, J, E).
            shown: presence of the classes, (B, J).
            reduce: gives the mean over all processes.

        Returns:
            (B, J)
        """


@final
@dataclass(frozen=True)
class Difference(Objective):
    """The paper's: squared lengths of the right class capsules minus those of the wrong ones (Eq. obj-1)."""

    def weights(self, totals: Tensor, shown: Tensor, reduce: Reduce) -> Tensor:
        return class_signs(shown)


@final
@dataclass(frozen=True)
class Balanced(Objective):
    """Ours: the paper's difference, with one right class weighing as much as all wrong ones together."""

    def weights(self, totals: Tensor, shown: Tensor, reduce: Reduce) -> Tensor:
        return class_signs(shown, balanced=True)


@final
@dataclass(frozen=True)
class Ratio(Objective):
    """Ours: the logarithm of right over wrong squared length, summed over the classes."""

    def weights(self, totals: Tensor, shown: Tensor, reduce: Reduce) -> Tensor:
        right, wrong = (reduce(power) for power in class_powers(totals, shown))
        return ratio_signs(shown, right, wrong)


class Penalty:
    """What keeps coefficients small: part of ``r``, or a proximal step after each step. This one does nothing."""

    def value(self, coefficients: Tensor) -> Tensor | None:
        """What is subtracted from the objective; None if :meth:`shrink` does it all."""
        return None

    def shrink(self, coefficients: Tensor, gamma: float, layer: int) -> None:
        """Change the coefficients (I, J) of a layer in place after a step of size γ.

        ``layer`` is its number, from 0, in the order in which the network has its layers.
        """


def _check_size(name: str, value: Any) -> None:
    if not isinstance(value, SupportsFloat) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be zero or more, and finite, not {value!r}")


@final
@dataclass(frozen=True)
class L2Penalty(Penalty):
    """λ‖b‖² (Eq. obj-2).

    Args:
        strength: λ.
        proximal: ours; shrink after the step instead of taking the gradient.
    """

    strength: float
    proximal: bool = False

    def __post_init__(self) -> None:
        _check_size("strength (λ)", self.strength)

    def value(self, coefficients: Tensor) -> Tensor | None:
        return None if self.proximal else l2_penalty(coefficients, self.strength)

    def shrink(self, coefficients: Tensor, gamma: float, layer: int) -> None:
        if self.proximal:
            coefficients.div_(1 + 2 * gamma * self.strength)


@final
@dataclass(frozen=True)
class L1Penalty(Penalty):
    """λ‖b‖₁, doubled as in the printed update (Eq. gaobj3).

    Args:
        strength: λ.
        proximal: ours; soft thresholding after the step, which sets a coefficient to exactly zero where a gradient
            would step over it.
    """

    strength: float
    proximal: bool = False

    def __post_init__(self) -> None:
        _check_size("strength (λ)", self.strength)

    def value(self, coefficients: Tensor) -> Tensor | None:
        return None if self.proximal else l1_penalty(coefficients, self.strength)

    def shrink(self, coefficients: Tensor, gamma: float, layer: int) -> None:
        if self.proximal:
            coefficients.copy_(softshrink(coefficients, 2 * gamma * self.strength))


@final
@dataclass(frozen=True)
class GroupPenalty(Penalty):
    """Ours: 2λ Σ_g √n ‖b_g‖ over groups of n coefficients, by proximal steps.

    What is not worth its penalty becomes zero for all output capsules at once, and can be pruned. The factor √n
    makes it as strong as the L1 penalty is on coefficients that are all alike.

    Args:
        strength: λ.
        types: how many types of capsules the inputs of the first layer that the network has are of; all capsules of a
            type are a group. Capsule i is of type i modulo ``types``. Without it, and in other layers, each input
            capsule is a group.
    """

    strength: float
    types: int | None = None

    def __post_init__(self) -> None:
        _check_size("strength (λ)", self.strength)
        if self.types is not None and (not isinstance(self.types, int) or self.types < 1):
            raise ValueError(f"types must be a whole number from 1, not {self.types}")

    def shrink(self, coefficients: Tensor, gamma: float, layer: int) -> None:
        inputs, outputs = coefficients.shape
        if self.types is not None and layer == 0 and inputs % self.types:
            raise ValueError(f"{inputs} input capsules cannot be of {self.types} types")
        groups = self.types if self.types is not None and layer == 0 else inputs
        grouped = coefficients.view(inputs // groups, groups, outputs)
        norms = torch.linalg.vector_norm(grouped, dim=(0, 2), keepdim=True)
        threshold = 2 * gamma * self.strength * math.sqrt(inputs // groups * outputs)
        grouped.mul_((1 - threshold / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_min(0))


@final
@dataclass(frozen=True)
class FixedNorm:
    """Ours: after each step every ‖b_j‖ is brought back to what it was at the start.

    ``r`` has no bound, and neither have coefficients that ascend it for long; with this they can only turn. It also
    makes strong penalties harmless: what they take from all coefficients of a class is given back to those that remain.
    """

    def measure(self, coefficients: Tensor) -> Tensor:
        """‖b_j‖ of every output capsule, (J,)."""
        norms: Tensor = torch.linalg.vector_norm(coefficients.detach(), dim=0)
        return norms

    def restore(self, coefficients: Tensor, norms: Tensor) -> None:
        """Scale the coefficients (I, J) in place to these norms. What is all zero remains so."""
        now = self.measure(coefficients)
        scale = norms.to(now) / now.clamp_min(torch.finfo(now.dtype).tiny)
        coefficients.mul_(torch.where(now > 0, scale, torch.zeros_like(scale)))


class RoutingAscent(torch.optim.Optimizer):
    """Moves the coefficients of all discriminative layers of a network up the gradient of ``r``.

    ``r`` depends on the class capsules alone; the coefficients of layers before the last get their gradient by the
    chain rule. The weights are moved by an optimiser of your choice: the coefficients are not among
    ``network.parameters()``. As with any optimiser, the learning rate ``lr`` of the parameter group is what schedules
    change; here it is γ.

    Args:
        network: any module that has :class:`torchcaps.L2Routing` or :class:`torchcaps.L1Routing` inside.
        gamma: γ, the size of a step. Not given in the paper. ``r`` has no bound: if coefficients grow without end, a
            smaller γ delays it and :class:`FixedNorm` prevents it.
        objective: :class:`Difference` (the paper's), :class:`Balanced` or :class:`Ratio`.
        penalty: for all layers; without it, each layer's routing decides (:class:`L2Penalty` or :class:`L1Penalty` with
            its ``strength``).
        constraint: :class:`FixedNorm`, or None as in the paper. It keeps the norms that the coefficients have now: load
            weights first.
        rule: "plain" as printed (Eq. gaobj2 and gaobj3), or "adam" as in the authors' early code.
        reduce: for several processes, a function that gives the mean of a tensor over all of them; by default that of
            ``torch.distributed``, if it is in use.

    Both readings of Algorithm 1 are possible. Fused, with one forward pass for both steps::

        capsules = network(images).capsules
        margin_loss(capsules.activations, labels).backward(retain_graph=True)
        ascent.step(capsules, labels)
        optimizer.step()

    Strict, with a forward pass of its own that sees the new weights::

        optimizer.step()
        ascent.step(network(images).capsules, labels)

    >>> import torchcaps
    >>> layer = torchcaps.CapsuleLayer(6, 8, 3, 16)
    >>> ascent = RoutingAscent(layer, gamma=0.1)
    >>> ascent.step(layer(torch.rand(4, 6, 8)), torch.tensor([0, 1, 2, 0]))
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        gamma: float = 0.1,
        objective: Objective | None = None,
        penalty: Penalty | None = None,
        constraint: FixedNorm | None = None,
        rule: Literal["plain", "adam"] = "plain",
        reduce: Reduce | None = None,
    ) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be a module, not {type(network).__name__}")
        routings = [module for module in network.modules() if isinstance(module, DiscriminativeRouting)]
        if not (routings and all(routing.connected for routing in routings)):
            raise ValueError(
                "the network has no discriminative routing (L2Routing, L1Routing in a layer) whose coefficients ascend"
            )
        _check_size("gamma", gamma)
        parts = {
            "objective": (objective, Objective, "Balanced()"),
            "penalty": (penalty, Penalty, "L2Penalty(1e-5)"),
            "constraint": (constraint, FixedNorm, "FixedNorm()"),
        }
        for name, (part, kind, example) in parts.items():
            if not (part is None or isinstance(part, kind)):
                raise TypeError(f"{name} must be an object such as {example}, not {part!r}")
        if rule not in ("plain", "adam"):
            raise ValueError(f"rule must be 'plain' or 'adam', not {rule!r}")
        self.objective = objective or Difference()
        kinds = {"l2": L2Penalty, "l1": L1Penalty}
        self.penalties = [penalty or kinds[routing.penalty](routing.strength) for routing in routings]
        if rule == "adam" and any(map(_is_proximal, self.penalties)):
            raise ValueError("a proximal penalty goes with plain steps only: Adam rescales them")
        self.constraint = constraint
        self.rule = rule
        self.reduce = reduce or _over_processes
        # Required again, because load_state_dict(assign=True) brings tensors without a gradient.
        super().__init__([routing.coefficients.requires_grad_() for routing in routings], {"lr": gamma})
        if constraint is not None:
            for coefficients in self.coefficients:
                self.state[coefficients]["norm"] = constraint.measure(coefficients)

    def __getstate__(self) -> dict[str, Any]:
        """All of it, so that it can be copied together with its network."""
        own = {name: getattr(self, name) for name in ("objective", "penalties", "constraint", "rule", "reduce")}
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not for callers: the coefficients are those of the network."""
        if self.param_groups:
            raise RuntimeError("the coefficients are those of the network: make a new RoutingAscent for another one")
        super().add_param_group(param_group)

    @property
    def coefficients(self) -> list[Tensor]:
        """The coefficients (I, J) of every layer, in the order in which the network has them."""
        coefficients: list[Tensor] = self.param_groups[0]["params"]
        return coefficients

    @property
    def gamma(self) -> float:
        """γ, the size of the next step."""
        gamma: float = self.param_groups[0]["lr"]
        return gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        _check_size("gamma", value)
        self.param_groups[0]["lr"] = value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of another ascent of the same kind."""
        states = [state_dict["state"].get(number, {}) for number in range(len(self.coefficients))]
        if self.constraint is not None and not all("norm" in state for state in states):
            raise ValueError("the state has no norms: it is that of an ascent without FixedNorm")
        for number, (state, coefficients) in enumerate(zip(states, self.coefficients)):
            whole = coefficients.shape
            for name, shape in (("norm", whole[1:]), ("exp_avg", whole), ("exp_avg_sq", whole)):
                if name in state and state[name].shape != shape:
                    raise ValueError(
                        f"the state of layer {number} is that of other coefficients: {name} has shape "
                        f"{tuple(state[name].shape)}, not {tuple(shape)}"
                    )
        super().load_state_dict(state_dict)

    @torch.enable_grad()
    def directions(self, capsules: Capsules, labels: Tensor) -> list[Tensor]:
        """∂r/∂b for every layer, for the batch of all processes. The graph of the forward pass is kept.

        Args:
            capsules: the class capsules of a forward pass, with its graph.
            labels: class numbers (B,) or (B, K), or presence (B, J).
        """
        if not isinstance(capsules, Capsules):
            raise TypeError("give the class capsules: network(images).capsules")
        if not capsules.totals.requires_grad:
            raise RuntimeError(NO_GRAPH)
        totals = at_least_float32(capsules.totals)
        shown = classes_shown(labels, totals).to(totals.dtype)
        weights = self.objective.weights(totals.detach(), shown, self.reduce)
        if weights.shape != shown.shape:
            raise ValueError(f"the objective's weights must be {tuple(shown.shape)}, not {tuple(weights.shape)}")
        # Penalties have variables of their own, or coefficients that the capsules do not depend on would follow them.
        penalised = [coefficients.detach().requires_grad_() for coefficients in self.coefficients]
        values = [penalty.value(coefficients) for penalty, coefficients in zip(self.penalties, penalised)]
        objective = routing_objective(totals, weights, [value for value in values if value is not None])
        try:
            gradients = torch.autograd.grad(
                objective, [*self.coefficients, *penalised], retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if any(words in str(error) for words in ("second time", "inplace operation", "does not require grad")):
                raise RuntimeError(NO_GRAPH) from error
            raise
        ascending, held_back = gradients[: len(penalised)], gradients[len(penalised) :]
        if any(gradient is None for gradient in ascending):
            raise RuntimeError(NO_GRAPH)
        return [
            self.reduce(gradient if penalty is None else gradient + penalty)
            for gradient, penalty in zip(ascending, held_back)
        ]

    def step(self, capsules: Capsules, labels: Tensor) -> None:  # type: ignore[override]
        """Move all coefficients once, given the class capsules and labels of a forward pass.

        Args:
            capsules: the class capsules of a forward pass, with its graph.
            labels: class numbers (B,) or (B, K), or presence (B, J).
        """
        self.move(self.directions(capsules, labels))

    @torch.no_grad()
    def move(self, directions: Sequence[Tensor]) -> None:
        """One step of all coefficients along directions found earlier."""
        self._opt_called = True  # by which schedules tell that there was a step
        for layer, (coefficients, direction) in enumerate(zip(self.coefficients, directions, strict=True)):
            if coefficients.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"coefficients in {coefficients.dtype} would not follow small steps: keep the network in float32, "
                    "and use autocast"
                )
            state = self.state[coefficients]
            if self.rule == "adam":
                _adam_ascent(coefficients, direction, state, self.gamma)
            else:
                coefficients.add_(direction, alpha=self.gamma)  # Eq. gaobj2, gaobj3
            self.penalties[layer].shrink(coefficients, self.gamma, layer)
            if self.constraint is not None:
                self.constraint.restore(coefficients, state["norm"])
            coefficients.grad = None  # what back-propagation of the loss has left there


def _over_processes(tensor: Tensor) -> Tensor:
    """The mean over the processes of ``torch.distributed``, or over the only one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _is_proximal(penalty: Penalty) -> bool:
    return type(penalty).shrink is not Penalty.shrink and penalty.value(torch.zeros(1, 1)) is None


def _adam_ascent(coefficients: Tensor, direction: Tensor, state: dict[str, Any], gamma: float) -> None:
    if "step" not in state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(coefficients)
        state["exp_avg_sq"] = torch.zeros_like(coefficients)
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = state[name].to(coefficients)  # which may have moved to another device or data type
    adam(
        [coefficients],
        [direction],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=gamma,
        weight_decay=0.0,
        eps=1e-8,
        maximize=True,
    )
