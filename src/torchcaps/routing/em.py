"""EM routing (Hinton, Sabour and Frosst, "Matrix capsules with EM routing", ICLR 2018)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchcaps.functional import Capsules, runs_eagerly
from torchcaps.routing.base import Routing, checked_iterations, finite
from torchcaps.routing.votes import Votes

Normalise = Callable[[Tensor], Tensor]
"""Log joint densities (..., I, J) -> log responsibilities: what an input capsule gives away sums to one."""

FAINTEST = 1e-12
"""Activations below it count as this: in float32, beside any active capsule, as nothing."""
FARTHEST = 1e6
"""Distances (V − μ)² / 2σ² beyond it count as this: a vote that far from all capsules is nobody's in particular."""


def over_output_capsules(log_joint: Tensor) -> Tensor:
    """The posterior when all output capsules that an input capsule votes for are on the last axis."""
    return log_joint.log_softmax(-1)


def inverse_temperatures(iterations: int, *, final: float = 0.01, decay: float = 0.95) -> list[float]:
    """λ of each iteration: rising towards ``final``, the gap shrinking by ``decay`` each time.

    The paper leaves the schedule open; this one, and the values by default, are what its authors answered when
    asked in its public review.

    >>> inverse_temperatures(2, final=1.0, decay=0.5)
    [0.5, 0.75]
    """
    return [final * (1 - decay**iteration) for iteration in range(1, iterations + 1)]


def em_capsules_and_weights(
    votes: Tensor,
    activations: Tensor,
    beta_a: Tensor,
    beta_u: Tensor,
    *,
    iterations: int = 3,
    inverse_temperature: float = 0.01,
    decay: float = 0.95,
    relative: bool = False,
    variance_floor: float = 1e-4,
    normalise: Normalise = over_output_capsules,
) -> tuple[Capsules, Tensor]:
    """Fit one Gaussian for each output capsule to the votes, by expectation maximisation.

    Shapes: votes (..., I, J, E), activations (..., I), β_a and β_u (J,) -> capsules (..., J, E). Leading axes
    are problems of their own, images as well as the places of a convolution; only ``normalise`` may let them
    compete. ``relative`` measures the cost for each component of a pose and for the even share of input
    capsules, which makes λ, β_a and β_u independent of the size of the layer; the paper sums.

    Also returns the weights (..., I, J) of the last M-step, with which the votes sum to the means.

    All of it is computed in logarithms, in float32 or better whatever the votes are stored in. Back-propagation
    keeps the votes only and computes the rest again, with two more tensors of their size at a time.
    """
    outside = torch.promote_types(votes.dtype, beta_a.dtype)
    inside = torch.promote_types(outside, torch.float32)
    with _full_precision(votes):
        # Input capsules go last: sums over them, and over E, are then matrix products without temporaries.
        votes = votes.movedim(-3, -1).to(inside).contiguous()  # (..., I, J, E) -> (..., J, E, I)
        log_activations = activations.to(inside).clamp_min(FAINTEST).log().unsqueeze(-2)  # (..., 1, I)
        beta_a, beta_u = beta_a.to(inside), beta_u.to(inside)
        *_, J, E, I = votes.shape
        log_shares = normalise(votes.new_zeros(*votes.shape[:-3], I, J)).mT  # log R_ij, (..., J, I): even at first
        unit = E * log_shares.exp().sum(-1) if relative else torch.ones_like(beta_a)
        statistics = _Statistics.apply if runs_eagerly() else _statistics
        for turn, sharpness in enumerate(inverse_temperatures(iterations, final=inverse_temperature, decay=decay)):
            log_weights = log_shares + log_activations  # R_ij ← R_ij a_i
            means, variances, distances = statistics(votes, log_weights.softmax(-1), variance_floor)
            amount = log_weights.exp().sum(-1) / unit  # Σ_i R_ij, (..., J)
            log_deviations = 0.5 * variances.log().sum(-1)  # Σ_h log σ_j^h
            cost = (E * beta_u + log_deviations) * amount
            evidence = sharpness * (beta_a - cost)  # logistic(λ(β_a − Σ_h cost^h)) is the activation
            if turn < iterations - 1:  # nobody asks for the last shares
                log_constant = log_deviations + 0.5 * E * math.log(2 * math.pi)
                log_joint = (F.logsigmoid(evidence) - log_constant).unsqueeze(-1) - distances.clamp_max(FARTHEST)
                log_shares = normalise(log_joint.mT).mT  # the joint is log a_j p_ij, (..., J, I)
        capsules = Capsules(means.to(outside), evidence.sigmoid().to(outside), means.to(outside))
        return capsules, log_weights.softmax(-1).mT.to(outside)


def em_routing(votes: Tensor, activations: Tensor, beta_a: Tensor, beta_u: Tensor, **settings: Any) -> Capsules:
    """The output capsules of :func:`em_capsules_and_weights`, with the same arguments."""
    return em_capsules_and_weights(votes, activations, beta_a, beta_u, **settings)[0]


