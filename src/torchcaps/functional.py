"""The mathematics of capsule networks as pure functions.

Letters used throughout: ``B`` images in the batch, ``I`` input capsules, ``J`` output capsules, ``D`` and
``E`` the sizes of their poses, ``K`` the classes that one image shows. Equation names are the labels of
"Routing Towards Discriminative Power of Class Capsules" (Yang, Li and Yu); ``docs/equations.md`` maps each
of them to the function here and to its test.

The paper calls a class capsule ``v`` before the squash and ``s`` after it. Here they are ``totals`` (the
weighted total of the votes) and ``poses``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Capsules(NamedTuple):
    """The output of a capsule layer for a batch of images."""

    poses: Tensor
    """(B, J, E) what the next layer sees; for vector capsules the squashed totals."""
    activations: Tensor
    """(B, J) how surely each capsule's entity is there, from 0 to 1; for vector capsules the pose's length."""
    totals: Tensor
    """(B, J, E) the weighted totals of the votes, before any squash."""


def runs_eagerly() -> bool:
    """Whether nobody looks on who knows ordinary operations only: the compiler, export, a transform of torch.func,
    forward-mode differentiation, a mode that watches or replaces every operation."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor, or a float32 copy if it has fewer bits: sums over a batch need them."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def squash(totals: Tensor) -> Tensor:
    """Shrink each vector of the last axis to a length below 1, up to rounding, keeping its direction (Eq. squash).

    Args:
        totals: vectors of any length, (..., E).

    Returns:
        (..., E)

    Zero vectors give zeros with a zero gradient, and no finite vector overflows: the formula is evaluated
    on ``totals`` divided by their largest component, which leaves its value and gradient unchanged.

    >>> squash(torch.tensor([0.0, 3.0, 4.0]))
    tensor([0.0000, 0.5769, 0.7692])
    """
    return capsules_from_totals(totals).poses


def capsules_from_totals(totals: Tensor) -> Capsules:
    """The vector capsules with the given totals: poses by :func:`squash`, activations their lengths."""
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


def presence(labels: Tensor, classes: int) -> Tensor:
    """Which classes each image shows, T in Eq. ml, as zeros and ones.

    Args:
        labels: class numbers, (B,) for one class in an image or (B, K) for several; -1 fills a row that has fewer.
            Presence itself, floating-point numbers or truth values (B, J), is returned as floating-point numbers.
            On the CPU it is checked that they are class numbers.
        classes: how many there are.

    Returns:
        (B, J)

    >>> presence(torch.tensor([[0, 2], [1, -1]]), 3)
    tensor([[1., 0., 1.],
            [0., 1., 0.]])
    """
    if labels.dtype == torch.bool:  # not the class numbers 0 and 1
        labels = labels.float()
    if labels.is_floating_point():
        if labels.ndim != 2 or labels.shape[1] != classes:
            raise ValueError(f"presence must have shape (B, {classes}), not {tuple(labels.shape)}")
        return labels
    if labels.ndim not in (1, 2):
        raise ValueError(f"labels must have shape (B,) or (B, K), not {tuple(labels.shape)}")
    rows = (labels[:, None] if labels.ndim == 1 else labels).long()
    if rows.device.type == "cpu" and rows.numel() > 0 and runs_eagerly():
        _check_classes(rows, classes)
    shown = torch.zeros(len(rows), classes + 1, device=labels.device)
    return shown.scatter(1, rows + 1, 1.0)[:, 1:]  # the first column collects the -1s


LIKE_PRESENCE = "labels (B, {classes}) of zeros and ones look like presence: give them as floats or truth values"


def _check_classes(rows: Tensor, classes: int) -> None:
    if not -1 <= int(rows.min()) <= int(rows.max()) < classes:
        raise ValueError(f"labels must be class numbers from 0 to {classes - 1}, not {rows.min()} to {rows.max()}")
    if rows.shape[1] != classes or not bool(((rows == 0) | (rows == 1)).all()):
        return
    if classes > 2 or (classes == 2 and bool((rows[:, 0] == rows[:, 1]).any())):  # 0, 1 may mean both classes
        raise ValueError(LIKE_PRESENCE.format(classes=classes))


