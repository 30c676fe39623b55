"""The benchmark as a whole: which cases, and what is told of them."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from torchcaps.bench.cases import ARCHITECTURES, OTHER_MODELS, Case, ClassLayerStep, Inference, TrainingStep
from torchcaps.bench.measure import Measurement, check_threads, gemm_rate, measure
from torchcaps.bench.operations import training_gflop
from torchcaps.errors import UserError
from torchcaps.routing import ROUTINGS, DiscriminativeRouting
from torchcaps.train.environment import cpu_name

KINDS = (*ROUTINGS, *OTHER_MODELS)
DISCRIMINATIVE = [name for name, each in ROUTINGS.items() if issubclass(each, DiscriminativeRouting)]
CLASS_COUNTS = (10, 20, 50, 100, 200, 500, 1000)
DENSE_COPIES = 5  # vote-sized tensors that dynamic routing with votes holds at its peak


def run_bench(
    *,
    architectures: Sequence[str] = ("mnist",),
    routings: Sequence[str] = KINDS,
    batch_size: int = 128,
    threads: int | None = None,
    rounds: int = 5,
    classes: bool = True,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Measure, print ratios to what everyone writes, and keep the figures as CSV and pictures in ``out``."""
    unknown = [each for each in architectures if each not in ARCHITECTURES]
    if unknown:
        raise UserError(f"Unknown network {unknown[0]}: choose from {', '.join(ARCHITECTURES)}.")
    strange = [each for each in routings if each not in KINDS]
    if strange:
        raise UserError(f"Unknown routing or model {strange[0]}: choose from {', '.join(KINDS)}.")
    threads = check_threads(threads)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before the work, in case it cannot be
    say = _to_stderr
    rate = gemm_rate(threads)
    summary: dict[str, Any] = {
        "cpu": cpu_name(),
        "threads": threads,
        "torch": torch.__version__,
        "batch_size": batch_size,
        "gemm_gflops": round(rate, 1),
        "networks": {},
    }
    measured: list[tuple[str, Measurement]] = []
    for architecture in architectures:
        say(f"{architecture}: training and inference of every routing")
        step = measure(_step_cases(architecture, routings, batch_size, threads), rounds=rounds, say=say)
        inference = measure(_inference_cases(architecture, routings, batch_size, threads), rounds=rounds, say=say)
        measured += [(f"{architecture} training", each) for each in step]
        measured += [(f"{architecture} inference", each) for each in inference]
        summary["networks"][architecture] = _network_summary(architecture, batch_size, rate, step, inference)
    if classes:
        say("class-capsule layer: time and memory by number of classes")
        layer = measure_classes(batch_size, threads, rounds)
        measured += [("class layer", each) for each in layer]
        summary["class_layer"] = [_layer_row(each) for each in layer]
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        _print(summary)
    if out is not None:
        _keep(out, summary, measured)
        say(f"Kept in {out}")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _step_cases(architecture: str, routings: Sequence[str], batch_size: int, threads: int) -> list[Case]:
    def case(routing: str, **more: Any) -> Case:
        return TrainingStep(routing, batch_size, threads, architecture=architecture, **more)

    references = [case("dynamic", ordinary=True, keep=False), case("dynamic", ordinary=True)]
    fast = list(dict.fromkeys(["dynamic", *routings]))  # the ratios need dynamic routing
    strict = [case("l2", alternation="strict")] if "l2" in routings else []
    return [*references, *(case(name) for name in fast), *strict]


def _inference_cases(architecture: str, routings: Sequence[str], batch_size: int, threads: int) -> list[Case]:
    def case(routing: str, **more: Any) -> Case:
        return Inference(routing, batch_size, threads, architecture=architecture, **more)

    references = [case("dynamic", ordinary=True, keep=False), case("dynamic", ordinary=True)]
    return [*references, *(case(name) for name in dict.fromkeys(["dynamic", *routings]))]


