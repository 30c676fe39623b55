"""Test images for the page: random ones, and those that a network gets wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchcaps.data.splits import Split
from torchcaps.functional import presence
from torchcaps.serve.model import ServedModel
from torchcaps.trained.run import TrainedRun

CHUNK = 200
MOST_CHUNKS = 10
"""Chunks that one request looks through for wrong answers."""
ENOUGH_WRONG = 20
"""Wrong answers after which a search is over."""


@dataclass(frozen=True)
class Sample:
    """A test image with the classes it shows."""

    pixels: Tensor
    """(C, H, W) uint8 of the network's own size."""
    labels: list[int]


@dataclass
class _Search:
    """How far the test images have been looked through for those that a network gets wrong."""

    order: list[int]
    looked_at: int = 0
    wrong: list[int] = field(default_factory=list)


class Gallery:
    """Images of a split, at the size that the networks see."""

    def __init__(self, split: Split, image_shape: tuple[int, int, int]) -> None:
        self._split = split
        self._image_shape = image_shape
        self._random = random.Random()
        self._searches: dict[ServedModel, _Search] = {}

    @classmethod
    def of_run(cls, run: TrainedRun, *, data_folder: str | None = None) -> Gallery:
        """The test images of a run's data set that are at hand; nothing is fetched."""
        return cls(run.images_at_hand(data_folder=data_folder).test, run.network.image_shape)

    def some(self, count: int) -> list[Sample]:
        """Random test images."""
        return self._samples(self._random.sample(range(len(self._split)), min(count, len(self._split))))

    def wrong(self, count: int, model: ServedModel) -> list[Sample]:
        """Random test images for which this network finds other classes than they show; maybe fewer, maybe none."""
        search = self._searches.get(model)
        if search is None:
            size = min(len(self._split), 10_000)
            search = self._searches[model] = _Search(self._random.sample(range(len(self._split)), size))
        for _ in range(MOST_CHUNKS):
            if len(search.wrong) >= max(count, ENOUGH_WRONG) or search.looked_at >= len(search.order):
                break
            self._look_further(search, model)
            if len(search.wrong) >= count:
                break
        return self._samples(self._random.sample(search.wrong, min(count, len(search.wrong))))

    def looked_at(self, model: ServedModel) -> tuple[int, bool]:
        """How many images :meth:`wrong` has looked at, and whether there are more."""
        search = self._searches[model]
        return search.looked_at, search.looked_at < len(search.order)

    @torch.inference_mode()
    def _look_further(self, search: _Search, model: ServedModel) -> None:
        indices = search.order[search.looked_at : search.looked_at + CHUNK]
        search.looked_at += len(indices)
        batch = self._split.fetch(torch.tensor(indices))
        found = model.many.predict(model.many.prepare(batch.images)).labels.cpu()
        classes = len(model.network.classes)
        wrong = (presence(found, classes) != presence(batch.labels, classes)).any(1)
        search.wrong += [index for index, is_wrong in zip(indices, wrong.tolist()) if is_wrong]

    def _samples(self, indices: list[int]) -> list[Sample]:
        if not indices:
            return []
        batch = self._split.fetch(torch.tensor(indices))
        labels = [[number for number in row if number >= 0] for row in batch.labels.tolist()]
        return [Sample(pixels, row) for pixels, row in zip(centre(batch.images, self._image_shape), labels)]


def centre(images: Tensor, image_shape: tuple[int, int, int]) -> Tensor:
    """The middle of images (..., C, H, W) that a network sees."""
    _, rows, columns = image_shape
    top, left = (images.shape[-2] - rows) // 2, (images.shape[-1] - columns) // 2
    return images[..., top : top + rows, left : left + columns].contiguous()
