"""What each primary capsule adds to or takes from each class capsule: exact, before the squash."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from torchcaps.functional import Capsules
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.layers.stem import evaluating
from torchcaps.routing.votes import LinearVotes

if TYPE_CHECKING:
    from torchcaps.models.capsnet import CapsuleNetwork


class Explanation(NamedTuple):
    """Where the class capsules of a batch of images get their lengths from."""

    capsules: Capsules
    """The class capsules."""
    lengths: Tensor
    """(B, J) ‖v_j‖, the lengths before the squash."""
    contributions: Tensor
    """(B, I, J) c_ij = b_ij ⟨W_ij u_i, v_j⟩ / ‖v_j‖. Over the input capsules they sum to ``lengths``."""
    by_place: Tensor | None
    """(B, J, rows, columns, types) the same by place and type of primary capsule; None with layers in between."""
    maps: Tensor | None
    """(B, J, H, W) the same spread over the pixels of the places' receptive fields; None with layers in between."""


@torch.no_grad()
def explain(network: CapsuleNetwork, images: Tensor) -> Explanation:
    """See :meth:`CapsuleNetwork.explain`."""
    with evaluating(network):
        primary = network.primary_capsules(images)
    layers, kept = network.layers, network.kept
    capsules = primary if kept is None else Capsules(*(tensor[:, kept] for tensor in primary))
    for layer in layers[:-1]:
        capsules = layer(capsules.poses, capsules.activations)
    last = cast(CapsuleLayer, layers[-1])
    votes = LinearVotes(capsules.poses, last.weight)
    coefficients = last.routing.coefficients_for(votes, capsules.activations)
    routed = last(capsules.poses, capsules.activations)._replace(totals=votes.combine(coefficients))
    lengths = torch.linalg.vector_norm(routed.totals, dim=-1)  # (B, J)
    directions = routed.totals / lengths.clamp_min(torch.finfo(lengths.dtype).tiny).unsqueeze(-1)
    shares = coefficients * votes.agreement(directions)  # (B, I, J)
    if len(layers) > 1:
        return Explanation(routed, lengths, shares, None, None)
    B, _, J = shares.shape
    rows, columns, types = network.map_shape
    everywhere = shares
    if kept is not None:
        everywhere = shares.new_zeros(B, rows * columns * types, J)
        everywhere[:, kept] = shares
    by_place = everywhere.view(B, rows, columns, types, J).permute(0, 4, 1, 2, 3)  # (B, J, rows, columns, types)
    pixels = network.front.over_pixels(by_place.sum(-1).flatten(0, 1))
    return Explanation(routed, lengths, shares, by_place, pixels.view(B, J, *pixels.shape[1:]))
