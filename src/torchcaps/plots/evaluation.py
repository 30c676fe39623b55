"""Pictures of how good a network is: its worst mistakes, its calibration, its robustness, and runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.plots.parts import plain, show_image
from torchcaps.plots.run import Metrics
from torchcaps.trained.robustness import TRIALS
from torchcaps.trained.scores import Scores


def worst_mistakes(images: Tensor, scores: Scores, worst: Sequence[int], names: Sequence[str] = ()) -> Figure:
    """The images (N, C, H, W) that are most surely wrong, "true → predicted" above each, and its name below."""
    columns = min(6, max(1, len(worst)))
    rows = max(1, -(-len(worst) // columns))
    figure = Figure(figsize=(1.6 * columns, 1.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    found = scores.found
    for axes, image, row in zip(grid.flat, images, worst):
        axes.set_axis_on()
        show_image(axes, image)
        true, answer = (_names(scores, shown) for shown in (scores.shown[row], found[row]))
        axes.set_title(plain(f"{true} → {answer}", 30), size=8)
        number = scores.image(row)
        name = plain(names[number].rpartition("/")[2], 22) if names else f"image {number}"
        axes.set_xlabel(name, size=7)
    return figure


def calibration(scores: Scores) -> Figure:
    """The share of right answers by the length of the longest capsule."""
    parts = scores.calibration()
    figure = Figure(figsize=(4.5, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.7", linestyle="--", label="lengths that are probabilities")
    axes.plot([part.length for part in parts], [part.right for part in parts], marker="o", label="this network")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    one = scores.labels_per_image > 0
    axes.set_xlabel("length of the longest class capsule" if one else "length of a class capsule")
    axes.set_ylabel("share of right answers" if one else "share of images that show the class")
    points = f"{len(parts)} points, {len(scores.lengths)} images"
    axes.set_title(f"mean distance {scores.calibration_error():.3f} ({points})", size=10)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def robustness(errors: Mapping[str, Mapping[float, float]], network: str) -> Figure:
    """Error against strength, a panel a trial: trial -> strength -> error."""
    figure = Figure(figsize=(4.2 * len(errors), 3.4), layout="constrained")
    panels = figure.subplots(1, len(errors), squeeze=False)
    for axes, (name, by_strength) in zip(panels.flat, errors.items()):
        axes.plot(list(by_strength), list(by_strength.values()), marker="o", label=plain(network, 40))
        axes.set_ylim(0, 100)
        axes.set_title(name, size=10)
        axes.set_xlabel(TRIALS[name].unit)
        axes.set_ylabel("error, %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def compared_curves(metrics: Mapping[str, Metrics]) -> Figure:
    """Evaluation error and training loss of several runs, by step and by second."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    grid = figure.subplots(2, 2)
    for row, (column, label) in zip(grid, (("evaluation_error", "evaluation error, %"), ("loss", "loss"))):
        for axes, abscissa in zip(row, ("step", "seconds")):
            for number, (name, rows) in enumerate(metrics.items()):
                points = [(values[abscissa], values[column]) for values in rows if values[column] is not None]
                marker = "." if len(points) < 30 else None
                x, y = zip(*points) if points else ((), ())  # a run without any has its place in the legend, too
                axes.plot(x, y, label=plain(name, 40), marker=marker, color=f"C{number}")
            axes.set_xlabel(abscissa)
            axes.set_ylabel(label)
            axes.set_yscale("symlog", linthresh=0.01 if column == "loss" else 1.0)
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].legend(frameon=False)
    return figure


def _names(scores: Scores, shown: Tensor) -> str:
    return "+".join(name for name, there in zip(scores.classes, shown.tolist()) if there) or "nothing"
