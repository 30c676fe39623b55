"""Prediction on a user's own image files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.data.images import read_image
from torchcaps.errors import UserError
from torchcaps.models.base import Network


@dataclass(frozen=True)
class ImagePrediction:
    """The classes of one image with the lengths of their capsules, longest first; or why it could not be read."""

    image: str
    classes: tuple[str, ...] = ()
    lengths: tuple[float, ...] = ()
    found: tuple[str, ...] = ()
    """The class the network decides for, or classes if its images show several."""
    problem: str | None = None


def read_files(network: Network, paths: Iterable[Path]) -> tuple[dict[Path, Tensor], dict[Path, str]]:
    """Image files of any size and mode as pixels, and what is wrong with those that cannot be read."""
    shape = network.task.source_shape or network.image_shape
    pixels, problems = {}, {}
    for path in paths:
        try:
            pixels[path] = read_image(path, image_shape=shape, fit=network.task.fit)
        except UserError as error:
            problems[path] = str(error)
    return pixels, problems


def predict_files(network: Network, paths: Sequence[Path]) -> Iterator[ImagePrediction]:
    """Classify image files of any size and mode. One that cannot be read is reported, and the rest goes on."""
    for start in range(0, len(paths), network.evaluation_batch):
        chosen = paths[start : start + network.evaluation_batch]
        pixels, problems = read_files(network, chosen)
        answers = {}
        if pixels:
            prediction = network.predict(network.prepare(torch.stack(list(pixels.values()))))
            answers = dict(zip(pixels, zip(prediction.labels.tolist(), prediction.lengths.tolist())))
        for path in chosen:
            if path in problems:
                yield ImagePrediction(str(path), problem=problems[path])
                continue
            labels, lengths = answers[path]
            ranked = sorted(range(len(lengths)), key=lambda label: -lengths[label])
            yield ImagePrediction(
                str(path),
                tuple(network.classes[label] for label in ranked),
                tuple(lengths[label] for label in ranked),
                tuple(network.classes[label] for label in labels if label >= 0),
            )
