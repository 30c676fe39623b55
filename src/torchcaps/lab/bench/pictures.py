"""Pictures of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torchcaps.plots  # noqa: F401  (first: it decides which settings matplotlib reads)  # isort: skip
from matplotlib.figure import Figure


def plot_steps(rows: Sequence[dict[str, Any]], network: str) -> Figure:
    """Time of 100 training steps by routing, as in the paper's runtime figure."""
    done = [row for row in rows if "milliseconds" in row]
    figure = Figure(figsize=(8, 0.4 * len(done) + 1.2), layout="constrained")
    axes = figure.subplots()
    names = [row["case"] for row in done]
    seconds = [row["milliseconds"] / 10 for row in done]
    bars = axes.barh(names, seconds, color=["C7" if name.startswith("reference") else "C0" for name in names])
    axes.bar_label(bars, [f"{value:.1f} s" for value in seconds], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(seconds, default=1.0))
    axes.set_xlabel(f"seconds for 100 training steps, {network} network")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_classes(rows: Sequence[dict[str, Any]]) -> Figure:
    """Time and memory of a class-capsule layer's training step against the number of classes."""
    names = {
        "reference, memory kept": "dynamic with votes (reference)",
        "dynamic": "dynamic without votes",
        "l2": "discriminative (L2)",
    }
    figure = Figure(figsize=(10, 4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    for color, (case, name) in zip(("C7", "C1", "C0"), names.items()):
        own = [row for row in rows if row["case"] == case]
        done = [row for row in own if "milliseconds" in row]
        classes = [row["classes"] for row in done]
        time.plot(classes, [row["milliseconds"] / 1000 for row in done], marker="o", label=name, color=color)
        memory.plot(classes, [row["memory_mb"] / 1024 for row in done], marker="o", label=name, color=color)
        missing = [row for row in own if "milliseconds" not in row]
        if missing:
            memory.plot(
                [row["classes"] for row in missing],
                [row["memory_mb"] / 1024 for row in missing],
                marker="x",
                linestyle="none",
                color=color,
                label=f"{name}: does not fit (estimate)",
            )
    counts = sorted({row["classes"] for row in rows})
    for axes, label in ((time, "seconds a training step"), (memory, "peak memory, GB")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_xlabel("classes")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    memory.legend(frameon=False, loc="upper left", fontsize=8)
    return figure
