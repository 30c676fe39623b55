"""What several pictures have: texts and images."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor

from torchcaps.data.files import shown

LONGEST = 18


def plain(text: str, longest: int = LONGEST) -> str:
    r"""A text that matplotlib shows as it is: no formulas, no bytes that are no letters, not too long.

    >>> print(plain("p_1$^$"))
    p_1\$^\$
    """
    printable = shown(text)
    short = printable if len(printable) <= longest else f"{printable[: longest - 1]}…"
    if short.startswith("_"):  # which would keep it out of legends
        short = f"\u200b{short}"
    return short.replace("$", r"\$")


def show_image(axes: Axes, image: Tensor) -> None:
    """An image (C, H, W), without ticks."""
    axes.imshow(pixels(image), cmap="gray", vmin=0, vmax=1)
    bare(axes)


def pixels(image: Tensor) -> NDArray[np.float64]:
    """(C, H, W) -> (H, W) or (H, W, 3) in [0, 1]; a standardised image is brought there."""
    values = image.detach().cpu().double()
    low, high = float(values.min()), float(values.max())
    if low < -1e-6 or high > 1 + 1e-6:
        values = (values - low) / max(high - low, 1e-12)
    values = values.clamp(0, 1).nan_to_num()
    return values[0].numpy() if len(values) == 1 else values.permute(1, 2, 0).numpy()


def bare(axes: Axes) -> None:
    """No ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
