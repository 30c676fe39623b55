"""What is said before training: the data, the network, and what it will need."""

from __future__ import annotations

import math
from pathlib import Path

from torchcaps.data.config import AugmentationConfig
from torchcaps.data.datasets import DataSet
from torchcaps.data.splits import OverlappingDigits
from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.training.host import kernel_says
from torchcaps.training.plan import Plan

BYTES = 4


def header_rows(plan: Plan, network: Network, folder: Path) -> list[tuple[str, str]]:
    """Headings and what there is to say under them."""
    config, run = plan.config, plan.config.run
    rows, columns, types = network.map_shape
    kind = (
        f"{config.model.name}, {config.routing.name} routing" if config.model.name == "capsnet" else config.model.name
    )
    stem = getattr(config.model, "stem", None)
    steps = plan.total_steps
    epochs = steps / plan.batches().steps_per_epoch
    batch_size = plan.batches().batch_size
    length = f"{epochs:.3g} epoch{'s' if epochs != 1 else ''}"
    return [
        *plan.data.report.rows(),
        ("network", f"{kind}{f', {stem} stem' if stem else ''}: {network.numbers():,} numbers"),
        ("", f"{rows} x {columns} places with {types} capsules; {'a' if network.decoder else 'no'} decoder"),
        ("training", f"{steps:,} steps of {batch_size} images ({length}), {config.optimiser.name}, seed {run.seed}"),
        *([("", "every class equally often")] if config.data.sampling == "balanced" else []),
        ("augmented", _augmentation(config.augmentation)),
        ("memory", f"about {(memory_needed(plan, network) + memory_of_images(plan.data)) / 2**30:.1f} GB"),
        ("folder", str(folder)),
    ]


def _augmentation(config: AugmentationConfig) -> str:
    """Which changes are made to training images, by the names of their settings."""
    none = AugmentationConfig(shift=0).to_mapping()
    made = {name: value for name, value in config.to_mapping().items() if value != none[name]}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in made.items()) or "not at all"


def memory_needed(plan: Plan, network: Network) -> int:
    """A rough count of the bytes that training will hold at its peak, without the images."""
    weights = network.numbers() * BYTES
    share = -(-plan.batches().batch_size // plan.config.run.devices)
    return INTERPRETER + weights * COPIES + share * network.numbers_per_image() * BYTES


def memory_of_images(data: DataSet) -> int:
    """The bytes of a data set's images, which are in memory already."""
    splits = [split for split in (data.train, data.validation, data.test) if split is not None]
    held = (len(split.labels) if isinstance(split, OverlappingDigits) else len(split) for split in splits)
    return sum(count * math.prod(split.image_shape) for count, split in zip(held, splits))


INTERPRETER = 600 * 2**20
"""What Python and the libraries take by themselves."""
COPIES = 11
"""Of the weights, at the most: with gradients, averages, transforms, and what an evaluation and a checkpoint hold."""


def check_memory(plan: Plan, network: Network) -> None:
    """Refuse a run that this machine has not the memory for."""
    available = available_memory()
    needed = memory_needed(plan, network)
    if available is not None and needed > available:
        raise UserError(
            f"This run needs about {needed / 2**30:.1f} GB of memory, and {available / 2**30:.1f} GB are free. "
            "Choose a smaller --batch-size, a smaller --image-size, or --stem small."
        )


def available_memory() -> int | None:
    """Bytes that are free for this process; None where that is not known."""
    free = kernel_says("meminfo", "MemAvailable")
    return int(free.removesuffix(" kB")) * 1024 if free else None
