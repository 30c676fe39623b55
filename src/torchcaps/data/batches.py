"""Which images, in what order: batches as a pure function of the step.

`Split` -> `Batches.at(step)` -> `Augmentation` -> `Batch.on(device)`. Images stay bytes until the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchcaps.data import stateless
from torchcaps.data.augmentation import Augmentation
from torchcaps.data.splits import Batch, ImageSplit, Split
from torchcaps.errors import UserError
from torchcaps.settings import SettingError


class Batches:
    """Training batches as a pure function of the step.

    The images left over at the end of an epoch's order are not used in that epoch. If there are fewer images than a
    batch should have, each batch has all of them (as many as can be shared equally by the processes).

    Args:
        split: where the images come from.
        batch_size: images in a step, over all processes together.
        seed: of the order and the augmentation.
        augmentation: how images are changed; None for not at all.
        sampling: "even" shows each image at most once an epoch, "balanced" each class equally often.
        rank, world_size: process ``rank`` of ``world_size`` gets its stretch of the same global batch.
    """

    def __init__(
        self,
        split: Split,
        *,
        batch_size: int,
        seed: int,
        augmentation: Augmentation | None = None,
        sampling: str = "even",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise SettingError("batch_size", f"is {batch_size}: give 1 or more")
        if sampling not in _ORDERS:
            raise SettingError("sampling", f"must be one of {', '.join(_ORDERS)}, not {sampling!r}")
        if batch_size % world_size:
            raise UserError(f"a batch of {batch_size} cannot be shared equally by {world_size} processes")
        if len(split) < world_size:
            raise UserError(f"{len(split)} training images are too few for {world_size} processes; use fewer processes")
        self.split = split
        self.batch_size = min(batch_size, len(split) // world_size * world_size)
        self.seed = seed
        self.augmentation = augmentation
        self.steps_per_epoch = len(split) // self.batch_size
        self._order = _ORDERS[sampling](split, seed)
        share = self.batch_size // world_size
        self._own = torch.arange(rank * share, (rank + 1) * share)

    def at(self, step: int) -> Batch:
        """This process's part of the batch of a step, counted from 0."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        positions = step_of_epoch * self.batch_size + self._own
        indices = self._order(epoch, positions)
        batch = self.split.fetch(indices)
        if self.augmentation is None:
            return batch
        return self.augmentation(batch, seed=self.seed, epoch=epoch, positions=positions, indices=indices)


Order = Callable[[int, Tensor], Tensor]
"""From an epoch and positions (B,) in it to the numbers of the images there."""


def _even_order(split: Split, seed: int) -> Order:
    """Each image once an epoch, shuffled."""
    return lambda epoch, positions: stateless.permute(positions, len(split), stateless.key(seed, epoch, "order"))


def _balanced_order(split: Split, seed: int) -> Order:
    """Each class equally often, shuffled, in epochs of the usual length.

    The places of an epoch are dealt to the classes in turn. Each class walks around a shuffled line of its images, on
    from where it was in the epoch before, so that its images are equally often used, too.
    """
    if not isinstance(split, ImageSplit):
        raise SettingError("sampling", "must be even for images that show several classes")
    length, even = len(split), _even_order(split, seed)
    shuffled = stateless.permute(torch.arange(length), length, stateless.key(seed, "balanced"))
    line = shuffled[torch.argsort(split.labels[shuffled], stable=True)]
    sizes = torch.bincount(split.labels)
    starts, sizes = (sizes.cumsum(0) - sizes)[sizes > 0], sizes[sizes > 0]
    groups = len(sizes)
    turns = (length - torch.arange(groups) + groups - 1) // groups  # of each class in an epoch

    def order(epoch: int, positions: Tensor) -> Tensor:
        place = even(epoch, positions)
        group, turn = place % groups, place // groups
        return line[starts[group] + (epoch * turns[group] + turn) % sizes[group]]

    return order


_ORDERS: dict[str, Callable[[Split, int], Order]] = {"even": _even_order, "balanced": _balanced_order}


def evaluated(split: Split, limit: int | None = None) -> Tensor:
    """The numbers of the images that :func:`evaluation_batches` takes, in its order."""
    return torch.arange(len(split)) if limit is None or limit >= len(split) else split.sample(limit)


def evaluation_batches(
    split: Split,
    *,
    batch_size: int,
    augmentation: Augmentation | None = None,
    limit: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """The images in order, each once, the last batch ragged.

    Args:
        split: where the images come from.
        batch_size: images in a batch.
        augmentation: that of the training; its :meth:`~Augmentation.centre` is used.
        limit: so many images only, those of :meth:`Split.sample`.
        rank, world_size: process ``rank`` of ``world_size`` gets every ``world_size``-th batch.
    """
    numbers = evaluated(split, limit)
    for start in range(rank * batch_size, len(numbers), world_size * batch_size):
        batch = split.fetch(numbers[start : start + batch_size])
        yield augmentation.centre(batch) if augmentation else batch