def measure_classes(batch_size: int, threads: int, rounds: int) -> list[Measurement]:
    """Dynamic routing with and without votes, and discriminative routing, by number of classes.

    Each case by itself, because the large ones leave no room for others; those that cannot fit into the
    machine's memory are not tried.
    """
    outcomes = []
    available = _memory_mb()
    for count in CLASS_COUNTS:
        for routing, ordinary in (("dynamic", True), ("dynamic", False), ("l2", False)):
            case = ClassLayerStep(routing, batch_size, threads, ordinary=ordinary, keep=not ordinary, classes=count)
            needed = case.state_mb() + (DENSE_COPIES * case.votes_mb() if ordinary else 0)
            if needed > 0.9 * available:
                _to_stderr(f"{case.label}, {count} classes: needs about {needed / 1024:.0f} GB, not tried")
                outcomes.append(Measurement(case, (), needed))
                continue
            _to_stderr(f"{case.label}, {count} classes")
            outcomes += measure([case], rounds=min(rounds, 3), seconds=0.3, say=lambda line: None)
    return outcomes


def _memory_mb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20


def _network_summary(
    architecture: str, batch_size: int, rate: float, step: Sequence[Measurement], inference: Sequence[Measurement]
) -> dict[str, Any]:
    gflop = training_gflop(architecture, batch_size)
    return {
        "training": [_row(each, step) for each in step],
        "inference": [_row(each, inference) for each in inference],
        "gflop_per_step": round(gflop, 1),
        "limit_seconds": round(gflop / rate, 4),
        "share_of_limit_percent": {
            each.case.label: round(100 * gflop / rate / each.median, 1)
            for each in step
            if not each.case.ordinary and each.case.routing in DISCRIMINATIVE
        },
    }


def _row(each: Measurement, among: Sequence[Measurement]) -> dict[str, Any]:
    """A measurement with its ratios to the first, which is what everyone writes, and to our own dynamic routing."""
    reference = among[0]
    dynamic = next(other for other in among if other.case.routing == "dynamic" and not other.case.ordinary)
    return {
        "routing": each.case.label,
        "milliseconds": round(1000 * each.median, 2),
        "spread_percent": round(100 * each.spread, 1),
        "images_per_second": round(each.images_per_second, 1),
        "memory_mb": round(each.memory_mb, 1),
        "speed_ratio": round(reference.median / each.median, 2),
        "speed_ratio_to_own_dynamic": round(dynamic.median / each.median, 2),
        "memory_ratio": round(each.memory_mb / reference.memory_mb, 3),
    }


def _layer_row(each: Measurement) -> dict[str, Any]:
    assert isinstance(each.case, ClassLayerStep)
    return {
        "routing": each.case.label,
        "classes": each.case.classes,
        "milliseconds": round(1000 * each.median, 2) if each.seconds else None,
        "memory_mb": round(each.memory_mb, 1),
        "measured": bool(each.seconds),
        "memory_by_state": round(each.memory_mb / each.case.state_mb(), 2),
    }


def _print(summary: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, 120)
    console.print(
        f"{summary['cpu']}, {summary['threads']} threads, torch {summary['torch']}, batch {summary['batch_size']}, "
        f"matrix products at {summary['gemm_gflops']:g} GFLOP/s",
        highlight=False,
    )
    for architecture, network in summary["networks"].items():
        for what in ("training", "inference"):
            table = Table(title=f"{architecture}, {what}", title_justify="left", box=None)
            for heading in ("routing", "ms", "± %", "images/s", "MB", "times as fast", "as our dynamic", "memory"):
                table.add_column(heading, justify="left" if heading == "routing" else "right", no_wrap=True)
            for row in network[what]:
                table.add_row(*(str(value) for value in row.values()))
            console.print(table)
        shares = ", ".join(f"{name} {share:g} %" for name, share in network["share_of_limit_percent"].items())
        console.print(
            f"{network['gflop_per_step']:g} GFLOP a training step: {1000 * network['limit_seconds']:.0f} ms at that "
            f"rate. Share of this limit reached: {shares}",
            highlight=False,
        )
    if "class_layer" in summary:
        table = Table(title="class-capsule layer, training step", title_justify="left", box=None)
        for heading in ("routing", "classes", "ms", "MB", "memory / (weights, gradients, Adam)"):
            table.add_column(heading, justify="left" if heading == "routing" else "right")
        for row in summary["class_layer"]:
            memory = f"{row['memory_mb']:.0f}" if row["measured"] else f"about {row['memory_mb']:.0f}"
            time = f"{row['milliseconds']:g}" if row["measured"] else "does not fit"
            table.add_row(row["routing"], str(row["classes"]), time, memory, f"{row['memory_by_state']:g}")
        console.print(table)


