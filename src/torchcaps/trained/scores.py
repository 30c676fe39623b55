"""All that can be said about a network's answers on a set of images."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.atomic import write_atomically
from torchcaps.data.augmentation import Augmentation
from torchcaps.data.batches import evaluated, evaluation_batches
from torchcaps.data.splits import Batch, Split
from torchcaps.functional import presence
from torchcaps.models.base import PRESENT_FROM, Network, check_answers, standardised

Change = Callable[[Network, Batch, Tensor], Tensor]
"""From a network, a batch and its images' numbers to the images it is shown instead: noise, turns, attacks.

What is random there hangs on the numbers alone, so that all networks are shown the same."""


@dataclass(frozen=True)
class ClassScores:
    """How well one class is found."""

    name: str
    images: int
    precision: float
    """Of the images it was found in, the share that shows it."""
    recall: float
    """Of the images that show it, the share it was found in."""

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


@dataclass(frozen=True)
class CalibrationBin:
    """Images whose longest class capsule has about the same length; or capsules, if images show any number."""

    images: int
    length: float
    """The mean of these lengths."""
    right: float
    """The share of these images that is classified right."""


@dataclass(frozen=True)
class Scores:
    """A network's answers beside the truth.

    Args:
        classes: their names.
        lengths: of all class capsules, (N, J).
        shown: which classes each image shows, (N, J).
        labels_per_image: how many classes every image shows; 0 for any number.
        numbers: of the images in their split, (N,); by default they are the first.
    """

    classes: tuple[str, ...]
    lengths: Tensor
    shown: Tensor
    labels_per_image: int = 1
    numbers: Tensor | None = None

    def image(self, row: int) -> int:
        """The number of a row's image in its split."""
        return row if self.numbers is None else int(self.numbers[row])

    @property
    def found(self) -> Tensor:
        """Which classes were found in each image, (N, J)."""
        if not self.labels_per_image:
            return (self.lengths > PRESENT_FROM).float()
        return presence(self.lengths.topk(self.labels_per_image, dim=1).indices, len(self.classes))

    @property
    def right(self) -> Tensor:
        """Which images have exactly the classes found that they show, (N,)."""
        return (self.found == self.shown).all(1)

    @property
    def error_percent(self) -> float:
        return 100 * int((~self.right).sum()) / len(self.right)

    def by_class(self) -> list[ClassScores]:
        """Precision, recall and F1 of every class."""
        found, shown = self.found, self.shown
        hits = (found * shown).sum(0)
        precision, recall = (hits / counts.sum(0).clamp_min(1) for counts in (found, shown))
        return [
            ClassScores(name, int(images), float(of_found), float(of_shown))
            for name, images, of_found, of_shown in zip(self.classes, shown.sum(0), precision, recall)
        ]

    def calibration(self, bins: int = 10) -> list[CalibrationBin]:
        """Whether lengths mean what they say: for images sorted by their longest capsule, how many are right.

        Where images show any number of classes: for capsules sorted by length, how many of their classes are shown.
        """
        lengths, right = self.lengths.amax(1), self.right
        if not self.labels_per_image:
            lengths, right = self.lengths.flatten(), self.shown.flatten()
        longest, order = lengths.sort()
        right = right[order].double()
        parts = zip(longest.tensor_split(bins), right.tensor_split(bins))
        return [
            CalibrationBin(len(length), float(length.mean()), float(share.mean()))
            for length, share in parts
            if len(length)
        ]

    def calibration_error(self, bins: int = 10) -> float:
        """The mean distance between length and share of right answers, over :meth:`calibration`'s bins."""
        parts = self.calibration(bins)
        return sum(part.images * abs(part.length - part.right) for part in parts) / sum(part.images for part in parts)

    def worst(self, count: int) -> list[int]:
        """The rows of the images that are most surely wrong, the worst first."""
        wrong_lengths = (self.lengths * (1 - self.shown)).amax(1)
        right_lengths = torch.where(self.shown > 0, self.lengths, torch.inf).amin(1)
        margin = wrong_lengths - right_lengths
        if not self.labels_per_image:  # each capsule answers for itself
            margin = torch.maximum(wrong_lengths - PRESENT_FROM, PRESENT_FROM - right_lengths)
        margin[self.right] = -torch.inf
        order = margin.argsort(descending=True, stable=True)
        return [int(number) for number in order[:count] if not self.right[number]]

    def write_csv(self, path: Path, names: Sequence[str] = ()) -> None:
        """A row an image: its number, or its name of ``names``, what it shows, what was found, and all lengths."""
        table = io.StringIO(newline="")
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["image", "shown", "found", "right", *(f"length {name}" for name in self.classes)])
        found, right = self.found, self.right
        for row, lengths in enumerate(self.lengths.tolist()):
            labels = (self._names(self.shown[row]), self._names(found[row]))
            image = names[self.image(row)] if names else self.image(row)
            writer.writerow([image, *labels, int(right[row]), *(f"{length:.6g}" for length in lengths)])
        write_atomically(path, table.getvalue().encode("utf-8", errors="backslashreplace"))

    def _names(self, shown: Tensor) -> str:
        return "|".join(name for name, there in zip(self.classes, shown.tolist()) if there)


def score(
    networks: Sequence[Network],
    split: Split,
    *,
    augmentation: Augmentation | None = None,
    views: Sequence[str] = (),
    change: Change | None = None,
    limit: int | None = None,
) -> Scores:
    """The answers of a network, or of several together, on a split.

    Args:
        networks: their lengths are averaged; they must have the same classes.
        split: the images.
        augmentation: what training used; evaluation takes the centre of images that training crops.
        views: "flip", "shift": mirrored and shifted views of each image, averaged too.
        change: what is done to the images before the networks see them, while they are numbers in [0, 1].
        limit: so many images only, from all over the split.
    """
    first = networks[0]
    device = first.mean.device
    lengths, shown = [], []
    augmentation = augmentation or Augmentation()
    if change is not None:
        augmentation = Augmentation(augmentation.config.replace(standardise=False))
    numbers, size = evaluated(split, limit), first.evaluation_batch
    for here, batch in zip(torch.split(numbers, size), evaluation_batches(split, batch_size=size, limit=limit)):
        seen = [view.on(device) for view in augmentation.views(batch, views)] if views else []
        seen = seen or [augmentation.centre(batch).on(device)]
        answers = [_lengths(network, view, here, change) for view in seen for network in networks]
        lengths.append(torch.stack(answers).mean(0).cpu())
        shown.append(presence(batch.labels, len(first.classes)))
    return Scores(first.classes, torch.cat(lengths), torch.cat(shown), first.task.labels_per_image, numbers)


def as_seen(network: Network, images: Tensor) -> Tensor:
    """Images in [0, 1] as a network wants them: standardised, if it was trained so."""
    return standardised(images) if network.task.standardise else images


def _lengths(network: Network, batch: Batch, numbers: Tensor, change: Change | None) -> Tensor:
    images = batch.images if change is None else as_seen(network, change(network, batch, numbers))
    with torch.inference_mode():
        lengths: Tensor = network(images).capsules.activations.float()
    return check_answers(lengths)
