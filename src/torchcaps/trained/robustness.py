"""How a network stands images that are turned, noisy, or made to fool it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from torchcaps.data.augmentation import Augmentation
from torchcaps.data.splits import Batch, Split
from torchcaps.data.stateless import key, random_uniform
from torchcaps.functional import presence
from torchcaps.models.base import Network
from torchcaps.trained.scores import Change, as_seen, score

STEPS_OF_PGD = 10


def affine(network: Network, batch: Batch, numbers: Tensor, *, strength: float) -> Tensor:
    """Images turned by up to 30°, scaled by up to 0.3 and moved by up to 0.2 of their side, times ``strength``."""
    images = batch.images
    angle, scale, down, right = (
        strength * random_uniform(key("affine", name), numbers) for name in ("angle", "scale", "down", "right")
    )
    angle, scale = angle * math.radians(30), 1 + 0.3 * scale
    cosine, sine = angle.cos() / scale, angle.sin() / scale
    height, width = images.shape[2:]  # both from -1 to 1 in the grid
    turn = torch.stack([cosine, -sine * height / width, sine * width / height, cosine], 1).view(-1, 2, 2)
    shift = 0.4 * torch.stack([right, down], 1)[:, :, None]
    grid = F.affine_grid(torch.cat([turn, turn @ shift], 2).to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def noise(network: Network, batch: Batch, numbers: Tensor, *, strength: float) -> Tensor:
    """Images with Gaussian noise of this standard deviation."""
    pixels = batch.images[0].numel()
    uniform = random_uniform(key("noise"), numbers[:, None] * pixels + torch.arange(pixels))
    drawn = math.sqrt(2) * torch.erfinv(uniform.clamp(-1 + 1e-15, 1 - 1e-15))
    return (batch.images + strength * drawn.view(batch.images.shape).to(batch.images)).clamp(0, 1)


def fgsm(network: Network, batch: Batch, numbers: Tensor, *, strength: float) -> Tensor:
    """Each pixel moved by ``strength`` the way that is worst for the answer (Goodfellow et al., 2015)."""
    return (batch.images + strength * _slope(network, batch.images, batch.labels).sign()).clamp(0, 1)


def pgd(network: Network, batch: Batch, numbers: Tensor, *, strength: float) -> Tensor:
    """Ten smaller such steps, none further than ``strength`` from the image (Madry et al., 2018)."""
    images = batch.images
    step = 2.5 * strength / STEPS_OF_PGD
    for _ in range(STEPS_OF_PGD):
        moved = images + step * _slope(network, images, batch.labels).sign()
        images = (batch.images + (moved - batch.images).clamp(-strength, strength)).clamp(0, 1)
    return images


def _slope(network: Network, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient, by the images, of how much longer the longest wrong capsule is than the shortest right one.

    Not of the margin loss, which has none where the answer is sure. Where lengths have none, that of the loss.
    """
    with torch.enable_grad():
        seen = images.detach().clone().requires_grad_()
        capsules = network(as_seen(network, seen)).capsules
        lengths = capsules.activations
        right = presence(labels, lengths.shape[1]) > 0
        lead = lengths.masked_fill(right, -1).amax(1) - lengths.masked_fill(~right, 2).amin(1)
        (slope,) = torch.autograd.grad(lead.sum(), seen, retain_graph=True)
        flat = (slope == 0).flatten(1).all(1)
        if not flat.any():
            return slope
        (of_loss,) = torch.autograd.grad(network.loss(capsules, labels), seen)
    return torch.where(flat[:, None, None, None], of_loss, slope)


@dataclass(frozen=True)
class Trial:
    """A way to make images harder, and how far to go."""

    change: Callable[..., Tensor]
    strengths: tuple[float, ...]
    unit: str


TRIALS: dict[str, Trial] = {
    "affine": Trial(affine, (0.0, 0.25, 0.5, 0.75, 1.0), "turns up to 30°, scale 0.3, shifts 0.2, times"),
    "noise": Trial(noise, (0.0, 0.1, 0.2, 0.3, 0.4, 0.5), "standard deviation of the noise"),
    "fgsm": Trial(fgsm, (0.0, 0.02, 0.05, 0.1, 0.2, 0.3), "largest change of a pixel"),
    "pgd": Trial(pgd, (0.0, 0.02, 0.05, 0.1, 0.2, 0.3), "largest change of a pixel"),
}


def error_by_strength(
    networks: Sequence[Network], split: Split, name: str, *, augmentation: Augmentation, limit: int | None = None
) -> dict[float, float]:
    """The error in percent at every strength of a trial in :data:`TRIALS`."""
    trial = TRIALS[name]
    errors = {}
    for strength in trial.strengths:
        change: Change | None = partial(trial.change, strength=strength) if strength else None
        errors[strength] = score(networks, split, augmentation=augmentation, change=change, limit=limit).error_percent
    return errors
