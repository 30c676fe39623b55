"""Pictures of one answer: which class capsules are long, where their lengths come from, and what they mean."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from torchcaps.errors import UserError
from torchcaps.layers.stem import evaluating
from torchcaps.models.base import Network
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.models.explain import Explanation
from torchcaps.plots.parts import bare, pixels, plain, show_image

FOR, AGAINST = "#2166ac", "#b2182b"
"""What speaks for a class is blue, what speaks against it red, as in the other pictures."""
SHOWN_BARS = 20
SHOWN_TYPES = 6
SHOWN_PATCHES = 10
PAPER_REACH = 0.25
"""How far the original capsule paper moves a component, in steps of 0.05."""


class Exciting(NamedTuple):
    """Where a type of primary capsule is longest in each of a number of images."""

    images: Tensor
    """(N, C, H, W)"""
    lengths: Tensor
    """(N, types) of the longest capsule of each type."""
    places: Tensor
    """(N, types) the place it is at: row times columns, plus column."""


def explanation(network: Network, image: Tensor, classes: Sequence[int] | None = None, *, title: str = "") -> Figure:
    """An image, the lengths of its class capsules, and for some classes a map of what speaks for and against them.

    Args:
        network: any network; maps are drawn of a :class:`torchcaps.CapsuleNetwork` without layers in between.
        image: (C, H, W), prepared for the network.
        classes: numbers of the classes to draw maps of; by default those that the network finds.
        title: of the picture.
    """
    lengths, found = _answer(network, image)
    wanted = list(dict.fromkeys(found if classes is None else classes))
    explained, sentence = explained_or_why_not(network, image)
    maps = None if explained is None else explained.maps
    columns = 2 + (len(wanted) if maps is not None else 1)
    widths = [1.0, 1.0, *[1.25 if maps is not None else 1.0] * (columns - 2)]  # a map has its colour bar beside it
    bars = min(SHOWN_BARS, len(lengths))
    figure = Figure(figsize=(2.7 * sum(widths) + 0.3, max(2.9, 0.21 * bars + 0.9)), layout="constrained")
    axes = figure.subplots(1, columns, gridspec_kw={"width_ratios": widths})
    show_image(axes[0], image)
    axes[0].set_title("image", size=10)
    _bars(axes[1], network, lengths, found)
    if explained is None or maps is None:
        axes[2].set_axis_off()
        axes[2].text(0.5, 0.5, textwrap.fill(sentence, 32), ha="center", va="center", size=9)
    else:
        for place, label in zip(axes[2:], wanted):
            reach = _reach(maps[0, label])
            _overlay(place, image, maps[0, label], reach)
            _map_title(place, network, explained, label)
            _colour_bar(figure, [place], reach)
    if title:
        figure.suptitle(plain(title, 80), size=11)
    return figure


def capsule_types(network: Network, image: Tensor, label: int, exciting: Exciting | None, *, title: str = "") -> Figure:
    """The types of primary capsules that matter most for a class in an image, and what excites each of them.

    A row is a type: on the left where it speaks for and against the class in this image, then the patches of other
    images, as large as what a capsule sees, for which it is longest. The last type is the one that is most against.

    Args:
        network: a capsule network without layers in between.
        image: (C, H, W), prepared for the network.
        label: the number of the class.
        exciting: of training images, by :func:`most_exciting`; None leaves the patches out.
        title: of the picture.
    """
    explained, sentence = explained_or_why_not(network, image)
    if explained is None or explained.by_place is None:
        raise UserError(sentence)
    assert isinstance(network, CapsuleNetwork)
    by_type = explained.by_place[0, label].sum((0, 1))  # (types,)
    types = strongest_types(by_type, SHOWN_TYPES)
    maps = network.front.over_pixels(explained.by_place[0, label][:, :, types].permute(2, 0, 1))  # (types, H, W)
    count = 0 if exciting is None else min(SHOWN_PATCHES, len(exciting.images))
    figure = Figure(figsize=(1.0 * count + 3.4, 1.12 * len(types) + 0.7), layout="constrained")
    grid = figure.subplots(len(types), 1 + count, squeeze=False, gridspec_kw={"width_ratios": [1.25, *[1] * count]})
    reach = _reach(maps)
    for row, number in enumerate(types):
        _overlay(grid[row][0], image, maps[row], reach)
        share = float(by_type[number])
        colour = FOR if share >= 0 else AGAINST
        grid[row][0].set_ylabel(
            f"type {number}\n{share:+.2f}".replace("-", "−"), size=8, rotation=0, ha="right", va="center", color=colour
        )
        if exciting is not None:
            for axes, patch in zip(grid[row][1:], patches(network, exciting, number, count)):
                show_image(axes, patch)
    grid[0][0].set_title("in this image", size=8)
    if count:
        grid[0][1].set_title("training patches that excite it most", size=8, loc="left")
    _colour_bar(figure, [axes for row in grid for axes in row], reach)
    whole = float(explained.lengths[0, label])
    name = plain(network.classes[label], 30)
    head = f"what the strongest types add to the total of {name}, of length {whole:.2f}"
    figure.suptitle("\n".join(line for line in (plain(title, 80), head) if line), size=10)
    return figure


def sweep(
    network: Network,
    image: Tensor,
    label: int,
    *,
    reach: float | Tensor = PAPER_REACH,
    steps: int = 11,
    title: str = "",
) -> Figure:
    """What a class capsule's components mean: each of them moved up and down, and the capsule drawn by the decoder.

    Args:
        network: one with a decoder.
        image: (C, H, W), prepared for the network: where the components start from.
        label: the number of the class that is drawn, whether the image shows it or not.
        reach: how far a component is moved to either side: one number, or (E,) one for each.
        steps: how many drawings of each component; in the middle one of an odd number it is as it was.
        title: of the picture.
    """
    drawn, offsets = swept(network, image, label, reach=reach, steps=steps)
    size = len(drawn)
    figure = Figure(figsize=(0.66 * steps + 0.5, 0.66 * size + 0.9), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01, wspace=0.0, hspace=0.0)  # type: ignore[union-attr, call-arg]
    grid = figure.subplots(size, steps, squeeze=False)
    same = bool((offsets == offsets[0]).all())
    for row in range(size):
        for column in range(steps):
            show_image(grid[row][column], drawn[row, column])
        own = "" if same else f"\n±{float(offsets[row, -1]):.2g}"
        grid[row][0].set_ylabel(f"{row + 1}{own}", size=8, rotation=0, ha="right", va="center")
    if same:
        for column, offset in enumerate(offsets[0].tolist()):
            grid[0][column].set_title("as it is" if abs(offset) < 1e-9 else f"{offset:+.2f}", size=8)
    name = plain(network.classes[label], 30)
    head = f"capsule of {name}: each of its {size} components moved, one a row, and drawn"
    figure.suptitle("\n".join(line for line in (plain(title, 80), head) if line), size=10)
    return figure


@torch.no_grad()
def swept(
    network: Network, image: Tensor, label: int, *, reach: float | Tensor = PAPER_REACH, steps: int = 11
) -> tuple[Tensor, Tensor]:
    """The drawings of :func:`sweep` (E, steps, C, H, W), and the numbers that were added (E, steps)."""
    if network.decoder is None:
        raise UserError("This network was trained without reconstruction: it has no decoder, so nothing can be drawn.")
    if steps < 2:
        raise ValueError(f"steps must be at least 2, not {steps}")
    poses = _evaluated(network, image).poses[0]  # (J, E)
    E = poses.shape[1]
    reaches = torch.as_tensor(reach, dtype=poses.dtype, device=poses.device).expand(E)
    line = (torch.arange(steps, device=poses.device) * 2 - (steps - 1)) / (steps - 1)  # -1 to 1, 0 exactly
    offsets = reaches[:, None] * line  # (E, steps)
    moved = poses.expand(E, steps, *poses.shape).clone()
    numbers = torch.arange(E, device=poses.device)
    moved[numbers, :, label, numbers] += offsets
    labels = torch.full((E * steps,), label, device=poses.device)
    drawn: Tensor = network.decoder(moved.flatten(0, 1), labels)  # (E * steps, 1, C, H, W)
    return drawn.view(E, steps, *drawn.shape[2:]).cpu(), offsets.cpu()


@torch.no_grad()
def usual_reach(network: Network, images: Tensor, label: int) -> Tensor | None:
    """Twice the standard deviation (E,) of a class capsule's components over the images that are taken for the class.

    None if fewer than two of the images (N, C, H, W) are.
    """
    poses, found = [], []
    with evaluating(network):
        for part in torch.split(images, network.evaluation_batch):
            capsules = network(part.to(network.mean.device)).capsules
            poses.append(capsules.poses[:, label])
            found.append((network.found(capsules) == label).any(1))
    chosen = torch.cat(poses)[torch.cat(found)]
    return 2 * chosen.std(0) if len(chosen) > 1 else None


@torch.no_grad()
def most_exciting(network: Network, images: Tensor) -> Exciting:
    """Where each type of primary capsule is longest in each image (N, C, H, W)."""
    if not isinstance(network, CapsuleNetwork):
        raise UserError(_NO_TYPES)
    rows, columns, types = network.map_shape
    lengths, places = [], []
    for part in torch.split(images, network.evaluation_batch):
        with evaluating(network):
            activations = network.primary_capsules(part.to(network.mean.device)).activations
        if network.kept is not None:  # what a pruned network still computes but no class uses
            used = torch.zeros_like(activations[0], dtype=torch.bool)
            used[network.kept] = True
            activations = activations.masked_fill(~used, -1.0)
        longest = activations.view(len(part), rows * columns, types).max(1)
        lengths.append(longest.values.cpu())
        places.append(longest.indices.cpu())
    return Exciting(images, torch.cat(lengths), torch.cat(places))


def patches(network: CapsuleNetwork, exciting: Exciting, number: int, count: int) -> list[Tensor]:
    """What capsules of a type see where they are longest, at most one patch (C, S, S) of an image, longest first."""
    columns = network.map_shape[1]
    cut = []
    for image in exciting.lengths[:, number].topk(min(count, len(exciting.images))).indices.tolist():
        row, column = divmod(int(exciting.places[image, number]), columns)
        top, left, side = network.front.field(row, column)
        framed = F.pad(exciting.images[image], [side] * 4)  # black where there is only padding
        cut.append(framed[:, side + top : top + 2 * side, side + left : left + 2 * side])
    return cut


def strongest_types(by_type: Tensor, count: int) -> list[int]:
    """Numbers of the types with the largest contributions (types,); the last one is the most negative, if any is."""
    order = by_type.argsort(descending=True).tolist()
    if len(order) <= count or by_type[order[-1]] >= 0:
        return order[:count]
    return [*order[: count - 1], order[-1]]


_NO_TYPES = "Only a capsnet can be explained by its primary capsules: other networks have no votes to add up."


def explained_or_why_not(network: Network, image: Tensor) -> tuple[Explanation | None, str]:
    """The explanation of an image (C, H, W), and a sentence that says what there is none of."""
    if not isinstance(network, CapsuleNetwork):
        return None, _NO_TYPES
    try:
        with evaluating(network):
            explained = network.explain(image[None].to(network.mean.device))
    except NotImplementedError:
        return None, "This routing does not say with which coefficients it sums the votes: there is nothing to map."
    if explained.maps is not None:
        return explained, ""
    return explained, "With capsule layers in between, contributions belong to no place of the image: there is no map."


def _evaluated(network: Network, image: Tensor) -> Any:
    with evaluating(network), torch.no_grad():
        return network(image[None].to(network.mean.device)).capsules


def _answer(network: Network, image: Tensor) -> tuple[list[float], list[int]]:
    """Lengths of all class capsules, and the numbers of the classes found; the longest if none is long enough."""
    capsules = _evaluated(network, image)
    lengths = capsules.activations[0].tolist()
    found = [label for label in network.found(capsules)[0].tolist() if label >= 0]
    return lengths, found or [int(np.argmax(lengths))]


def _bars(axes: Axes, network: Network, lengths: Sequence[float], found: Sequence[int]) -> None:
    shown = list(range(len(lengths)))
    if len(lengths) > SHOWN_BARS:
        shown = sorted(shown, key=lambda label: -lengths[label])[:SHOWN_BARS]
    values = [lengths[label] for label in shown]
    colours = [FOR if label in found else "0.7" for label in shown]
    axes.barh(range(len(shown)), values, color=colours)
    axes.set_yticks(range(len(shown)), [plain(network.classes[label], 14) for label in shown], size=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title("capsule lengths", size=10)
    axes.spines[["top", "right"]].set_visible(False)


def _map_title(axes: Axes, network: Network, explained: Explanation, label: int) -> None:
    shares = explained.contributions[0, :, label]
    positive, negative = float(shares.clamp_min(0).sum()), float(shares.clamp_max(0).sum())
    whole = float(explained.lengths[0, label])
    name = plain(network.classes[label], 20)
    axes.set_title(f"{name}: {positive:.2f} − {-negative:.2f} = {whole:.2f}", size=10)


def _overlay(axes: Axes, image: Tensor, values: Tensor, reach: float) -> None:
    """A map over a pale image: blue for, red against, the stronger the less of the image is seen."""
    pale = 1 - 0.35 * (1 - pixels(image))
    base = pale if pale.ndim == 3 else np.repeat(pale[:, :, None], 3, 2)
    strength = (values.cpu().double().nan_to_num() / reach).clamp(-1, 1).numpy()[:, :, None]
    colours = np.where(strength >= 0, to_rgb(FOR), to_rgb(AGAINST))
    axes.imshow(base * (1 - np.abs(strength)) + colours * np.abs(strength))
    bare(axes)


def _colour_bar(figure: Figure, axes: Sequence[Axes], reach: float) -> None:
    scale = ScalarMappable(Normalize(-reach, reach), LinearSegmentedColormap.from_list("", [AGAINST, "white", FOR]))
    bar = figure.colorbar(scale, ax=list(axes), shrink=0.8, pad=0.02, ticks=[-reach, 0, reach], format="{x:.2g}")
    bar.ax.tick_params(labelsize=7)
    bar.set_label("against   |   for, by pixel", size=8)


def _reach(maps: Tensor) -> float:
    """The largest absolute number of maps, for a scale with zero in its middle."""
    largest = float(maps.abs().max()) if maps.numel() else 0.0
    return largest if np.isfinite(largest) and largest > 1e-12 else 1e-12
