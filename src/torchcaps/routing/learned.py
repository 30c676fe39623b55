"""Coefficients learned like any other weight: discriminative routing without its objective."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from torchcaps.routing.base import SharedRouting, finite


@final
class LearnedRouting(SharedRouting):
    """One coefficient per pair of capsules, descending the loss by back-propagation.

    It has the same network as discriminative routing and differs only in what moves the coefficients, so it
    tells what ascending ``r`` is worth.

    Args:
        start: value of all coefficients before training.

    >>> LearnedRouting(start=0.5).settings
    {'start': 0.5}
    """

    def __init__(self, *, start: float = 1.0) -> None:
        super().__init__()
        self._start = finite("start", start)

    def connect(self, inputs: int, outputs: int, output_size: int) -> None:
        self.coefficients: nn.Parameter = nn.Parameter(torch.full((inputs, outputs), self._start))