def _keep(out: Path, summary: dict[str, Any], measured: Sequence[tuple[str, Measurement]]) -> None:
    """CSV, JSON and pictures, named by what they were measured on."""
    machine = re.sub(r"[^a-z0-9.]+", "-", f"{summary['cpu']} {summary['threads']} threads".lower()).strip("-")
    name = f"{machine}-torch-{summary['torch'].partition('+')[0]}-{'-'.join(summary['networks'])}"
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["what", "routing", "classes", "batch_size", "seconds_median", "seconds_min", "seconds_max", "memory_mb"]
        )
        for what, each in measured:
            classes = each.case.classes if isinstance(each.case, ClassLayerStep) else 10
            times = [each.median, min(each.seconds), max(each.seconds)] if each.seconds else [""] * 3
            writer.writerow([what, each.case.label, classes, each.case.batch_size, *times, round(each.memory_mb, 1)])
    (out / f"{name}.json").write_text(json.dumps(summary, indent=2) + "\n")
    for architecture, network in summary["networks"].items():
        plot_steps(network["training"], architecture).savefig(out / f"{name}-{architecture}-steps.png", dpi=120)
    if "class_layer" in summary:
        plot_classes(summary["class_layer"]).savefig(out / f"{name}-classes.png", dpi=120)


def plot_steps(rows: Sequence[dict[str, Any]], architecture: str) -> Figure:
    """Time of 100 training steps by routing, as in the paper's runtime figure."""
    figure = Figure(figsize=(8, 0.4 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    names = [row["routing"] for row in rows]
    seconds = [row["milliseconds"] / 10 for row in rows]
    bars = axes.barh(names, seconds, color=["C7" if "ordinary" in name else "C0" for name in names])
    axes.bar_label(bars, [f"{value:.1f} s" for value in seconds], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(seconds))
    axes.set_xlabel(f"seconds for 100 training steps, {architecture} network")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_classes(rows: Sequence[dict[str, Any]]) -> Figure:
    """Time and memory of a class-capsule layer's training step against the number of classes."""
    names = {"dynamic, ordinary": "dynamic with votes", "dynamic": "dynamic without votes", "l2": "discriminative (L2)"}
    figure = Figure(figsize=(10, 4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    for color, (label, name) in zip(("C7", "C1", "C0"), names.items()):
        own = [row for row in rows if row["routing"] == label]
        done = [row for row in own if row["measured"]]
        classes = [row["classes"] for row in done]
        time.plot(classes, [row["milliseconds"] / 1000 for row in done], marker="o", label=name, color=color)
        memory.plot(classes, [row["memory_mb"] / 1024 for row in done], marker="o", label=name, color=color)
        missing = [row for row in own if not row["measured"]]
        if missing:
            memory.plot(
                [row["classes"] for row in missing],
                [row["memory_mb"] / 1024 for row in missing],
                marker="x",
                linestyle="none",
                color=color,
                label=f"{name}: does not fit (estimate)",
            )
    for axes, label in ((time, "seconds a training step"), (memory, "peak memory, GB")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(CLASS_COUNTS, [str(count) for count in CLASS_COUNTS])
        axes.minorticks_off()
        axes.set_xlabel("classes")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    memory.legend(frameon=False, loc="upper left", fontsize=8)
    return figure
