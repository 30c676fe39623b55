"""Cutting out of a trained network what its sparse coefficients no longer use."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from torchcaps.errors import UserError
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
    """Remove the primary capsules whose coefficients are zero for all capsules above, and their channels.

    A primary capsule is removed from the first capsule layer; a type of capsule that is used at no place of the map
    is removed from the convolution too. Of a network with several capsule layers, only the first is looked at.
    """
    if not isinstance(network, CapsuleNetwork):
        raise UserError("Only the capsnet can be pruned: other networks have no routing coefficients.")
    layer = network.layers[0]
    coefficients = layer.routing.coefficients if isinstance(layer.routing, SharedRouting) else None
    if not isinstance(coefficients, nn.Parameter):
        raise UserError(f"There is nothing to prune: {spec.routing} routing has no coefficients of its own.")
    used = (coefficients != 0).any(1)  # (I,)
    if not used.any():
        raise UserError(
            "All coefficients are zero: this network has learned nothing. Train it with a smaller --strength."
        )
    rows, columns, types = network.map_shape
    numbers = torch.arange(rows * columns * types) if network.kept is None else network.kept.cpu()
    on_map = torch.zeros(rows * columns * types, dtype=torch.bool)
    on_map[numbers[used.cpu()]] = True
    by_type = on_map.view(rows * columns, types)
    kept_types = by_type.any(0)  # (types,)
    kept = by_type[:, kept_types].flatten().nonzero().flatten()  # numbered as in the smaller map
    count = int(kept_types.sum())
    everything_left = len(kept) == rows * columns * count
    smaller_spec = replace(
        spec, primary_capsules=count, kept_capsules=None if everything_left else tuple(kept.tolist())
    )
    smaller = smaller_spec.build().to(coefficients.device)
    channels = kept_types.repeat_interleave(spec.primary_size)
    state = network.state_dict()
    state["primary.conv.weight"] = state["primary.conv.weight"][channels]
    state["primary.conv.bias"] = state["primary.conv.bias"][channels]
    for name in ("layers.0.weight", "layers.0.routing.coefficients"):
        state[name] = state[name][used]
    smaller.load_state_dict(state)
    assert isinstance(smaller, CapsuleNetwork)
    return Pruned(smaller, smaller_spec, types - count, len(used) - len(kept))
