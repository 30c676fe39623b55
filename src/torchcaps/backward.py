"""Going backward through the images that matter."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from torchcaps.functional import at_least_float32


def keeping_chances(sizes: Tensor, noise: float) -> Tensor:
    """With which chance to keep each of several gradients, so that leaving the others out adds little noise.

    Whoever is kept is divided by its chance, so the mean is right on average. Of all chances that keep as many, those
    that grow with the size, up to one, add the least variance.

    Args:
        sizes: (B,) norms of the gradients.
        noise: how much variance may be added, as a share of the mean square of the gradients.

    >>> keeping_chances(torch.tensor([1.0, 1.0, 8.0]), noise=0.1)
    tensor([0.2326, 0.2326, 1.0000], dtype=torch.float64)
    """
    _check_noise(noise)
    shares = sizes.double() / sizes.double().amax().clamp_min(torch.finfo(torch.float64).tiny)
    ordered = shares.sort().values
    sums, squares = ordered.cumsum(0), ordered.square().cumsum(0)
    budget = noise * squares[-1]
    # If the k smallest were kept by chance, the next one just not, they would add this much.
    added = ordered * sums - squares
    smaller = int((added <= budget).sum()) - 1
    threshold = (budget + squares[smaller]) / sums[smaller]
    return torch.where(shares > 0, shares / threshold, 0.0).clamp(max=1)


class SampledBackward:
    """A hook on a tensor of images' values: most images with small gradients are left out of what lies before it.

    Once most images are learned, a few of a batch make nearly all of its gradient. Each image is kept with a chance
    that grows with its gradient, and counts for those that are not (Katharopoulos and Fleuret, "Not all samples are
    created equal", 2018). The gradient stays right on average. With the extra ``fast``, images without gradient cost
    the convolutions of :class:`torchcaps.CapsuleNetwork` nothing on the way back.

    Args:
        noise: how much variance may be added, as a share of the mean square of the images' gradients.
        draw: gives a random number in [0, 1) for each batch, the same in all processes.
        gather: given the sizes (B,) of this process's gradients, gives those of all processes, by rank. All of them
            have equally many images.
        rank: which of them this process is.

    >>> images = torch.rand(64, 3, requires_grad=True)
    >>> values = images * 2
    >>> handle = values.register_hook(SampledBackward(noise=0.5))
    >>> (values ** 8).sum().backward()
    >>> bool((images.grad == 0).all(1).any())
    True
    """

    def __init__(
        self,
        noise: float = 0.1,
        *,
        draw: Callable[[], float] = random.random,
        gather: Callable[[Tensor], Tensor] = torch.clone,
        rank: int = 0,
    ) -> None:
        _check_noise(noise)
        self.noise = noise
        self._draw, self._gather, self._rank = draw, gather, rank

    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient (B, ...) with zeros for the images left out."""
        count = len(gradient)
        exact = at_least_float32(gradient)
        sizes = torch.linalg.vector_norm(exact.detach().reshape(count, -1 if count else 0), dim=1)
        everyone = self._gather(sizes).cpu()
        if not (everyone.isfinite().all() and everyone.any()):
            return gradient
        own = slice(self._rank * count, (self._rank + 1) * count)
        if not everyone[own].equal(sizes.cpu()):
            raise ValueError("gather must give the sizes of all processes by rank, equally many of each")
        factors = self._factors(everyone)[own].to(exact)
        return (exact * factors.view(-1, *[1] * (gradient.ndim - 1))).to(gradient.dtype)

    def _factors(self, sizes: Tensor) -> Tensor:
        """What each gradient is multiplied with: one over its chance if it is kept, else zero."""
        chances = keeping_chances(sizes, self.noise)
        generator = torch.Generator().manual_seed(int(self._draw() * 2**32))
        start = torch.rand(1, generator=generator, dtype=torch.float64)
        # From image to image the chances add up, and whoever passes a whole number is kept: always as many. In a random
        # order, because the images of a batch may have one that the sampling would fall in step with.
        order = torch.randperm(len(chances), generator=generator)
        reached = torch.cat([start, chances[order]]).cumsum(0).floor()
        kept = torch.zeros(len(chances), dtype=torch.bool)
        kept[order] = reached[1:] > reached[:-1]
        return torch.where(kept | (chances >= 1), 1 / chances, 0.0)


def _check_noise(noise: float) -> None:
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise must be zero or more, and finite, not {noise}")
