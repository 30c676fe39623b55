"""Dividing images so that every part has the classes in the same proportions."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.data import stateless


def hold_out(labels: Tensor, count: int, purpose: str) -> tuple[Tensor, Tensor]:
    """Numbers of ``count`` images with the classes in proportion, and of all others. Always the same ones.

    Args:
        labels: (N,) classes, or (N, J) presence, of which the first class counts.
        count: how many to hold out.
        purpose: another one chooses other images.
    """
    shuffled = stateless.permute(torch.arange(len(labels)), len(labels), stateless.key("hold out", purpose))
    _, share, _ = places_in_class(labels, shuffled)
    order = torch.argsort(share, stable=True)
    return order[:count].sort().values, order[count:].sort().values


def places_in_class(labels: Tensor, shuffled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each image's place in a line of its class.

    Args:
        labels: as for :func:`hold_out`.
        shuffled: (N,) the numbers of all images in the order in which they queue up.

    Returns:
        Three of (N,): the place, the place as a fraction of the line, and the length of the line.
    """
    if labels.ndim == 2:
        labels = labels.int().argmax(1)
    line = shuffled[torch.argsort(labels[shuffled], stable=True)]  # class after class
    sizes = torch.bincount(labels)
    starts = sizes.cumsum(0) - sizes
    rank = torch.empty_like(labels)
    rank[line] = torch.arange(len(labels)) - starts[labels[line]]
    return rank, (rank + 0.5) / sizes[labels], sizes[labels]
