"""Draw the pictures of docs/hyperparameters.md anew from ``reproductions/search``. Run it from anywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from torchcaps.lab.results import Results

ROOT = Path(__file__).parents[1]
ROUTING, BATCH = "search-routing", "search-batch"
SHOWN = ("gamma0.01", "gamma0.1", "gamma1", "gamma10", "projected-balanced-gamma1", "ratio-gamma1", "adam1e-3")


def draw_errors(results: Results) -> Figure:
    """Validation error by setting of the routing, with the range of the uniform seeds behind it."""
    uniform = [
        row.validation_error_percent for key, row in results.rows.items() if key[0] == BATCH and row.method == "uniform"
    ]
    routing = [row for key, row in results.rows.items() if key[0] == ROUTING]
    figure = Figure(figsize=(8, 0.28 * len(routing) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(min(uniform), max(uniform), color="C2", alpha=0.25, label=f"uniform, {len(uniform)} seeds")
    axes.plot([row.validation_error_percent for row in routing], [row.method for row in routing], "o")
    axes.invert_yaxis()
    axes.set_xlabel("validation error after 32,000 images, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_coefficients(results: Results) -> Figure:
    """Spread, extremes and share of negative coefficients during training."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    spread, extremes, negative = figure.subplots(1, 3)
    for number, name in enumerate(SHOWN):
        curve = results.curves[ROUTING, f"fashion-mnist/{name}/seed-0"]
        column = {key: np.array([row[key] for row in curve], dtype=float) for key in curve[0]}
        steps, color = column["step"], f"C{number}"
        spread.plot(steps, column["coefficient_std"], label=name, color=color)
        extremes.plot(steps, np.stack([column["coefficient_min"], column["coefficient_max"]], axis=1), color=color)
        negative.plot(steps, 100 * column["coefficient_negative"], color=color)
    spread.set_yscale("log")
    extremes.set_yscale("symlog", linthresh=1)
    titles = ("standard deviation", "least and greatest", "negative, %")
    for axes, title in zip((spread, extremes, negative), titles):
        axes.set_title(title, size=10)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*spread.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    recorded = Results.read(ROOT / "reproductions/search")
    draw_errors(recorded).savefig(ROOT / "docs/images/search-errors.png", dpi=120)
    draw_coefficients(recorded).savefig(ROOT / "docs/images/search-coefficients.png", dpi=120)
