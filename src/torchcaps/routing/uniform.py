"""The same coefficient for every pair of capsules: the baseline every routing has to beat."""

from __future__ import annotations

from typing import final

from torchcaps.routing.base import SharedRouting, finite


@final
class UniformRouting(SharedRouting):
    """v_j = start · Σ_i W_ij u_i. With the same ``start``, discriminative routing that never takes a step.

    Args:
        start: the coefficient of all pairs.

    >>> UniformRouting().coefficients
    1.0
    """

    def __init__(self, *, start: float = 1.0) -> None:
        super().__init__()
        self.coefficients = finite("start", start)