def classes_shown(labels: Tensor, capsules: Tensor) -> Tensor:
    """:func:`presence` of the classes that belong to class capsules (B, J, ...)."""
    if not (isinstance(capsules, Tensor) and isinstance(labels, Tensor)):
        raise TypeError(f"expected two tensors, not {type(capsules).__name__} and {type(labels).__name__}")
    shown = presence(labels, capsules.shape[1])
    whole = not (labels.is_floating_point() or labels.dtype == torch.bool)
    pairs = whole and shown.shape[1] == 2 and labels.shape[1:] == (2,) and labels.device.type == "cpu"
    if pairs and runs_eagerly() and bool((labels == torch.tensor([1, 0])).all(1).any()):
        raise ValueError(LIKE_PRESENCE.format(classes=2))  # nobody names both classes in this order
    if shown.shape[0] != capsules.shape[0]:
        raise ValueError(f"there are labels of {shown.shape[0]} images and capsules of {capsules.shape[0]}")
    return shown


def margin_loss(
    activations: Tensor,
    labels: Tensor,
    *,
    upper_margin: float = 0.9,
    lower_margin: float = 0.1,
    absent_weight: float = 0.5,
    image_weights: Tensor | None = None,
) -> Tensor:
    """Mean over the batch of the margin loss summed over classes (Eq. ml), for any number of classes in an image.

    Args:
        activations: the class capsules' lengths *after* the squash, (B, J).
        labels: the classes shown, as for :func:`presence`.
        upper_margin: the length from which a class that is there costs nothing.
        lower_margin: the length up to which a class that is not there costs nothing.
        absent_weight: weight of the classes that are not there.
        image_weights: how much each image counts, (B,); by default all the same.

    Returns:
        one number

    >>> margin_loss(torch.tensor([[0.9, 0.3]]), torch.tensor([0]))
    tensor(0.0200)
    """
    shown = classes_shown(labels, activations)
    missing = shown * (upper_margin - activations).clamp_min(0).square()
    spurious = (1 - shown) * (activations - lower_margin).clamp_min(0).square()
    return weighted_mean((missing + absent_weight * spurious).sum(1), image_weights)


def weighted_mean(losses: Tensor, image_weights: Tensor | None) -> Tensor:
    """The mean of losses (B,), each times its image's weight (B,)."""
    if image_weights is None:
        return losses.mean()
    if image_weights.shape != losses.shape:
        raise ValueError(f"image_weights must be {tuple(losses.shape)}, not {tuple(image_weights.shape)}")
    return (image_weights * losses).mean()


def reconstruction_loss(reconstructions: Tensor, targets: Tensor) -> Tensor:
    """Squared error summed over all that belongs to an image, mean over the batch.

    Args:
        reconstructions: what was drawn, (B, K, C, H, W) from a decoder.
        targets: what should have been, of the same shape.

    Returns:
        one number

    >>> reconstruction_loss(torch.ones(2, 1, 1, 3, 3), torch.zeros(2, 1, 1, 3, 3))
    tensor(9.)
    """
    if reconstructions.shape != targets.shape:
        raise ValueError(f"targets must be {tuple(reconstructions.shape)} as drawn, not {tuple(targets.shape)}")
    return (reconstructions - targets).square().flatten(1).sum(1).mean()


def class_signs(shown: Tensor, *, balanced: bool = False) -> Tensor:
    """The indicator δ of Eq. obj-1: +1 where a class is present, -1 where it is not.

    ``balanced`` is ours: it divides the -1s by how many absent classes an image has for each present one,
    so that both sides weigh the same.

    >>> class_signs(torch.tensor([[1.0, 0.0, 0.0]]), balanced=True)
    tensor([[ 1.0000, -0.5000, -0.5000]])
    """
    signs = 2 * shown - 1
    if not balanced:
        return signs
    share = shown.sum(1, keepdim=True) / (1 - shown).sum(1, keepdim=True).clamp_min(1)
    return torch.where(shown > 0, signs, share * signs)


def class_powers(totals: Tensor, shown: Tensor) -> tuple[Tensor, Tensor]:
    """The mean squared length of every class capsule (J,), counted where its class is present, and where it is not.

    Both are means over the whole batch, so those of several processes can be averaged.
    """
    squares = totals.square().sum(-1)
    return (shown * squares).mean(0), ((1 - shown) * squares).mean(0)


