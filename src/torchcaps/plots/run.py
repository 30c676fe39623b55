"""Pictures of a run: how it learned, what it confuses, what it draws, and where its decisions come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from torchcaps.data.batches import evaluation_batches
from torchcaps.data.splits import Batch
from torchcaps.functional import Capsules
from torchcaps.layers.stem import evaluating
from torchcaps.models.base import Network
from torchcaps.plots.files import save
from torchcaps.plots.parts import bare, plain, show_image
from torchcaps.process import say
from torchcaps.routing.base import SharedRouting
from torchcaps.training.evaluation import Evaluation
from torchcaps.training.fit import Callback, Finished

Metrics = Sequence[Mapping[str, float | None]]
SHOWN_CLASSES = 10
IMAGES_IN_A_ROW = 10
MOST_IMAGES = 60
SAMPLE = 200  # images that a picture is made from


class Pictures(Callback):
    """Draws a run when it is finished. What cannot be drawn is said, and is no failure: the result is there."""

    def on_finish(self, finished: Finished) -> None:
        try:
            draw_run(finished)
        except Exception as error:  # fonts, names that are no text, a full disk: whatever drawing runs into
            say(f"the pictures could not be drawn ({error}).")


def draw_run(finished: Finished) -> None:
    """Draw everything there is to show of a finished run into its folder."""
    network, plan = finished.network, finished.plan
    classes = plan.data.classes
    batches = evaluation_batches(plan.data.test, batch_size=SAMPLE, augmentation=plan.augmentation, limit=SAMPLE)
    sample = next(batches).on(network.mean.device)
    with evaluating(network):
        figures = {
            "curves": curves(finished.folder.read_metrics()),
            "confusion": confusion(finished.test, classes),
            "coefficients": coefficients(network, sample, classes),
        }
        if network.decoder is not None:
            figures["reconstructions"] = reconstructions(network, sample, classes)
    for name, figure in figures.items():
        save(figure, finished.folder.path / f"{name}.png")


def curves(metrics: Metrics) -> Figure:
    """Loss, errors, lengths of the class capsules and, where they are learned, the coefficients, by step."""
    with_coefficients = any(row["coefficient_mean"] is not None for row in metrics)
    figure = Figure(figsize=(9, 6), layout="constrained")
    loss, error, lengths, spread = figure.subplots(2, 2).flat
    _lines(loss, metrics, {"loss": "loss"}, "loss")
    loss.set_yscale("log")
    _lines(error, metrics, {"train_error": "training batches", "evaluation_error": "evaluation"}, "error, %")
    error.set_yscale("symlog", linthresh=1.0)
    error.set_ylim(0, 1.3 * max(1e-3, error.dataLim.y1))  # or a single point would lie on the edge
    error.yaxis.set_major_formatter("{x:g}")
    _lines(lengths, metrics, {"length_right": "right class", "length_wrong": "wrong classes"}, "capsule length")
    lengths.set_ylim(0, 1)
    if with_coefficients:
        _lines(spread, metrics, {"coefficient_mean": "mean"}, "routing coefficients")
        steps, mean, deviation, low, high = (
            np.array([row[name] for row in metrics if row["coefficient_mean"] is not None], dtype=float)
            for name in ("step", *(f"coefficient_{statistic}" for statistic in ("mean", "std", "min", "max")))
        )
        spread.fill_between(steps, mean - deviation, mean + deviation, alpha=0.35, label="± standard deviation")
        spread.fill_between(steps, low, high, alpha=0.15, color="C0", label="extremes")
        spread.ticklabel_format(axis="y", useOffset=False)
        spread.legend(frameon=False)
    else:
        spread.set_axis_off()
    return figure


def _lines(axes: Axes, metrics: Metrics, columns: Mapping[str, str], label: str) -> None:
    for column, name in columns.items():
        points = [(row["step"], row[column]) for row in metrics if row[column] is not None]
        if points:
            axes.plot(*zip(*points), label=name, marker="." if len(points) < 30 else None)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    if len(columns) > 1:
        axes.legend(frameon=False)


def confusion(evaluation: Evaluation, classes: Sequence[str]) -> Figure:
    """True classes by predicted ones, as shares of the true class: right answers green, mistakes orange."""
    counts = evaluation.confusion.numpy()
    count = len(classes)
    shares = 100 * counts / np.maximum(evaluation.shown.numpy()[:, None], 1)
    right = np.ma.masked_where(~np.eye(count, dtype=bool), shares)
    wrong = np.ma.masked_where(np.eye(count, dtype=bool), shares)
    side = min(18.0, 3.5 + 0.4 * count if count <= 20 else 7.5 + 0.17 * count)
    figure = Figure(figsize=(side + 1.5, side), layout="constrained")
    axes = figure.subplots()
    pictures = {
        "right answers, % of the true class": axes.imshow(right, cmap="Greens", vmin=0, vmax=120),
        "mistakes, % of the true class": axes.imshow(wrong, cmap="Oranges", vmin=0, vmax=max(1.0, float(wrong.max()))),
    }
    for label, picture in pictures.items():
        bar = figure.colorbar(picture, ax=axes, shrink=0.45, pad=0.01)
        bar.set_label(label, size=8)
        bar.ax.tick_params(labelsize=7)
        if label.startswith("right"):
            bar.ax.set_ylim(0, 100)
    size = 9 if count <= 20 else max(5, 9 - count // 20)
    names = [plain(name) for name in classes]
    axes.set_xticks(
        range(count), names, rotation=90 if count > 20 else 45, ha="right", rotation_mode="anchor", size=size
    )
    axes.set_yticks(range(count), names, size=size)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if count <= 20:
        for (row, column), number in np.ndenumerate(counts):
            if number or (row == column and evaluation.shown[row]):
                strong = shares[row, column] > (75 if row == column else 0.6 * float(wrong.max()))
                colour = "white" if strong else "black"
                text = f"{number:.0f}" if number == round(number) else f"{number:.3g}"
                axes.text(column, row, text, ha="center", va="center", color=colour, size=8)
    axes.set_title(f"{evaluation.error_percent:.2f} % of {evaluation.images} images wrong", size=11)
    return figure


@torch.inference_mode()
def reconstructions(network: Network, sample: Batch, classes: Sequence[str]) -> Figure:
    """An image of every class above what the decoder draws of it, its class "→ predicted" above both."""
    chosen = _one_of_each_class(sample, len(classes))
    images, parts, labels = sample.images[chosen], sample.parts[chosen], sample.labels[chosen]
    capsules = network(images).capsules
    drawn = network.reconstruct(capsules)  # (N, K, C, H, W)
    predicted = network.found(capsules)
    if labels.shape[1] > 1:  # several classes in an image: show it whole, its parts, and what is drawn of each
        pictures = [images, *parts.unbind(1), *drawn.unbind(1)]
        names = ["input", *["part"] * labels.shape[1], *["drawn"] * labels.shape[1]]
    else:
        pictures, names = [images, drawn[:, 0]], ["input", "drawn"]
    columns = min(len(chosen), IMAGES_IN_A_ROW)
    blocks = -(-len(chosen) // columns)
    height = len(pictures)
    figure = Figure(figsize=(1.15 * columns + 0.4, blocks * (1.0 * height + 0.5)), layout="constrained")
    grid = figure.subplots(blocks * height, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for number in range(len(chosen)):
        block, column = divmod(number, columns)
        for row, picture in enumerate(pictures):
            axes = grid[block * height + row][column]
            axes.set_axis_on()
            show_image(axes, picture[number])
            if column == 0:
                axes.set_ylabel(names[row], size=8)
        true, found = (_named(row[number], classes) for row in (labels, predicted))
        right = set(predicted[number].tolist()) == set(labels[number].tolist())
        grid[block * height][column].set_title(f"{true}\n→ {found}", size=7, color="black" if right else "C3")
    there = {label for labels in sample.labels.tolist() for label in labels if label >= 0}
    if MOST_IMAGES == len(chosen) < len(there):
        figure.suptitle(f"the first {len(chosen)} of {len(classes)} classes", size=9)
    return figure


def _one_of_each_class(sample: Batch, classes: int) -> list[int]:
    """The numbers of the first image of every class in the sample."""
    first: dict[int, int] = {}
    for number, labels in enumerate(sample.labels.tolist()):
        for label in labels:
            first.setdefault(label, number)
    numbers = list(dict.fromkeys(first[label] for label in range(classes) if label in first))
    return numbers[:MOST_IMAGES]


def _named(labels: Tensor, classes: Sequence[str]) -> str:
    return "+".join(plain(classes[label], 14) for label in labels.tolist() if label >= 0)


def coefficients(network: Network, sample: Batch, classes: Sequence[str]) -> Figure:
    """Where each class gets its support and where it is held back, as maps over the image.

    The first row is what an average image of the class looks like. The second shows what the primary capsules
    of each place add to the evidence for the class, on average over the class's images. Where a routing
    has coefficients shared by all images, the third shows their mean over the capsules of each place.
    """
    shown = min(SHOWN_CLASSES, len(network.classes))
    rows = {"support": _support_maps(network, sample)}
    shared = _coefficient_maps(network)
    if shared is not None:
        rows["coefficients"] = shared[:shown]
    figure = Figure(figsize=(1.1 * shown + 1.0, 1.25 * (len(rows) + 1)), layout="constrained")
    grid = figure.subplots(len(rows) + 1, shown, squeeze=False)
    for j in range(shown):
        show_image(grid[0][j], _average_image(sample, j))
        grid[0][j].set_title(plain(classes[j], 12), size=9)
    for row, (name, maps) in enumerate(rows.items(), start=1):
        # Shared coefficients all near their start value would be one colour: colour the departure from the mean.
        centre = float(maps.mean()) if name == "coefficients" else 0.0
        reach = max(1e-6, float(np.abs(maps - centre).max()))
        for column, values in enumerate(maps):
            picture = grid[row][column].imshow(values, cmap="RdBu", vmin=centre - reach, vmax=centre + reach)
            bare(grid[row][column])
        bar = figure.colorbar(picture, ax=list(grid[row]), shrink=0.8, pad=0.01)
        bar.ax.tick_params(labelsize=7)
        bar.ax.ticklabel_format(axis="y", useOffset=False)
        grid[row][0].set_ylabel(name, size=8)
    if shown < len(network.classes):
        figure.suptitle(f"the first {shown} of {len(network.classes)} classes", size=9)
    return figure


def _support_maps(network: Network, sample: Batch) -> NDArray[np.float32]:
    """(J, rows, columns): the signed share of each place in the evidence for each class.

    The evidence is the logit of the class's activation, which decides the answer of every network and does not level
    off: for squashed vectors it is twice the logarithm of their length before the squash. Shares are gradient times
    input, by way of poses and activations of the primary capsules.
    """
    with torch.no_grad():
        primary = network.primary_capsules(sample.images)
    poses, activations = (tensor.detach().requires_grad_() for tensor in (primary.poses, primary.activations))
    evidence = network.route(Capsules(poses, activations, primary.totals)).activations.logit(eps=1e-6)  # (B, J)
    maps = []
    for j in range(min(SHOWN_CLASSES, len(network.classes))):
        members = (sample.labels == j).any(1)
        total = evidence[members, j].sum()
        by_pose, by_activation = torch.autograd.grad(
            total, [poses, activations], retain_graph=True, allow_unused=True, materialize_grads=True
        )
        share = (by_pose * poses).sum(-1).detach() + (by_activation * activations).detach()  # (B, I)
        maps.append((share.sum(0) / members.sum().clamp_min(1)).view(network.map_shape).sum(-1))
    return torch.stack(maps).cpu().numpy()


def _coefficient_maps(network: Network) -> NDArray[np.float32] | None:
    """(J, rows, columns), or None unless one capsule layer has coefficients of its own."""
    shared = [module.coefficients for module in network.modules() if isinstance(module, SharedRouting)]
    if len(shared) != 1 or not isinstance(shared[0], Tensor):
        return None
    by_place = shared[0].detach().view(*network.map_shape, -1).mean(2)  # (rows, columns, J)
    return by_place.permute(2, 0, 1).cpu().numpy()


def _average_image(sample: Batch, label: int) -> Tensor:
    members = sample.labels == label  # (B, K)
    apart = sample.parts.shape[:2] == members.shape  # not where images show any number of classes
    chosen = sample.parts[members] if apart else sample.images[members.any(1)]
    return chosen.mean(0) if len(chosen) else torch.zeros_like(sample.images[0])
