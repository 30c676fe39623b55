"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from torchcaps.train.options import TrainOptions


def learning_rate(step: int, total: int, options: TrainOptions) -> float:
    """The rate of step ``step`` (from 0) of ``total``."""
    return options.learning_rate * rate_factor(step, total, options)


def rate_factor(step: int, total: int, options: TrainOptions) -> float:
    """The rate as a share of its highest: a shape that starts at 1, after an optional warm-up."""
    warmup = min(options.warmup, total // 2)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    done = max(0, step - warmup) / max(1, total - warmup)
    shapes: dict[str, Callable[[], float]] = {
        "constant": lambda: 1.0,
        "staircase": lambda: options.decay ** (step // options.decay_every),
        "linear": lambda: 1.0 - done,
        "cosine": lambda: 0.5 + 0.5 * math.cos(math.pi * done),
    }
    return rise * shapes[options.schedule]()
