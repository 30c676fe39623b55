"""The search for γ, the start value, the ascent rule, λ and the rest of the `cpu` recipes, on held-out training images.

Trains whatever setting below has not been trained yet, and writes ``reproductions/search/results.csv`` and the pictures
of ``docs/hyperparameters.md``. Run from anywhere: ``python benchmarks/search.py [--ray local]``.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from torchcaps.reproduce.cells import Cell
from torchcaps.reproduce.display import CellDisplay
from torchcaps.reproduce.engine import run_cells
from torchcaps.reproduce.paper import BENCHMARKS
from torchcaps.train import TrainOptions
from torchcaps.train.options import EXECUTION

HERE = Path(__file__).parents[1]
ROOT = HERE / "reproductions/search"
PICTURES = HERE / "docs/images"
Settings = Mapping[str, Mapping[str, Any]]

FASHION = {"data": "fashion-mnist", "reconstruction": False, "validation": 10_000, "checkpoint_every": 100_000}
LONG = {**FASHION, "routing": "uniform", "steps": 375, "evaluate_every": 125}
SHORT = {**FASHION, "shift": 0, "batch_size": 64, "steps": 500, "evaluate_every": 500}
SMALL = {**SHORT, "routing": "uniform", "batch_size": 32, "steps": 1000, "evaluate_every": 1000}
UNIFORM = {**SHORT, "routing": "uniform"}

# About 48,000 images each, with the optimiser's and the augmentation's settings changed one at a time.
OPTIMISER: Settings = {
    "base": LONG,
    "lr2e-3": {**LONG, "learning_rate": 2e-3},
    "b64": {**LONG, "batch_size": 64, "steps": 750},
    "b64-lr2e-3": {**LONG, "batch_size": 64, "steps": 750, "learning_rate": 2e-3},
    "average": {**LONG, "average": 0.99},
    "shift1": {**LONG, "shift": 1},
    "shift0-flip": {**LONG, "shift": 0, "flip": True},
    "std0.02": {**LONG, "weight_std": 0.02},
}

# 32,000 images each, without augmentation.
BATCH: Settings = {
    "uniform": UNIFORM,
    "uniform-b32": SMALL,
    "uniform-b32-lr5e-4": {**SMALL, "learning_rate": 5e-4},
    "uniform-flip": {**UNIFORM, "flip": True},
}

# The same, with L2 unless another routing is named; what is not named is as by default (γ = 0.1, λ = 1e-5, start 1).
ROUTING: Settings = {
    "gamma0.01": {"gamma": 0.01},
    "gamma0.1": {"gamma": 0.1},
    "gamma1": {"gamma": 1.0},
    "gamma10": {"gamma": 10.0},
    "gamma100": {"gamma": 100.0},
    "decaying-gamma1": {"gamma": 1.0, "decaying_gamma": True},
    "balanced-gamma1": {"gamma": 1.0, "balanced": True},
    "projected-balanced-gamma1": {"gamma": 1.0, "projected": True, "balanced": True},
    "projected-balanced-gamma10": {"gamma": 10.0, "projected": True, "balanced": True},
    "ratio-gamma1": {"gamma": 1.0, "objective": "ratio"},
    "ratio-gamma10": {"gamma": 10.0, "objective": "ratio"},
    "adam1e-4": {"gamma": 1e-4, "ascent": "adam"},
    "adam1e-3": {"gamma": 1e-3, "ascent": "adam"},
    "start0.1": {"start": 0.1, "weight_std": 0.1, "gamma": 1e-3},
    "strength1e-3": {"strength": 1e-3},
    "strength1e-2": {"strength": 1e-2},
    "l1-strength1e-3": {"routing": "l1", "strength": 1e-3},
}

# Augmentation, and CIFAR-10's learning rate, on the other data sets: 25,600 images each, uniform coefficients.
MNIST = {**UNIFORM, "data": "mnist", "steps": 400, "evaluate_every": 400}
CIFAR = {**MNIST, "data": "cifar-10", "primary_capsules": 64, "activation": "leaky-relu", "crop": 24}
AUGMENTATION: Settings = {
    "mnist-shift0": MNIST,
    "mnist-shift1": {**MNIST, "shift": 1},
    "cifar-flip": {**CIFAR, "flip": True},
    "cifar-noflip": CIFAR,
    "cifar-lr2e-3": {**CIFAR, "flip": True, "learning_rate": 2e-3},
    "cifar-lr5e-4": {**CIFAR, "flip": True, "learning_rate": 5e-4},
}
SEEDS = {"uniform": 3, "balanced-gamma1": 3}  # to know how much chance there is


def cells() -> Iterator[Cell]:
    routing = {name: {**SHORT, **changed} for name, changed in ROUTING.items()}
    studies = {"optimiser": OPTIMISER, "batch": BATCH, "routing": routing, "augmentation": AUGMENTATION}
    for study, settings in studies.items():
        for name, options in settings.items():
            for seed in range(SEEDS.get(name, 1)):
                chosen = TrainOptions(**{**options, "seed": seed})
                yield Cell(BENCHMARKS[chosen.data], name, seed, chosen, ROOT / study)


def rows(done: list[Cell]) -> Iterator[dict[str, Any]]:
    for cell in done:
        result, last = cell.result(), cell.folder.read_metrics()[-1]
        yield {
            "study": cell.root.name,
            "setting": cell.method,
            "seed": cell.seed,
            "validation_error": result["validation_error_percent"],
            "loss": last["loss"],
            **{name: value for name, value in last.items() if name.startswith("coefficient")},
        }


def draw_errors(table: list[dict[str, Any]]) -> Figure:
    """Validation error by setting of the routing, with the range of the uniform seeds behind it."""
    uniform = [row["validation_error"] for row in table if row["setting"] == "uniform"]
    routing = [row for row in table if row["study"] == "routing"]
    figure = Figure(figsize=(8, 0.28 * len(routing) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(min(uniform), max(uniform), color="C2", alpha=0.25, label=f"uniform, {len(uniform)} seeds")
    errors = [row["validation_error"] for row in routing]
    axes.plot(errors, [row["setting"] for row in routing], "o")
    axes.invert_yaxis()
    axes.set_xlabel("validation error after 32,000 images, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_coefficients(done: list[Cell]) -> Figure:
    """Spread, extremes and share of negative coefficients during training."""
    shown = ["gamma0.01", "gamma0.1", "gamma1", "gamma10", "projected-balanced-gamma1", "ratio-gamma1", "adam1e-3"]
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    spread, extremes, negative = figure.subplots(1, 3)
    for number, name in enumerate(shown):
        cell = next((cell for cell in done if cell.root.name == "routing" and cell.method == name), None)
        if cell is None:
            continue
        metrics = cell.folder.read_metrics()
        steps = np.array([row["step"] for row in metrics], dtype=float)
        column = {
            key: np.array([row[f"coefficient_{key}"] for row in metrics], dtype=float)
            for key in ("std", "min", "max", "negative")
        }
        spread.plot(steps, column["std"], label=name, color=f"C{number}")
        extremes.plot(steps, np.stack([column["min"], column["max"]], axis=1), color=f"C{number}")
        negative.plot(steps, 100 * column["negative"], color=f"C{number}")
    spread.set_yscale("log")
    extremes.set_yscale("symlog", linthresh=1)
    titles = ("standard deviation", "least and greatest", "negative, %")
    for axes, title in zip((spread, extremes, negative), titles):
        axes.set_title(title, size=10)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*spread.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", metavar="ADDRESS", help="spread the runs over a Ray cluster, or 'local'")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads of a run [1]")
    arguments = parser.parse_args()
    work = list(cells())
    execution = {name: arguments.threads if name == "threads" else None for name in EXECUTION}
    console = Console()
    failures = run_cells(work, execution=execution, ray_address=arguments.ray, display=CellDisplay(console, work))
    done = [cell for cell in work if cell.done]
    table = list(rows(done))
    with (ROOT / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    draw_errors(table).savefig(PICTURES / "search-errors.png", dpi=120)
    draw_coefficients(done).savefig(PICTURES / "search-coefficients.png", dpi=120)
    for failure in failures:
        console.print(json.dumps({"failed": failure.cell.name, "reason": failure.reason}))


if __name__ == "__main__":
    main()
