"""A trained network as the page uses it: one image at a time, at once."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from torchcaps.errors import UserError
from torchcaps.layers.primary import ImageCapsules
from torchcaps.models.base import Network, standardised
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.trained.run import TrainedRun
from torchcaps.training.result import RunResult

SWEEP_STEPS = 11
SWEEP_REACH = 0.25
"""How far a component is swept to either side, as in the original capsule paper."""
CURVES = ("loss", "evaluation_error", "train_error")
CURVE_POINTS = 400


@dataclass(frozen=True)
class ContributionMap:
    """What the places of an image add to and take from the length that one class capsule has before the squash."""

    label: int
    adds: float
    """Sum of the positive contributions of primary capsules,"""
    takes: float
    """and of the negative ones: together that length."""
    adds_map: Tensor
    """(H, W) the same over the pixels"""
    takes_map: Tensor


@dataclass(frozen=True)
class Analysis:
    """What a network makes of one image."""

    lengths: Tensor
    """(J,)"""
    poses: Tensor
    """(J, E)"""
    found: list[int]
    """The classes it decides for, surest first."""
    reconstructions: dict[int, Tensor]
    """(C, H, W) in [0, 1] for each class found; empty without a decoder."""
    contributions: ContributionMap | None
    """None for networks that have no such maps."""


class ServedModel:
    """A network that answers for one image at a time.

    Args:
        name: what the page calls it.
        network: as trained; it is copied and folded.
        curves: columns of numbers over the steps of its training, ``step`` among them.
        error_percent: its test error, if known.

    >>> import torchcaps
    >>> model = ServedModel("fresh", torchcaps.CapsuleNetwork((1, 28, 28), 10, conv_channels=8, primary_capsules=2))
    >>> model.analyse(torch.zeros(1, 28, 28, dtype=torch.uint8)).poses.shape
    torch.Size([10, 16])
    """

    def __init__(
        self,
        name: str,
        network: Network,
        *,
        curves: Mapping[str, Sequence[float | None]] | None = None,
        error_percent: float | None = None,
    ) -> None:
        self.name = name
        self.original = network
        self.network = network.folded()
        self.many = self.network
        """The same network for many images at a time."""
        if isinstance(self.network, CapsuleNetwork) and isinstance(self.network.front, ImageCapsules):
            self.many = network.folded()
            # The fast algorithm pays for batches; one image takes least with channels last.
            self.network.front = copy.deepcopy(cast(CapsuleNetwork, network).front)
            self.network.front.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.curves = dict(curves or {})
        self.error_percent = error_percent
        with torch.inference_mode():
            blank = torch.zeros(1, *network.image_shape, device=network.mean.device)
            self.pose_size = self.network(blank).capsules.poses.shape[2]
        self.has_maps = self._explains(blank)

    @classmethod
    def of_run(cls, run: TrainedRun) -> ServedModel:
        """The network of a run folder, with the curves of its training."""
        rows = run.folder.read_metrics()
        every = max(1, len(rows) // CURVE_POINTS)
        thinned = [row for number, row in enumerate(rows) if number % every == 0 or row["evaluation_error"] is not None]
        curves = {name: [row[name] for row in thinned] for name in ("step", *CURVES)} if thinned else None
        error = RunResult.read(run.folder.result).test_error_percent if run.folder.result.is_file() else None
        return cls(run.folder.path.resolve().name, run.network, curves=curves, error_percent=error)

    @property
    def has_decoder(self) -> bool:
        return self.network.decoder is not None

    @torch.inference_mode()
    def analyse(self, pixels: Tensor, label: int | None = None) -> Analysis:
        """Classify, draw again and explain one image.

        Args:
            pixels: (C, H, W) uint8 of the network's own size.
            label: the class to explain, by default the one it is surest of.
        """
        image = pixels[None].to(self.network.mean.device).float().div(255)
        if self.network.task.standardise:
            image = standardised(image)
        contributions = None
        if self.has_maps:
            assert isinstance(self.network, CapsuleNetwork)
            explanation = self.network.explain(image)
            assert explanation.by_place is not None
            capsules = explanation.capsules
            chosen = int(capsules.activations[0].argmax()) if label is None else label
            shares = explanation.by_place[0, chosen]  # (rows, columns, types)
            signed = torch.stack([shares.clamp_min(0).sum(-1), shares.clamp_max(0).sum(-1)])
            adds_map, takes_map = self.network.front.over_pixels(signed)
            adds, takes = signed.sum((1, 2)).tolist()
            contributions = ContributionMap(chosen, adds, takes, adds_map, takes_map)
        else:
            capsules = self.network(image).capsules
        found = [number for number in self.network.found(capsules)[0].tolist() if number >= 0]
        drawn = found if self.has_decoder else []
        images = list(self.decode(capsules.poses[0, drawn], drawn)) if drawn else []
        return Analysis(
            capsules.activations[0].float(), capsules.poses[0].float(), found, dict(zip(drawn, images)), contributions
        )

    @torch.inference_mode()
    def decode(self, poses: Tensor, labels: Sequence[int]) -> Tensor:
        """Draw class capsules with poses (N, E), one image (C, H, W) in [0, 1] for each: (N, C, H, W)."""
        if self.network.decoder is None:
            raise UserError("This network was trained without reconstruction: it has no decoder to draw with.")
        device = self.network.mean.device
        of_all_classes = poses.to(device)[:, None].expand(-1, len(self.network.classes), -1)  # it looks at one
        images: Tensor = self.network.decoder(of_all_classes, torch.tensor(labels, dtype=torch.long, device=device))
        return images[:, 0]

    def sweep(self, pose: Tensor, label: int, component: int | None = None) -> Tensor:
        """A class capsule's pose (E,) with one component after the other, or just one, moved over its range.

        Returns:
            (components, steps, C, H, W)
        """
        components = list(range(self.pose_size)) if component is None else [component]
        shifts = torch.linspace(-SWEEP_REACH, SWEEP_REACH, SWEEP_STEPS)
        moved = pose.repeat(len(components), SWEEP_STEPS, 1)  # (components, steps, E)
        for row, number in enumerate(components):
            moved[row, :, number] += shifts
        images = self.decode(moved.flatten(0, 1), [label] * (len(components) * SWEEP_STEPS))
        return images.view(len(components), SWEEP_STEPS, *images.shape[1:])

    def _explains(self, blank: Tensor) -> bool:
        if not isinstance(self.network, CapsuleNetwork) or len(self.network.layers) > 1:
            return False
        try:
            return self.network.explain(blank).maps is not None
        except NotImplementedError:  # a routing that does not tell its coefficients
            return False


def check_side_by_side(models: Sequence[ServedModel]) -> None:
    """Refuse networks that cannot be shown the same image."""
    first = models[0]
    for model in models[1:]:
        for what in ("image_shape", "source_shape", "fit", "classes"):
            if getattr(model.network.task, what) != getattr(first.network.task, what):
                raise UserError(f"{first.name} and {model.name} cannot be compared: their {what} is not the same.")
