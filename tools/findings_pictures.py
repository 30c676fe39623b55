"""Pictures and tables of docs/findings.md, from ``reproductions/findings``. Run it from anywhere."""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import t

from torchcaps.lab.results import Results
from torchcaps.plots.files import save

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "reproductions/findings"
IMAGES = ROOT / "docs/images"
SETS = {
    "10": "labels-10",
    "100": "labels-100",
    "1,000": "labels-1000",
    "1,000, 20 % random": "noise-20",
    "1,000, 40 % random": "noise-40",
}
"""Labelled images of each class, as the page and as the runs call them."""
METHODS = {
    "uniform": "uniform",
    "l2": "ascended, γ = 0.1",
    "l2-strong": "ascended, γ = 10",
    "learned": "back-propagated",
    "dynamic": "dynamic routing",
}
"""Coefficients of the class capsules, as the runs and as the pictures call them."""
WAYS = (
    "nothing",
    "ascent, the paper's difference",
    "ascent, balanced",
    "coefficients by back-propagation",
    "class weights by back-propagation",
    "all weights by back-propagation",
)
"""What is moved, and by what, in the order of tables and pictures."""
BASELINE = "uniform"
TEST_IMAGES = 10_000


def interval(errors: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean, by Student's t."""
    if len(errors) < 2:
        return math.nan
    return float(t.ppf(0.975, len(errors) - 1)) * statistics.stdev(errors) / math.sqrt(len(errors))


def told(errors: Sequence[float]) -> str:
    """Mean ± interval."""
    mean = statistics.mean(errors)
    return f"{mean:.2f} (n = 1)" if len(errors) == 1 else f"{mean:.2f} ± {interval(errors):.2f}"


def apart(mine: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, float]:
    """The mean difference over the seeds that both have; its interval is never less than that of counting mistakes."""
    seeds = mine.keys() & other.keys()
    differences = [mine[seed] - other[seed] for seed in seeds]
    shares = [errors[seed] / 100 for errors in (mine, other) for seed in seeds]
    counting = 196 * math.sqrt(sum(share * (1 - share) for share in shares) / TEST_IMAGES) / len(seeds)
    return statistics.mean(differences), max(counting, interval(differences))


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return sorted(csv.DictReader(file), key=lambda row: WAYS.index(row["way"]))


def by(rows: Sequence[Mapping[str, str]], *columns: str) -> dict[tuple[str, ...], list[float]]:
    """Test errors, by the values of some columns."""
    groups: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[column] for column in columns)].append(float(row["test_error_percent"]))
    return groups


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in (header, ["---", *["---:"] * (len(header) - 1)], *rows):
        print("|", " | ".join(row), "|")
    print()


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def draw_points(
    axes: Axes, lines: Mapping[str, Sequence[tuple[float, float]]], first: int = 1, style: str = "-"
) -> None:
    """Means with their intervals, side by side so that none is hidden. ``first`` is the number of the first colour."""
    for number, (name, points) in enumerate(lines.items()):
        shift = 0.06 * (number - (len(lines) - 1) / 2)
        axes.errorbar(
            [place + shift for place in range(len(points))],
            [mean for mean, _ in points],
            [half for _, half in points],
            marker="o",
            markersize=4,
            linewidth=1.2,
            linestyle=style,
            capsize=3,
            label=name,
            color=f"C{number + first}",
        )
    tidy(axes)


def mean_of(errors: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(errors), interval(errors)


def draw_frozen(rows: Sequence[Mapping[str, str]]) -> Figure:
    """The error of each way, a point a seed."""
    groups = by(rows, "way")
    figure = Figure(figsize=(7, 0.45 * len(groups) + 0.9), layout="constrained")
    axes = figure.subplots()
    for place, errors in enumerate(groups.values()):
        axes.barh(place, statistics.mean(errors), color="C0", alpha=0.35, xerr=interval(errors), capsize=3)
        axes.plot(errors, [place] * len(errors), "k.")
    axes.set_yticks(range(len(groups)), [way for (way,) in groups])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("test error, %")
    tidy(axes)
    print_table(["moved", "test error, %"], [[way, told(errors)] for (way,), errors in groups.items()])
    return figure


def draw_adapted(rows: Sequence[Mapping[str, str]]) -> Figure:
    """For each change of the images, the error by the number of labelled ones."""
    groups = by(rows, "images", "way", "labelled")
    changes = [change for change in dict.fromkeys(row["images"] for row in rows) if change != "as it is"]
    ways = WAYS[1:]
    counts = sorted({row["labelled"] for row in rows} - {"0"}, key=int)
    figure = Figure(figsize=(3.6 * len(changes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(changes), squeeze=False)[0]
    table = []
    for axes, change in zip(panels, changes):
        (before,) = groups[change, "nothing", "0"]
        axes.axhline(before, color="0.6", linestyle="--", label="not adapted")
        draw_points(axes, {way: [mean_of(groups[change, way, count]) for count in counts] for way in ways})
        axes.set_xticks(range(len(counts)), [f"{int(count):,}" for count in counts])
        axes.set_xlim(-0.4, len(counts) - 0.6)
        axes.set_ylim(bottom=0)
        axes.set_title(change, size=10)
        axes.set_xlabel("labelled images")
        table.append([change, "nothing", *[f"{before:.2f}"] * len(counts)])
        table += [["", way, *(told(groups[change, way, count]) for count in counts)] for way in ways]
    panels[0].set_ylabel("test error, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    print_table(["images", "moved", *(f"{int(count):,} labelled" for count in counts)], table)
    return figure


def draw_labels(results: Results) -> Figure:
    """The error of every method, and its difference from uniform coefficients."""
    errors: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in results.rows.values():
        errors[row.run.split("/")[0], row.method][row.seed] = row.test_error_percent
    sets = {name: key for name, key in SETS.items() if (key, BASELINE) in errors}
    levels = {
        name: [mean_of([*errors[key, method].values()]) for key in sets.values()] for method, name in METHODS.items()
    }
    differences = {
        name: [apart(errors[key, method], errors[key, BASELINE]) for key in sets.values()]
        for method, name in METHODS.items()
        if method != BASELINE
    }
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_points(left, levels, first=0, style="")
    left.set_ylabel("test error, %")
    draw_points(right, differences, style="")
    right.axhline(0, color="0.6", linestyle="--")
    right.set_ylabel(f"points against {METHODS[BASELINE]} coefficients")
    for axes in (left, right):
        axes.set_xticks(range(len(sets)), [name.replace(", ", "\n") for name in sets])
        axes.set_xlabel("labelled images of each class")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    counts = {len(errors[key, method]) for key in sets.values() for method in METHODS}
    print(f"seeds: {sorted(counts)}")
    rows = [[name, *(f"{mean:.2f} ± {half:.2f}" for mean, half in points)] for name, points in levels.items()]
    rows += [
        [f"{name}, against {METHODS[BASELINE]}", *(f"{mean:+.2f} ± {half:.2f}" for mean, half in points)]
        for name, points in differences.items()
    ]
    print_table(["labelled images of each class", *sets], rows)
    return figure


if __name__ == "__main__":
    save(draw_frozen(read("frozen.csv")), IMAGES / "findings-frozen.png")
    save(draw_adapted(read("adapt.csv")), IMAGES / "findings-adapted.png")
    save(draw_labels(Results.read(RESULTS)), IMAGES / "findings-labels.png")
