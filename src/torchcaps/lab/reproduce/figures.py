"""Numbers and pictures of finished runs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

import torchcaps.plots  # noqa: F401  (first: it decides which settings matplotlib reads)  # isort: skip
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import stdtrit  # scipy.stats takes a second to import

from torchcaps.lab.reproduce.paper import METHODS, Benchmark
from torchcaps.lab.results import Curve, Results, RunRow

COLOURS = {"dr": "C7", "l2": "C0", "l1": "C1", "l2-fc": "C9", "l1-fc": "C3", "uniform": "C2", "uniform-fc": "C2"}


@dataclass(frozen=True)
class Column:
    """All seeds of a method on a benchmark that are done."""

    benchmark: Benchmark
    method: str
    runs: tuple[RunRow, ...]
    curves: tuple[Curve, ...]

    @property
    def title(self) -> str:
        return METHODS[self.method].title

    @property
    def errors(self) -> dict[int, float]:
        """Test error in percent by seed."""
        return {run.seed: run.test_error_percent for run in self.runs}

    @property
    def mean(self) -> float:
        return statistics.fmean(self.errors.values())

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds, if there are several."""
        return statistics.stdev(self.errors.values()) if len(self.runs) > 1 else None

    @property
    def mean_of_views(self) -> float | None:
        """The mean error with several views averaged, if all runs have it."""
        errors = [run.views_error_percent for run in self.runs if run.views_error_percent is not None]
        return statistics.fmean(errors) if len(errors) == len(self.runs) else None

    @property
    def images_seen(self) -> int:
        """Of the shortest run."""
        return min(run.images_seen for run in self.runs)


Columns = Mapping[str, Column]


def columns(results: Results, benchmark: Benchmark) -> dict[str, Column]:
    """Those that have at least one finished run, by method, in the paper's order."""
    found = {}
    for method in benchmark.published:
        own = [row for row in results.rows.values() if row.run.startswith(f"{benchmark.data}/{method}/")]
        if own:
            runs = tuple(sorted(own, key=lambda row: row.seed))
            found[method] = Column(benchmark, method, runs, tuple(results.curves.get(run.key, []) for run in runs))
    return found


def timed(found: Columns) -> dict[str, Column]:
    """The runs whose seconds can be compared: those of the code, processor and threads that most runs share."""
    if not found:
        return {}
    [(commonest, _)] = Counter(_speed(run) for column in found.values() for run in column.runs).most_common(1)
    kept = {}
    for method, column in found.items():
        pairs = [pair for pair in zip(column.runs, column.curves) if _speed(pair[0]) == commonest]
        if pairs:
            kept[method] = replace(
                column, runs=tuple(run for run, _ in pairs), curves=tuple(curve for _, curve in pairs)
            )
    return kept


def _speed(run: RunRow) -> tuple[object, ...]:
    """What decides how long a step takes, but for the method."""
    return run.commit, run.processor, run.threads, run.processes


@dataclass(frozen=True)
class Comparison:
    """By how much one method's error is above another's, in points, over the seeds that both have."""

    method: Column
    reference: Column

    @property
    def seeds(self) -> list[int]:
        return sorted(self.method.errors.keys() & self.reference.errors.keys())

    @property
    def differences(self) -> list[float]:
        return [self.method.errors[seed] - self.reference.errors[seed] for seed in self.seeds]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def published(self) -> float | None:
        """The same difference in the paper, if it has both methods."""
        errors = self.method.benchmark.published
        ours, theirs = errors[self.method.method], errors[self.reference.method]
        return None if ours is None or theirs is None else ours - theirs

    @property
    def interval(self) -> float:
        """Half the 95 % interval of the difference.

        Over seeds by Student's t, if there are several. Else, and at least, that of counting mistakes on so many
        test images, as if the two networks made them independently: they do not, which makes it too wide, and
        another seed would give another network, which makes it too narrow.
        """
        if len(self.seeds) > 1:
            deviation = statistics.stdev(self.differences) / math.sqrt(len(self.seeds))
            over_seeds = float(stdtrit(len(self.seeds) - 1, 0.975)) * deviation
        else:
            over_seeds = 0.0
        return max(over_seeds, self._counting_interval())

    def _counting_interval(self) -> float:
        variance = 0.0
        for column in (self.method, self.reference):
            share = statistics.fmean(column.errors[seed] for seed in self.seeds) / 100
            variance += share * (1 - share) / (column.runs[0].test_images * len(self.seeds))
        return 1.96 * 100 * math.sqrt(variance)

    @property
    def verdict(self) -> str:
        if abs(self.mean) <= self.interval:
            return "no difference can be seen"
        way = "worse" if self.mean > 0 else "better"
        return f"{way} in one run, which decides nothing" if len(self.seeds) == 1 else way


