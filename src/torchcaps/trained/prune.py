"""Cutting out of a trained network what its sparse coefficients no longer use."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from torchcaps.errors import UserError
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.layers.stem import StemCapsules
from torchcaps.models.base import Network
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.routing.base import SharedRouting


@dataclass(frozen=True)
class Pruned:
    """A smaller network with the same answers, and what was left out of it."""

    network: CapsuleNetwork
    types_removed: int
    """Primary capsule types that no class uses anywhere: their channels are not even computed."""
    capsules_removed: int
    """Primary capsules that no class uses, those of the removed types included."""


@torch.no_grad()
def prune(network: Network) -> Pruned:
    """Remove the capsules whose coefficients are zero for all capsules above that are still used, and their channels.

    From the classes down: a capsule of a hidden layer that none of them uses is removed, then whatever served only such
    capsules. A type of primary capsule that is used at no place of the map is removed from the convolution too.
    """
    if not isinstance(network, CapsuleNetwork):
        raise UserError("Only the capsnet can be pruned: other networks have no routing coefficients.")
    layers = [cast(CapsuleLayer, layer) for layer in network.layers]
    used = _used([_coefficients(layer) for layer in layers])
    rows, columns, types = network.map_shape
    numbers = torch.arange(rows * columns * types) if network.kept is None else network.kept.cpu()
    on_map = torch.zeros(rows * columns * types, dtype=torch.bool)
    on_map[numbers[used[0].cpu()]] = True
    by_type = on_map.view(rows * columns, types)
    kept_types = by_type.any(0)  # (types,)
    kept = by_type[:, kept_types].flatten().nonzero().flatten()  # numbered as in the smaller map
    count = int(kept_types.sum())
    everything_left = len(kept) == rows * columns * count
    config = network.config.replace(
        primary_capsules=count,
        kept_capsules=None if everything_left else tuple(kept.tolist()),
        layers=tuple((int(left.sum()), size) for left, (_, size) in zip(used[1:], network.config.layers)),
    )
    routings = [type(layer.routing)(**layer.routing.settings) for layer in layers]
    front = network.front
    stem = partial(copy.deepcopy, front.stem) if isinstance(front, StemCapsules) else None
    smaller = CapsuleNetwork.from_config(config, network.task, routing=routings, backbone=stem)
    smaller.to(network.mean.device)
    channels = kept_types.repeat_interleave(config.primary_size)
    state = network.state_dict()
    last = "front.second" if stem is None else "front.primary.conv"
    for name in (f"{last}.weight", f"{last}.bias"):
        state[name] = state[name][channels]
    for number, (inputs, outputs) in enumerate(pairwise(used)):
        name = f"layers.{number}.weight"
        state[name] = state[name][inputs][:, :, outputs]
        name = f"layers.{number}.routing.coefficients"
        state[name] = state[name][inputs][:, outputs]
    smaller.load_state_dict(state)
    return Pruned(smaller, types - count, len(used[0]) - len(kept))


def _coefficients(layer: CapsuleLayer) -> Tensor:
    coefficients = layer.routing.coefficients if isinstance(layer.routing, SharedRouting) else None
    if not isinstance(coefficients, Tensor):
        raise UserError(f"There is nothing to prune: {type(layer.routing).__name__} has no coefficients of its own.")
    return coefficients


def _used(coefficients: Sequence[Tensor]) -> list[Tensor]:
    """Which capsules of each layer, from the primary ones to the classes, have a say in any class."""
    used = [torch.ones_like(coefficients[-1][0], dtype=torch.bool)]  # all classes
    for layer in reversed(coefficients):
        used.insert(0, (layer[:, used[0]] != 0).any(1))
        if not used[0].any():
            raise UserError(
                "All coefficients are zero: this network has learned nothing. Train it with a smaller strength (λ)."
            )
    return used
