"""The paper's pictures of reconstructions: one decoder, fed by the capsules of two networks."""

from __future__ import annotations

from pathlib import Path

import torch

import torchcaps.plots  # noqa: F401  (first: it decides which settings matplotlib reads)  # isort: skip
from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.atomic import write_json
from torchcaps.data.batches import evaluation_batches
from torchcaps.errors import UserError
from torchcaps.lab.reproduce.cells import Cell
from torchcaps.lab.reproduce.worker import Execution
from torchcaps.models.base import Network
from torchcaps.models.files import load
from torchcaps.plots.files import save
from torchcaps.training.plan import Plan

SIDE = 10  # the paper shows 10 x 10 images
BATCH = 500
SAMPLE = 10_000  # training images that the class means are taken over


def draw_reconstructions(with_decoder: Cell, without: Cell, numbers: Path, picture: Path, execution: Execution) -> None:
    """Images, their reconstructions, and those from the capsules of a network that was trained without a decoder.

    As in the paper, the images are test images that the latter network classifies correctly: the first 100 of them.
    """
    for cell in (with_decoder, without):
        if not cell.folder.network.exists():
            raise UserError(f"{cell.folder.path} has no network any more: remove that folder to train it again.")
    trained, foreign = (load(cell.folder.network) for cell in (with_decoder, without))
    plan = Plan.of(execution.applied(without.config, without.folder.path))
    images, labels = _rightly_classified(foreign.folded(), plan)
    with torch.inference_mode():
        assert trained.decoder is not None
        own = trained.decoder(trained(images).capsules.poses, labels)[:, 0]
        transferred = trained.decoder(foreign(images).capsules.poses, labels)[:, 0]
    titles = ("input", "DR capsules, DR decoder", "L2/FC capsules, DR decoder")
    save(_grids(dict(zip(titles, (images, own, transferred)))), picture)
    report = {
        "cells": [with_decoder.name, without.name],
        "images": len(images),
        "squared_error_own_capsules": _squared_error(own, images),
        "squared_error_foreign_capsules": _squared_error(transferred, images),
        "squared_error_class_means": _squared_error(_class_means(plan)[labels[:, 0]], images),
    }
    write_json(numbers, report)


@torch.inference_mode()
def _rightly_classified(network: Network, plan: Plan) -> tuple[Tensor, Tensor]:
    images, labels = [], []
    for batch in evaluation_batches(plan.data.test, batch_size=BATCH, augmentation=plan.augmentation):
        batch = batch.on(torch.device("cpu"))
        right = (network.found(network(batch.images).capsules) == batch.labels).all(1)
        images.append(batch.images[right])
        labels.append(batch.labels[right])
        if sum(map(len, images)) >= SIDE**2:
            break
    return torch.cat(images)[: SIDE**2], torch.cat(labels)[: SIDE**2]


def _class_means(plan: Plan) -> Tensor:
    """The mean training image of every class: the best that can be drawn by who knows nothing but the class."""
    sums = torch.zeros(len(plan.data.classes), *plan.task.image_shape)
    counts = torch.zeros(len(plan.data.classes))
    for batch in evaluation_batches(plan.data.train, batch_size=BATCH, augmentation=plan.augmentation, limit=SAMPLE):
        batch = batch.on(torch.device("cpu"))
        sums.index_add_(0, batch.labels[:, 0], batch.images)
        counts.index_add_(0, batch.labels[:, 0], torch.ones(len(batch.images)))
    return sums / counts.clamp_min(1).view(-1, 1, 1, 1)


def _squared_error(drawn: Tensor, images: Tensor) -> float:
    """Summed over pixels, mean over images: what the reconstruction loss is made of."""
    return round(float((drawn - images).square().flatten(1).sum(1).mean()), 3)


def _grids(pictures: dict[str, Tensor]) -> Figure:
    figure = Figure(figsize=(4 * len(pictures), 4.3), layout="constrained")
    for axes, (title, images) in zip(figure.subplots(1, len(pictures)), pictures.items()):
        count, channels, height, width = images.shape
        canvas = torch.ones(SIDE * SIDE, channels, height, width)
        canvas[:count] = images
        tiled = canvas.view(SIDE, SIDE, channels, height, width).permute(0, 3, 1, 4, 2)
        axes.imshow(tiled.reshape(SIDE * height, SIDE * width, channels).numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set_title(title)
        axes.set_axis_off()
    return figure
