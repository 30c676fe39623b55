"""Cutting out of a trained network what its sparse coefficients no longer use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from torchcaps.errors import UserError
from torchcaps.layers import CapsuleLayer
from torchcaps.models import CapsuleNetwork, Network, NetworkSpec
from torchcaps.routing import SharedRouting


@dataclass(frozen=True)
class Pruned:
    """A smaller network with the same answers, and what was left out of it."""

    network: CapsuleNetwork
    spec: NetworkSpec
    types_removed: int
    """Primary capsule types that no class uses anywhere: their channels are not even computed."""
    capsules_removed: int
    """Primary capsules that no class uses, those of the removed types included."""


@torch.no_grad()
def prune(network: Network, spec: NetworkSpec) -> Pruned:
    """Remove the capsules whose coefficients are zero for all capsules above that are still used, and their channels.

    From the classes down: a capsule of a hidden layer that none of them uses is removed, then whatever served only such
    capsules. A type of primary capsule that is used at no place of the map is removed from the convolution too.
    """
    if not isinstance(network, CapsuleNetwork):
        raise UserError("Only the capsnet can be pruned: other networks have no routing coefficients.")
    coefficients = [_coefficients(layer, spec) for layer in network.layers]
    used = _used(coefficients)
    rows, columns, types = network.map_shape
    numbers = torch.arange(rows * columns * types) if network.kept is None else network.kept.cpu()
    on_map = torch.zeros(rows * columns * types, dtype=torch.bool)
    on_map[numbers[used[0].cpu()]] = True
    by_type = on_map.view(rows * columns, types)
    kept_types = by_type.any(0)  # (types,)
    kept = by_type[:, kept_types].flatten().nonzero().flatten()  # numbered as in the smaller map
    count = int(kept_types.sum())
    everything_left = len(kept) == rows * columns * count
    smaller_spec = replace(
        spec,
        primary_capsules=count,
        kept_capsules=None if everything_left else tuple(kept.tolist()),
        hidden=tuple((int(each.sum()), size) for each, (_, size) in zip(used[1:], spec.hidden)),
    )
    smaller = smaller_spec.build().to(coefficients[0].device)
    channels = kept_types.repeat_interleave(spec.primary_size)
    state = network.state_dict()
    state["primary.conv.weight"] = state["primary.conv.weight"][channels]
    state["primary.conv.bias"] = state["primary.conv.bias"][channels]
    for number, (inputs, outputs) in enumerate(pairwise(used)):
        name = f"layers.{number}.weight"
        state[name] = state[name][inputs][:, :, outputs]
        name = f"layers.{number}.routing.coefficients"
        state[name] = state[name][inputs][:, outputs]
    smaller.load_state_dict(state)
    assert isinstance(smaller, CapsuleNetwork)
    return Pruned(smaller, smaller_spec, types - count, len(used[0]) - len(kept))


def _coefficients(layer: nn.Module, spec: NetworkSpec) -> nn.Parameter:
    assert isinstance(layer, CapsuleLayer)
    coefficients = layer.routing.coefficients if isinstance(layer.routing, SharedRouting) else None
    if not isinstance(coefficients, nn.Parameter):
        raise UserError(f"There is nothing to prune: {spec.routing} routing has no coefficients of its own.")
    return coefficients


def _used(coefficients: Sequence[Tensor]) -> list[Tensor]:
    """Which capsules of each layer, from the primary ones to the classes, have a say in any class."""
    used = [torch.ones_like(coefficients[-1][0], dtype=torch.bool)]  # all classes
    for each in reversed(coefficients):
        used.insert(0, (each[:, used[0]] != 0).any(1))
        if not used[0].any():
            raise UserError(
                "All coefficients are zero: this network has learned nothing. Train it with a smaller --strength."
            )
    return used
