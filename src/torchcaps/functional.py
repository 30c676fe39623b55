"""The mathematics of capsule networks as pure functions.

Letters used throughout: ``B`` images in the batch, ``I`` input capsules, ``J`` output capsules, ``D`` and
``E`` the sizes of their poses, ``K`` the classes present in one image. Equation names are the labels of
"Routing Towards Discriminative Power of Class Capsules" (Yang, Li and Yu); ``docs/equations.md`` maps each
of them to the function here and to its test.

The paper calls a class capsule ``v`` before the squash and ``s`` after it. Here they are ``totals`` (the
weighted total of the votes) and ``poses``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.ops.squash import can_squash, compiled_squash

__all__ = [
    "PENALTIES",
    "Capsules",
    "ascent_direction",
    "at_least_float32",
    "capsules_from_totals",
    "class_powers",
    "class_signs",
    "discriminative_power",
    "margin_loss",
    "multi_hot",
    "ratio_signs",
    "reconstruction_loss",
    "routing_objective",
    "spread_loss",
    "spread_margin",
    "squash",
    "votes",
]


class Capsules(NamedTuple):
    """The output of a capsule layer for a batch of images."""

    poses: Tensor
    """(B, J, E) what the next layer sees; for vector capsules the squashed totals."""
    activations: Tensor
    """(B, J) how surely each capsule's entity is there, in [0, 1]; for vector capsules the pose's length."""
    totals: Tensor
    """(B, J, E) the weighted totals of the votes, before any squash."""


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor, or a float32 copy if it has fewer bits: sums over a batch need them."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def squash(totals: Tensor) -> Tensor:
    """Shrink each vector of the last axis to a length below 1, keeping its direction (Eq. squash).

    Zero vectors give zeros with a zero gradient, and no finite vector overflows: the formula is evaluated
    on ``totals`` divided by their largest component, which leaves its value and gradient unchanged.

    >>> squash(torch.tensor([0.0, 3.0, 4.0]))
    tensor([0.0000, 0.5769, 0.7692])
    """
    return capsules_from_totals(totals).poses


def capsules_from_totals(totals: Tensor) -> Capsules:
    """The vector capsules with the given totals: poses by :func:`squash`, activations their lengths."""
    if can_squash(totals):
        return Capsules(*compiled_squash(totals), totals)
    peak = totals.detach().abs().amax(-1, keepdim=True).clamp_min(1.0)
    scaled = totals / peak
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    shrink = norm / (peak.reciprocal().square() + norm.square())  # Eq. squash with v = peak * scaled
    return Capsules(scaled * shrink, (norm * shrink).squeeze(-1), totals)


def votes(poses: Tensor, weight: Tensor) -> Tensor:
    """Each input capsule's prediction of each output capsule: (B, I, D), (I, D, J, E) -> (B, I, J, E) (Eq. p2d).

    The largest tensor of a capsule network. The layers never build it: see :mod:`torchcaps.routing.votes`.
    """
    return torch.einsum("bid,idje->bije", poses, weight)


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """Class numbers (B, K) to presence (B, J) of zeros and ones, T in Eq. ml.

    >>> multi_hot(torch.tensor([[0, 2]]), 3)
    tensor([[1., 0., 1.]])
    """
    present = torch.zeros(labels.shape[0], classes, device=labels.device)
    return present.scatter_(1, labels, 1.0)


def margin_loss(
    activations: Tensor,
    present: Tensor,
    *,
    upper_margin: float = 0.9,
    lower_margin: float = 0.1,
    absent_weight: float = 0.5,
) -> Tensor:
    """Mean over the batch of the margin loss summed over classes (Eq. ml), any number of them present.

    The lengths are those *after* the squash: with m+ = 0.9 below 1, nothing else is meant.
    """
    missing = present * (upper_margin - activations).clamp_min(0).square()
    spurious = (1 - present) * (activations - lower_margin).clamp_min(0).square()
    return (missing + absent_weight * spurious).sum(1).mean()


def reconstruction_loss(reconstructions: Tensor, targets: Tensor) -> Tensor:
    """Squared error summed over all that belongs to an image, mean over the batch."""
    return (reconstructions - targets).square().flatten(1).sum(1).mean()


def class_signs(present: Tensor, *, balanced: bool = False) -> Tensor:
    """The indicator δ of Eq. obj-1: +1 where a class is present, -1 where it is not.

    ``balanced`` is ours: it divides the -1s by how many absent classes an image has for each present one,
    so that both sides weigh the same.

    >>> class_signs(torch.tensor([[1.0, 0.0, 0.0]]), balanced=True)
    tensor([[ 1.0000, -0.5000, -0.5000]])
    """
    signs = 2 * present - 1
    if not balanced:
        return signs
    share = present.sum(1, keepdim=True) / (1 - present).sum(1, keepdim=True)
    return torch.where(present > 0, signs, share * signs)


def class_powers(totals: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """The mean squared length of every class capsule (J,), counted where its class is present, and where it is not.

    Both are means over the whole batch, so those of several processes can be averaged.
    """
    squares = totals.square().sum(-1)
    return (present * squares).mean(0), ((1 - present) * squares).mean(0)


def ratio_signs(present: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
    """Weights in place of δ with which ``r`` becomes Σ_j log(right_j / wrong_j), as far as its gradient goes: ours.

    How much longer a capsule is where it should be than where it should not, as in Fisher's discriminant: unlike
    the paper's difference it does not grow with the scale of the coefficients, and all classes count the same.
    ``right`` and ``wrong`` are those of :func:`class_powers`. A class that no image of the batch shows, or all
    do, has no ratio, and no part in the step.
    """
    measured = (right > 0) & (wrong > 0)
    tiny = torch.finfo(right.dtype).tiny
    weights = present / right.clamp_min(tiny) - (1 - present) / wrong.clamp_min(tiny)
    return torch.where(measured, weights, torch.zeros_like(weights))


def discriminative_power(totals: Tensor, signs: Tensor, *, reduction: str = "mean") -> Tensor:
    """How much longer the right class capsules are than the wrong ones: Σ δ ‖v‖² (Eq. obj-1-b).

    The paper sums over the batch; its mean, the default, makes γ independent of the batch size.
    """
    power = (signs * totals.square().sum(-1)).sum(1)  # (B, J, E) -> (B,)
    if reduction == "mean":
        return power.mean()
    if reduction == "sum":
        return power.sum()
    raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")


def _l2(coefficients: Tensor) -> Tensor:
    return coefficients.square().sum()  # Eq. obj-2


def _l1(coefficients: Tensor) -> Tensor:
    # Eq. obj-3 has λ‖b‖₁, whose gradient is λ·sign(b); the printed update, Eq. gaobj3, subtracts 2λ·sign(b).
    # The update is what was run, so the objective is the one that belongs to it. sign(0) = 0, as in the paper.
    return 2 * coefficients.abs().sum()


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {"l2": _l2, "l1": _l1}


def routing_objective(
    totals: Tensor,
    signs: Tensor,
    coefficients: Iterable[Tensor],
    *,
    penalty: str,
    strength: float,
    reduction: str = "mean",
) -> Tensor:
    """The objective ``r`` that discriminative routing ascends (Eq. obj-2 and obj-3).

    Its gradient with respect to the coefficients, of this layer and by the chain rule of all layers before
    it, is the ascent direction; in the last layer it equals :func:`ascent_direction`.

    Differs from the paper: the first term is a mean over the batch unless ``reduction="sum"``, so that a
    step equals the paper's with γ divided and λ multiplied by the batch size.
    """
    if penalty not in PENALTIES:
        raise ValueError(f"penalty must be one of {', '.join(PENALTIES)}, not {penalty!r}")
    regulariser = sum((PENALTIES[penalty](each) for each in coefficients), start=torch.zeros_like(totals[0, 0, 0]))
    return discriminative_power(totals, signs, reduction=reduction) - strength * regulariser


def ascent_direction(
    poses: Tensor,
    weight: Tensor,
    coefficients: Tensor,
    signs: Tensor,
    *,
    penalty: str,
    strength: float,
    reduction: str = "mean",
) -> Tensor:
    """The closed form of ∂r/∂b for one layer, (I, J): the bracket of Eq. gaobj2 or gaobj3, times two.

    ``b + γ * ascent_direction(...)`` is the paper's update. Neither the votes Û nor their Gram matrices
    Û Ûᵀ are built: Σ_k δ_jk Û_k Û_kᵀ b_j is, entry by entry, ⟨W_ij, Σ_k δ_jk u_ik v_jkᵀ⟩.

    Differs from the paper: the printed L1 update has the first factor ``b_j`` transposed to the left, where
    its shape does not fit; it is read as in the L2 update.
    """
    B, I, D = poses.shape
    J, E = weight.shape[2:]
    flat_poses = poses.reshape(B, I * D)
    totals = flat_poses @ (weight * coefficients[:, None, :, None]).reshape(I * D, J * E)  # Eq. v_j = Ûᵀ b_j
    signed = (signs[:, :, None] * totals.view(B, J, E)).reshape(B, J * E)
    if reduction == "mean":
        signed = signed / B
    correlation = (flat_poses.mT @ signed).view(I, D, J, E)  # Σ_k δ_jk u_ik v_jkᵀ
    data_term = (weight * correlation).sum((1, 3))
    shrinkage = coefficients if penalty == "l2" else coefficients.sign()
    return 2 * (data_term - strength * shrinkage)


def spread_loss(activations: Tensor, present: Tensor, *, margin: float) -> Tensor:
    """Mean over the batch of the spread loss, Eq. 3 of "Matrix capsules with EM routing".

    Every class that is present should be at least ``margin`` more active than every class that is not: the
    squared shortfalls are summed over all such pairs, of which the paper, with one class in an image, has J - 1.

    >>> spread_loss(torch.tensor([[0.75, 0.5, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]]), margin=0.5)
    tensor(0.0625)
    """
    lead = activations.unsqueeze(2) - activations.unsqueeze(1)  # (B, J, J): row over column
    pairs = present.unsqueeze(2) * (1 - present).unsqueeze(1)
    return (pairs * (margin - lead).clamp_min(0).square()).sum((1, 2)).mean()


def spread_margin(progress: float, *, start: float = 0.2, end: float = 0.9) -> float:
    """The margin of the spread loss when training has come this far, from 0 to 1; small at first, so that few
    capsules die early on.

    >>> [round(spread_margin(progress), 3) for progress in (0, 0.5, 1)]
    [0.2, 0.55, 0.9]
    """
    return start + (end - start) * min(1.0, progress)
