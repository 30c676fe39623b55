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
METHODS = {
    "l2": "ascended, γ = 0.1",
    "l2-strong": "ascended, γ = 10",
    "uniform": "uniform",
    "learned": "back-propagated",
    "dynamic": "dynamic routing",
}
"""Coefficients of the class capsules, as the runs and as the pictures call them."""
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


def told_apart(mine: Mapping[int, float], other: Mapping[int, float]) -> str:
    """The mean difference over the seeds that both have; its interval is never less than that of counting mistakes."""
    seeds = mine.keys() & other.keys()
    differences = [mine[seed] - other[seed] for seed in seeds]
    shares = [errors[seed] / 100 for errors in (mine, other) for seed in seeds]
    counting = 196 * math.sqrt(sum(share * (1 - share) for share in shares) / TEST_IMAGES) / len(seeds)
    return f"{statistics.mean(differences):+.2f} ± {max(counting, interval(differences)):.2f}"


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


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


def draw_lines(axes: Axes, lines: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """The mean of each group of errors with its interval, a line for each name, side by side so that none is hidden."""
    for number, (name, groups) in enumerate(lines.items()):
        shift = 0.06 * (number - (len(lines) - 1) / 2)
        axes.errorbar(
            [place + shift for place in range(len(groups))],
            [statistics.mean(errors) for errors in groups],
            [interval(errors) for errors in groups],
            marker="o",
            markersize=4,
            linewidth=1.2,
            capsize=3,
            label=name,
        )
    tidy(axes)


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
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "nothing"]
    counts = sorted({row["labelled"] for row in rows} - {"0"}, key=int)
    figure = Figure(figsize=(3.6 * len(changes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(changes), squeeze=False)[0]
    table = []
    for axes, change in zip(panels, changes):
        (before,) = groups[change, "nothing", "0"]
        axes.axhline(before, color="0.6", linestyle="--", label="not adapted")
        draw_lines(axes, {way: [groups[change, way, count] for count in counts] for way in ways})
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
    """Few labels on the left, wrong labels on the right, a line a method."""
    errors: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in results.rows.values():
        errors[row.run.split("/")[0], row.method][row.seed] = row.test_error_percent
    panels_of = {
        "labelled images of each class": {"10": "labels-10", "100": "labels-100", "1,000": "labels-1000"},
        "labels drawn anew, 1,000 images of each class": {"0 %": "labels-1000", "20 %": "noise-20", "40 %": "noise-40"},
    }
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(1, len(panels_of))
    for axes, (title, sets) in zip(panels, panels_of.items()):
        sets = {name: key for name, key in sets.items() if (key, BASELINE) in errors}
        lines = {name: [[*errors[key, method].values()] for key in sets.values()] for method, name in METHODS.items()}
        draw_lines(axes, lines)
        axes.set_xticks(range(len(sets)), [*sets])
        axes.set_xlabel(title)
        differences = []
        for method, name in METHODS.items():
            if method != BASELINE:
                cells = [told_apart(errors[key, method], errors[key, BASELINE]) for key in sets.values()]
                differences.append([f"{name}, against {METHODS[BASELINE]}", *cells])
        rows = [[name, *map(told, groups)] for name, groups in lines.items()]
        print_table([title, *sets], rows + differences)
    panels[0].set_ylabel("test error, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


if __name__ == "__main__":
    save(draw_frozen(read("frozen.csv")), IMAGES / "findings-frozen.png")
    save(draw_adapted(read("adapt.csv")), IMAGES / "findings-adapted.png")
    save(draw_labels(Results.read(RESULTS)), IMAGES / "findings-labels.png")
