"""Settings that follow from the data: what was not chosen is filled in, so that any sensible images learn."""

from __future__ import annotations

from torchcaps.training.config import DEFAULT_EPOCHS, DEFAULT_WARMUP, TrainingConfig

LARGEST_BATCH = 128
SMALLEST_BATCH = 8
FEWEST_STEPS = 200
"""Steps that a network needs, however few images there are."""


def default_batch_size(images: int, devices: int = 1) -> int:
    """The largest power of two with at least ten batches in an epoch, from 8 to 128.

    >>> [default_batch_size(images) for images in (60_000, 1437, 267, 40)]
    [128, 128, 16, 8]
    """
    size = SMALLEST_BATCH
    while size < LARGEST_BATCH and size * 2 * 10 <= images:
        size *= 2
    return -(-size // devices) * devices


def default_epochs(steps_per_epoch: int) -> int:
    """Ten, or as many as make 200 steps.

    >>> default_epochs(468), default_epochs(11), default_epochs(4)
    (10, 19, 50)
    """
    return max(DEFAULT_EPOCHS, -(-FEWEST_STEPS // steps_per_epoch))


def filled_in(config: TrainingConfig, *, images: int, has_validation: bool) -> TrainingConfig:
    """The configuration with everything that depends on the number of training images."""
    run, optimiser = config.run, config.optimiser
    if run.batch_size is None:
        run = run.replace(batch_size=default_batch_size(images, run.devices))
    assert run.batch_size is not None
    steps_per_epoch = max(1, images // run.batch_size)
    if run.epochs is None and run.steps is None:
        run = run.replace(epochs=default_epochs(steps_per_epoch))
    if run.keep is None:
        run = run.replace(keep="best" if has_validation else "last")
    if optimiser.warmup is None:
        total = run.steps or (run.epochs or 1) * steps_per_epoch
        optimiser = optimiser.replace(warmup=min(DEFAULT_WARMUP, max(1, total // 10)))
    return config.replace(run=run, optimiser=optimiser)
