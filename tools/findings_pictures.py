"""Tables and pictures of docs/findings.md, from ``reproductions/findings``. Run it from anywhere."""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from scipy.stats import t

from torchcaps.lab.results import Results
from torchcaps.plots.files import save

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "reproductions/findings"
IMAGES = ROOT / "docs/images"


def interval(errors: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean, by Student's t."""
    if len(errors) < 2:
        return math.nan
    return float(t.ppf(0.975, len(errors) - 1)) * statistics.stdev(errors) / math.sqrt(len(errors))


def told(errors: Sequence[float]) -> str:
    """Mean ± interval (n)."""
    mean = statistics.mean(errors)
    return f"{mean:.2f} (n = 1)" if len(errors) == 1 else f"{mean:.2f} ± {interval(errors):.2f} (n = {len(errors)})"


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def by(rows: Sequence[Mapping[str, str]], *columns: str) -> dict[tuple[str, ...], list[float]]:
    """Test errors, by the values of some columns."""
    groups: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[column] for column in columns)].append(float(row["test_error_percent"]))
    return groups


def draw_frozen(rows: Sequence[Mapping[str, str]]) -> Figure:
    """The error of each way, a point a seed."""
    groups = by(rows, "way")
    figure = Figure(figsize=(7, 0.45 * len(groups) + 0.9), layout="constrained")
    axes = figure.subplots()
    for place, ((way,), errors) in enumerate(groups.items()):
        axes.barh(place, statistics.mean(errors), color="C0", alpha=0.35, xerr=interval(errors), capsize=3)
        axes.plot(errors, [place] * len(errors), "k.")
        print(f"| {way} | {told(errors)} |")
    axes.set_yticks(range(len(groups)), [way for (way,) in groups])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("test error, %")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_adapted(rows: Sequence[Mapping[str, str]]) -> Figure:
    """For each change of the images, the error by the number of labelled ones."""
    groups = by(rows, "images", "way", "labelled")
    changes = [change for change in dict.fromkeys(row["images"] for row in rows) if change != "as it is"]
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "nothing"]
    figure = Figure(figsize=(3.6 * len(changes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(changes), squeeze=False)[0]
    for axes, change in zip(panels, changes):
        (before,) = groups[change, "nothing", "0"]
        axes.axhline(before, color="0.6", linestyle="--", label="not adapted")
        counts = sorted({int(row["labelled"]) for row in rows if row["images"] == change} - {0})
        for number, way in enumerate(ways):
            there = [groups[change, way, str(count)] for count in counts]
            shift = 1.06 ** (number - len(ways) / 2)
            axes.errorbar(
                [shift * count for count in counts],
                [statistics.mean(errors) for errors in there],
                [interval(errors) for errors in there],
                marker="o",
                capsize=3,
                label=way,
                color=f"C{number}",
            )
            for count, errors in zip(counts, there):
                print(f"| {change} | {way} | {count} | {told(errors)} |")
        axes.set_xscale("log")
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(change, size=10)
        axes.set_xlabel("labelled images")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("test error, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def print_runs(results: Results) -> None:
    """Few and wrong labels: a row for each experiment and method."""
    groups: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in results.rows.values():
        groups[row.run.split("/")[0], row.method].append(row.test_error_percent)
    for (name, method), errors in groups.items():
        print(f"| {name} | {method} | {told(errors)} |")


if __name__ == "__main__":
    save(draw_frozen(read("frozen.csv")), IMAGES / "findings-frozen.png")
    save(draw_adapted(read("adapt.csv")), IMAGES / "findings-adapted.png")
    if (RESULTS / "results.csv").exists():
        print_runs(Results.read(RESULTS))
