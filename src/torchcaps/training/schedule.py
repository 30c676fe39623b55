"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from torchcaps.training.config import DEFAULT_WARMUP, OptimiserConfig


def rate_factor(step: int, total: int, config: OptimiserConfig) -> float:
    """The rate of step ``step`` (from 0) of ``total`` as a share of its highest, after an optional warm-up."""
    warmup = min(DEFAULT_WARMUP if config.warmup is None else config.warmup, total // 2)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    done = max(0, step - warmup) / max(1, total - warmup)
    shapes: dict[str, Callable[[], float]] = {
        "constant": lambda: 1.0,
        "staircase": lambda: config.decay ** (step // config.decay_every),
        "linear": lambda: 1.0 - done,
        "cosine": lambda: 0.5 + 0.5 * math.cos(math.pi * done),
    }
    return rise * shapes[config.schedule]()
