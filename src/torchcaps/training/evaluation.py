"""How good a network is on images it has not seen."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch import Tensor

from torchcaps.data.augmentation import Augmentation
from torchcaps.data.batches import evaluation_batches
from torchcaps.data.splits import Split
from torchcaps.functional import presence
from torchcaps.models.base import Network, check_answers


@dataclass(frozen=True)
class Evaluation:
    """The outcome on a number of images."""

    images: int
    errors: int
    """Images for which the classes found are not exactly the classes shown."""
    confusion: Tensor
    """(J, J) true classes by predicted ones."""
    shown: Tensor
    """(J,) images that show each class."""
    found: Tensor
    """(J,) images that each class was found in."""
    seconds: float

    @property
    def error_percent(self) -> float:
        return 100 * self.errors / self.images

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


def confusion_matrix(shown: Tensor, found: Tensor) -> Tensor:
    """Presence of true and of predicted classes, both (B, J), to counts of true by predicted (J, J).

    A class shown and found counts on the diagonal. With several classes in an image, each one missed is
    shared out among those found in error, so that a row still sums to how often its class is shown; unless nothing
    was found in error, as may be where images show any number of classes.
    """
    hits = shown * found
    missed, spurious = shown - hits, found - hits
    shares = spurious / spurious.sum(1, keepdim=True).clamp_min(1)
    return torch.diag(hits.sum(0)) + missed.mT @ shares


@torch.inference_mode()
def evaluate(
    network: Network,
    split: Split,
    *,
    fabric: Fabric,
    augmentation: Augmentation | None = None,
    limit: int | None = None,
) -> Evaluation:
    """Classify the images of a split, shared out over the processes.

    The network should be one that :meth:`Network.folded` returned.
    """
    classes = len(network.classes)
    batches = evaluation_batches(
        split,
        batch_size=network.evaluation_batch,
        augmentation=augmentation,
        limit=limit,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
    )
    counts = torch.zeros(classes + 2, classes, device=fabric.device)  # confusion, shown, found
    totals = torch.zeros(2, device=fabric.device)  # images, errors
    started = time.perf_counter()
    for batch in batches:
        batch = batch.on(fabric.device)
        with fabric.autocast():
            capsules = network(batch.images).capsules
        lengths = check_answers(capsules.activations.float())
        shown = presence(batch.labels, classes)
        found = presence(network.found(capsules), classes)
        counts += torch.cat([confusion_matrix(shown, found), shown.sum(0)[None], found.sum(0)[None]])
        totals += torch.stack([totals.new_tensor(len(lengths)), (shown != found).any(1).sum()])
    counts = fabric.all_reduce(counts, reduce_op="sum")  # type: ignore[assignment]
    images, errors = fabric.all_reduce(totals, reduce_op="sum").tolist()  # type: ignore[union-attr]
    seconds = time.perf_counter() - started
    counts = counts.cpu()
    return Evaluation(int(images), int(errors), counts[:-2], counts[-2], counts[-1], seconds)