def ratio_signs(shown: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
    """Weights in place of δ with which ``r`` becomes Σ_j log(right_j / wrong_j), as far as its gradient goes: ours.

    How much longer a capsule is where it should be than where it should not, as in Fisher's discriminant: unlike
    the paper's difference it does not grow with the scale of the coefficients, and all classes count the same.
    ``right`` and ``wrong`` are those of :func:`class_powers`. A class that no image of the batch shows, or all
    do, has no ratio, and no part in the step.
    """
    measured = (right > 0) & (wrong > 0)
    tiny = torch.finfo(right.dtype).tiny
    weights = shown / right.clamp_min(tiny) - (1 - shown) / wrong.clamp_min(tiny)
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


def l2_penalty(coefficients: Tensor, strength: float) -> Tensor:
    """λ‖b‖², the penalty of Eq. obj-2."""
    return strength * coefficients.square().sum()


def l1_penalty(coefficients: Tensor, strength: float) -> Tensor:
    """2λ‖b‖₁, the penalty whose gradient is that of the printed update, Eq. gaobj3, with sign(0) = 0.

    Differs from the paper: Eq. obj-3 has λ‖b‖₁, whose gradient is half of what Eq. gaobj3 subtracts. The update is
    what was run, so the objective here is the one that belongs to it.
    """
    return strength * 2 * coefficients.abs().sum()


def routing_objective(
    totals: Tensor, signs: Tensor, penalties: Iterable[Tensor] = (), *, reduction: str = "mean"
) -> Tensor:
    """The objective ``r`` that discriminative routing ascends (Eq. obj-2 and obj-3).

    Its gradient with respect to the coefficients, of this layer and by the chain rule of all layers before
    it, is the ascent direction; in the last layer it equals :func:`ascent_direction`.

    Args:
        totals: the class capsules before the squash, (B, J, E).
        signs: δ, (B, J), from :func:`class_signs`.
        penalties: :func:`l2_penalty` or :func:`l1_penalty` of every layer's coefficients.
        reduction: "mean" or "sum" over the batch.

    Differs from the paper: the first term is a mean over the batch unless ``reduction="sum"``, so that a
    step equals the paper's with γ divided and λ multiplied by the batch size.
    """
    objective = discriminative_power(totals, signs, reduction=reduction)
    for penalty in penalties:
        objective = objective - penalty
    return objective


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

    Args:
        poses: of the input capsules, (B, I, D).
        weight: W, (I, D, J, E).
        coefficients: b, (I, J).
        signs: δ, (B, J).
        penalty: "l2" or "l1".
        strength: λ.
        reduction: "mean" or "sum" over the batch.

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
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    if reduction == "mean":
        signed = signed / B
    correlation = (flat_poses.mT @ signed).view(I, D, J, E)  # Σ_k δ_jk u_ik v_jkᵀ
    data_term = (weight * correlation).sum((1, 3))
    if penalty not in ("l2", "l1"):
        raise ValueError(f"penalty must be 'l2' or 'l1', not {penalty!r}")
    shrinkage = coefficients if penalty == "l2" else coefficients.sign()
    return 2 * (data_term - strength * shrinkage)


def spread_loss(activations: Tensor, labels: Tensor, *, margin: float, image_weights: Tensor | None = None) -> Tensor:
    """Mean over the batch of the spread loss, Eq. 3 of "Matrix capsules with EM routing".

    Every class that is shown should be at least ``margin`` more active than every class that is not: the
    squared shortfalls are summed over all such pairs, of which the paper, with one class in an image, has J - 1.

    Args:
        activations: of the class capsules, (B, J).
        labels: the classes shown, as for :func:`presence`.
        margin: how much more active; :func:`spread_margin` lets it grow during training.
        image_weights: how much each image counts, (B,); by default all the same.

    Returns:
        one number

    >>> spread_loss(torch.tensor([[0.75, 0.5, 0.0]]), torch.tensor([0]), margin=0.5)
    tensor(0.0625)
    """
    shown = classes_shown(labels, activations)
    lead = activations.unsqueeze(2) - activations.unsqueeze(1)  # (B, J, J): row over column
    pairs = shown.unsqueeze(2) * (1 - shown).unsqueeze(1)
    return weighted_mean((pairs * (margin - lead).clamp_min(0).square()).sum((1, 2)), image_weights)


def spread_margin(progress: float, *, start: float = 0.2, end: float = 0.9) -> float:
    """The margin of the spread loss when training has come this far, from 0 to 1; small at first, so that few
    capsules die early on.

    >>> [round(spread_margin(progress), 3) for progress in (0, 0.5, 1)]
    [0.2, 0.55, 0.9]
    """
    return start + (end - start) * min(1.0, progress)