def first_reached(curve: Curve, error: float) -> tuple[float, float] | None:
    """Step and training seconds of the first evaluation at or below this error."""
    return next(((step, seconds) for step, seconds, reached in _evaluations(curve) if reached <= error), None)


def _evaluations(curve: Curve) -> list[tuple[float, float, float]]:
    """(step, seconds, error) of every evaluation."""
    return [
        (row["step"] or 0.0, row["seconds"] or 0.0, row["evaluation_error"])
        for row in curve
        if row["evaluation_error"] is not None
    ]


def convergence(benchmark: Benchmark, found: Columns) -> Figure:
    """Evaluation error against iterations, as in the paper, and against seconds of training."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for axes, shown, place in ((by_step, found, 0), (by_time, timed(found), 1)):
        for method, column in shown.items():
            curves = [evaluations for curve in column.curves if (evaluations := _evaluations(curve))]
            if not curves:
                continue
            length = min(map(len, curves))
            points = np.array([curve[:length] for curve in curves])  # (seeds, evaluations, 3)
            settings = column.runs[0].settings
            on_fewer = bool(settings.get("run.evaluation_images") or settings.get("evaluation_images"))  # but the last
            label = f"{column.title} (n = {len(curves)})"
            _band(axes, np.median(points[:, :, place], axis=0), points[:, :, 2], method, label, apart=on_fewer)
    for axes, label in ((by_step, "iterations"), (by_time, "seconds of training")):
        axes.set_xlabel(label)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(which="minor", labelsize=7)
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    by_step.set_ylabel("evaluation error, %")
    by_step.legend(frameon=False)
    figure.suptitle(benchmark.title)
    return figure


def _band(axes: Axes, places: np.ndarray, errors: np.ndarray, method: str, label: str, *, apart: bool) -> None:
    """A curve (seeds, evaluations) with the range of its seeds; with ``apart`` its last point is a mark of its own."""
    colour, line = COLOURS[method], "--" if method.startswith("uniform") else "-"
    end = -1 if apart else None
    axes.plot(places[:end], errors.mean(0)[:end], label=label, marker=".", color=colour, linestyle=line)
    if len(errors) > 1:
        low, high = errors.min(0)[:end], errors.max(0)[:end]
        axes.fill_between(places[:end], low, high, color=colour, alpha=0.15, linewidth=0)
    if apart:
        axes.plot(places[-1], errors.mean(0)[-1], marker="D", markersize=5, color=colour, linestyle="none")


def bars(ours: Mapping[str, float], published: Mapping[str, float]) -> Figure:
    """Seconds per 100 steps of each method relative to DR, ours beside the paper's."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    methods = list(ours)
    places = np.arange(len(methods))
    own = axes.bar(places - 0.2, [seconds / ours["dr"] for seconds in ours.values()], 0.38, label="measured")
    axes.bar_label(own, [f"{seconds:.1f} s" for seconds in ours.values()], padding=2, size=8)
    known = [method for method in methods if method in published]
    theirs = axes.bar(
        [methods.index(method) + 0.2 for method in known],
        [published[method] / published["dr"] for method in known],
        0.38,
        color="C7",
        label="paper",
    )
    axes.bar_label(theirs, [f"{published[method]:.1f} s" for method in known], padding=2, size=8)
    axes.set_xticks(places, [METHODS[method].title for method in methods])
    axes.set_ylabel("time per 100 steps, DR = 1")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