def _statistics(votes: Tensor, weights: Tensor, variance_floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """All that EM needs of the votes: with weights (..., J, I) that sum to one, the Gaussians and the distances.

    Votes (..., J, E, I) -> weighted means and variances (..., J, E), and Σ_h (V − μ)² / 2σ² (..., J, I).
    """
    means = votes @ weights.unsqueeze(-1)  # (..., J, E, 1)
    squares = (votes - means).square_()
    variances = squares @ weights.unsqueeze(-1) + variance_floor
    distances = (0.5 / variances).mT @ squares  # (..., J, 1, I)
    return means.squeeze(-1), variances.squeeze(-1), distances.squeeze(-2)


class _Statistics(torch.autograd.Function):
    """:func:`_statistics`, with a backward pass that keeps the votes only and needs two tensors of their size."""

    @staticmethod
    def forward(ctx: Any, votes: Tensor, weights: Tensor, variance_floor: float) -> tuple[Tensor, Tensor, Tensor]:
        means, variances, distances = _statistics(votes, weights, variance_floor)
        ctx.save_for_backward(votes, weights, means, variances)
        return means, variances, distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        votes, weights, means, variances = ctx.saved_tensors
        with _full_precision(votes):
            grad_means, grad_variances, grad_distances = (grad.unsqueeze(-1) for grad in grads)
            means, variances = means.unsqueeze(-1), variances.unsqueeze(-1)  # (..., J, E, 1)
            inverse = variances.rsqrt()
            scores = (votes - means).mul_(inverse)  # (V − μ) / σ: of moderate size whatever the votes are
            squares = scores.square()
            # The distances send something to the means and the variances, whose gradient is kept times σ².
            grad_means = grad_means - inverse * (scores @ grad_distances)
            grad_variances = grad_variances * variances - 0.5 * (squares @ grad_distances)
            grad_weights = grad_means.mT @ votes + grad_variances.mT @ squares  # (..., J, 1, I)
            # (V − μ) / σ² times the rank-two matrix 2 g w + g_distance, plus what comes through the means.
            left = inverse * torch.cat([2 * grad_variances, torch.ones_like(inverse)], -1)  # (..., J, E, 2)
            right = torch.stack([weights, grads[2]], -2)  # (..., J, 2, I)
            grad_votes = torch.matmul(left, right, out=squares).mul_(scores)
            grad_votes += torch.matmul(grad_means, weights.unsqueeze(-2), out=scores)
        return grad_votes, grad_weights.squeeze(-2), None


def _full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Without autocast, which the meta device does not know."""
    device = tensor.device.type
    return contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


@final
class EMRouting(Routing):
    """Each output capsule is a Gaussian over the votes; it is active if it explains them better than noise.

    β_a and β_u, learned with the weights, are one number for each output capsule (or type of them). The
    activation of an input capsule is the length of its pose when it is a vector capsule.

    Differs from the paper: poses are vectors here; the paper's matrix capsules are in
    :mod:`torchcaps.layers.matrix`. The cost is ``relative``, or λ and the betas would have to change with the
    size of the layer. The paper does not say where β_a and β_u start, or what keeps a variance from vanishing.
    Here λ rises as :func:`inverse_temperatures` says, to a value that suits the relative cost; a constant is
    added to every variance; the betas start where a capsule without support is off, and where votes of a spread
    of about 1/3 neither raise nor lower it. (Started at zero, all output capsules are on, and training turns the
    input capsules off for good.)

    Args:
        iterations: of expectation and maximisation.
        inverse_temperature, decay: how λ rises, see :func:`inverse_temperatures`.
        variance_floor: added to every variance.
        beta_a, beta_u: where these start.

    >>> EMRouting(iterations=2).iterations
    2
    """

    weight_std = 1.0
    holds_votes = True

    def __init__(
        self,
        *,
        iterations: int = 3,
        inverse_temperature: float = 4.0,
        decay: float = 0.5,
        variance_floor: float = 1e-4,
        beta_a: float = -0.5,
        beta_u: float = 1.0,
    ) -> None:
        super().__init__()
        if not (inverse_temperature > 0 and variance_floor > 0 and 0 <= decay < 1):
            raise ValueError("inverse_temperature and variance_floor must be above zero, decay from 0 to below 1")
        self.iterations = checked_iterations(iterations)
        self.inverse_temperature = inverse_temperature
        self.decay = decay
        self.variance_floor = variance_floor
        self._start = finite("beta_a", beta_a), finite("beta_u", beta_u)

    def start_std(self, fan_in: int) -> float:
        return self.weight_std  # every vote counts by itself, whatever their number

    def connect(self, inputs: int, outputs: int, output_size: int) -> None:
        beta_a, beta_u = self._start
        self.beta_a = nn.Parameter(torch.full((outputs,), beta_a))
        self.beta_u = nn.Parameter(torch.full((outputs,), beta_u))

    def route(
        self, votes: Tensor, activations: Tensor, *, normalise: Normalise = over_output_capsules
    ) -> tuple[Capsules, Tensor]:
        """:func:`em_capsules_and_weights` of votes (..., I, J, E), with this routing's parameters and settings."""
        return em_capsules_and_weights(
            votes,
            activations,
            self.beta_a,
            self.beta_u,
            iterations=self.iterations,
            inverse_temperature=self.inverse_temperature,
            decay=self.decay,
            relative=True,
            variance_floor=self.variance_floor,
            normalise=normalise,
        )

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return self.route(votes.dense(), activations)[0]

    def coefficients_for(self, votes: Votes, activations: Tensor) -> Tensor | float:
        return self.route(votes.dense(), activations)[1]
