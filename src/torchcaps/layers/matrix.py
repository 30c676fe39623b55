"""Matrix capsules (Hinton, Sabour and Frosst, "Matrix capsules with EM routing", ICLR 2018).

A matrix capsule has a pose of 4 x 4 numbers and an activation apart from it. Maps of capsules are
:class:`~torchcaps.functional.Capsules` with the axes of places in between: poses (B, H, W, types, 16), a pose
row by row, and activations (B, H, W, types).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from torchcaps.functional import Capsules
from torchcaps.routing.em import EMRouting

SIDE = 4
POSE = SIDE * SIDE


class PrimaryMatrixCapsules(nn.Module):
    """Feature maps to the first matrix capsules: at each place, poses and the logits of activations are linear."""

    def __init__(self, channels: int, types: int) -> None:
        super().__init__()
        self.types = types
        self.conv = nn.Conv2d(channels, types * (POSE + 1), 1)

    def forward(self, features: Tensor) -> Capsules:
        """(B, C, H, W) -> a map of capsules."""
        places = self.conv(features).permute(0, 2, 3, 1)  # (B, H, W, types * 16 + types)
        poses, logits = places.split([self.types * POSE, self.types], dim=-1)
        poses = poses.reshape(*poses.shape[:3], self.types, POSE)
        return Capsules(poses, logits.sigmoid(), poses)


class ConvMatrixCapsules(nn.Module):
    """Each capsule votes for those of the places in whose K x K window it is, by a matrix for each pair of types.

    The places share the matrices; they compete for the capsules that lie in several windows.

    Differs from the paper: how the matrices start is not given there; here it is an identity, which carries
    poses on, plus noise, which tells the types apart.
    """

    def __init__(self, input_types: int, types: int, routing: EMRouting, *, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.kernel = kernel
        self.stride = stride
        self.weight = _matrices(kernel, kernel, input_types, types)
        self.routing = routing
        routing.join(kernel * kernel * input_types, types, POSE)

    def forward(self, capsules: Capsules) -> Capsules:
        """A map of capsules (B, H, W, ...) -> one of (B, (H - K) // stride + 1, (W - K) // stride + 1, ...)."""
        poses = self._windows(_as_matrices(capsules.poses))  # (B, H', W', T, 4, 4, K, K)
        activations = self._windows(capsules.activations)  # (B, H', W', T, K, K)
        # The axes k, l and t together are the input capsules of a place. Last is where the routing wants them.
        votes = torch.einsum("bhwtrmkl,kltjmc->bhwjrcklt", poses, self.weight)
        _, height, width = capsules.activations.shape[:3]
        return self.routing.route(
            votes.flatten(6).flatten(4, 5).movedim(-1, -3),  # (B, H', W', K * K * T, J, 16)
            activations.movedim(3, -1).flatten(3),
            normalise=lambda log_joint: self._compete(log_joint, height, width),
        )[0]

    def _windows(self, tensor: Tensor) -> Tensor:
        """(B, H, W, ...) -> (B, H', W', ..., K, K), without a copy."""
        return tensor.unfold(1, self.kernel, self.stride).unfold(2, self.kernel, self.stride)

    def _compete(self, log_joint: Tensor, height: int, width: int) -> Tensor:
        """Normalise over all types and places that a capsule votes for: (B, H', W', K * K * T, J) -> the same."""
        B, *places, _, _ = log_joint.shape
        numbers = torch.arange(height * width, device=log_joint.device).view(1, height, width)
        voter = self._windows(numbers).flatten()  # (H' * W' * K * K): the place of each capsule in each window
        in_window = log_joint.logsumexp(-1).view(B, len(voter), -1)  # (B, H' * W' * K * K, T)
        index = voter.view(1, -1, 1).expand_as(in_window)
        everywhere = in_window.new_full((B, height * width, in_window.shape[2]), -torch.inf)
        peak = everywhere.scatter_reduce(1, index, in_window.detach(), "amax")
        shares = (in_window - peak[:, voter]).exp()
        # Places that no window covers keep a zero; its logarithm must not reach the gradient.
        total = torch.zeros_like(peak).index_add(1, voter, shares).clamp_min(torch.finfo(peak.dtype).tiny).log() + peak
        return log_joint - total[:, voter].view(B, *places, -1, 1)


class ClassMatrixCapsules(nn.Module):
    """Every capsule of a map votes for the class capsules, by a matrix that all places share for each pair of types.

    So that it still matters where a capsule is, the row and the column of the centre of its receptive field,
    as fractions of the image's height and width, are added to the first two numbers of the right-hand column of
    its votes ("coordinate addition").

    Differs from the paper: it says the coordinates are scaled, not how; the start of the matrices is ours too.
    """

    offsets: Tensor
    """(H * W, 16) what coordinate addition adds."""

    def __init__(
        self, input_types: int, classes: int, routing: EMRouting, *, rows: Sequence[float], columns: Sequence[float]
    ) -> None:
        super().__init__()
        self.weight = _matrices(input_types, classes)
        self.routing = routing
        routing.join(len(rows) * len(columns) * input_types, classes, POSE)
        self._places = tuple(rows), tuple(columns)
        self.register_buffer("offsets", self._offsets(), persistent=False)

    def _offsets(self) -> Tensor:
        rows, columns = map(torch.tensor, self._places)
        offsets = torch.zeros(len(rows), len(columns), SIDE, SIDE)
        offsets[:, :, 0, -1] = rows[:, None]
        offsets[:, :, 1, -1] = columns
        return offsets.view(-1, POSE)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to a device or a data type; what had no memory gets it with its numbers."""
        had_memory = not self.offsets.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not (had_memory or self.offsets.is_meta):
            self.offsets.copy_(self._offsets())
        return self

    def forward(self, capsules: Capsules) -> Capsules:
        """A map of capsules (B, H, W, types, 16) -> class capsules (B, J, 16)."""
        height, width = capsules.activations.shape[1:3]
        offsets = self.offsets.T.reshape(SIDE, SIDE, height, width, 1)
        votes = torch.einsum("bhwtrm,tjmc->bjrchwt", _as_matrices(capsules.poses), self.weight) + offsets
        return self.routing.route(
            votes.flatten(4).flatten(2, 3).movedim(-1, 1),  # (B, H * W * T, J, 16)
            capsules.activations.flatten(1),
        )[0]


def _as_matrices(poses: Tensor) -> Tensor:
    """(..., 16) -> (..., 4, 4)"""
    return poses.reshape(*poses.shape[:-1], SIDE, SIDE)


def _matrices(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.eye(SIDE) + 0.1 * torch.randn(*sizes, SIDE, SIDE))
