"""Settings that follow from the data: what was not chosen is filled in, so that any sensible images learn."""

from __future__ import annotations

from collections.abc import Sequence

from torchcaps.training.config import DEFAULT_EPOCHS, DEFAULT_WARMUP, TrainingConfig

LARGEST_BATCH = 128
SMALLEST_BATCH = 16
FEWEST_STEPS = 400
"""Steps that a network needs, however few images there are: more than that, and batches can be larger."""
FEWEST_SHOWN = 10_000
"""Images that it needs to be shown, however often the same ones."""
SHOWN_OF_A_CLASS = 250
"""The same of each class, on average."""
UNEVEN = 5
"""Times as many images as another class has, from which every class is shown equally often."""


def _fewest_shown(classes: int) -> int:
    return max(FEWEST_SHOWN, SHOWN_OF_A_CLASS * classes)


def default_batch_size(images: int, classes: int, devices: int = 1) -> int:
    """The largest power of two with at least 400 steps, from 16 to 128; or all images.

    >>> [default_batch_size(images, 10) for images in (60_000, 1437, 267, 40, 9)]
    [128, 32, 16, 16, 9]
    """
    shown = max(DEFAULT_EPOCHS * images, _fewest_shown(classes))
    size = LARGEST_BATCH
    while size > SMALLEST_BATCH and size * FEWEST_STEPS > shown:
        size //= 2
    return -(-min(size, max(1, images)) // devices) * devices


def default_epochs(images: int, classes: int, batch_size: int) -> int:
    """Ten, or as many as show 10,000 images and 250 of each class.

    >>> default_epochs(60_000, 10, 128), default_epochs(240, 5, 16), default_epochs(1600, 100, 32)
    (10, 42, 16)
    """
    in_an_epoch = max(1, images // batch_size) * min(batch_size, images)
    return max(DEFAULT_EPOCHS, -(-_fewest_shown(classes) // in_an_epoch))


def default_sampling(counts: Sequence[int], labels_per_image: int | None) -> str:
    """Balanced where classes are very uneven, as far as there is one class in an image.

    >>> default_sampling([400, 16, 4], 1), default_sampling([40, 16], 1), default_sampling([400, 16], 2)
    ('balanced', 'even', 'even')
    """
    shown = [count for count in counts if count]
    uneven = max(shown) >= UNEVEN * min(shown)
    return "balanced" if uneven and labels_per_image == 1 else "even"


def filled_in(config: TrainingConfig, *, images: int, classes: int, has_validation: bool) -> TrainingConfig:
    """The configuration with everything that depends on the number of training images and classes."""
    run, optimiser = config.run, config.optimiser
    if run.batch_size is None:
        run = run.replace(batch_size=default_batch_size(images, classes, run.devices))
    assert run.batch_size is not None
    steps_per_epoch = max(1, images // run.batch_size)
    if run.epochs is None and run.steps is None:
        run = run.replace(epochs=default_epochs(images, classes, run.batch_size))
    if run.keep is None:
        run = run.replace(keep="best" if has_validation else "last")
    if optimiser.warmup is None:
        total = run.steps or (run.epochs or 1) * steps_per_epoch
        optimiser = optimiser.replace(warmup=min(DEFAULT_WARMUP, max(1, total // 10)))
    return config.replace(run=run, optimiser=optimiser)
