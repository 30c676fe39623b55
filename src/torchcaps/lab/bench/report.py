"""The benchmark as a whole: which cases, and what is told of them."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from torchcaps import __version__
from torchcaps.atomic import write_atomically, write_json
from torchcaps.data.pictures import physical_memory
from torchcaps.errors import UserError
from torchcaps.lab.bench import pictures
from torchcaps.lab.bench.cases import REFERENCE, Case, ClassLayerStep, Inference, TrainingStep
from torchcaps.lab.bench.measure import Measurement, check_threads, gemm_rate, measure
from torchcaps.lab.bench.networks import KINDS, NETWORKS
from torchcaps.lab.bench.operations import training_gflop
from torchcaps.lab.results import table
from torchcaps.plots.files import save
from torchcaps.routing.discriminative import DiscriminativeRouting
from torchcaps.routing.registry import ROUTINGS
from torchcaps.training.host import commit, cpu_name, usable_cores

CLASS_COUNTS = (10, 20, 50, 100, 200, 500, 1000)
VOTE_COPIES = 5  # vote-sized tensors that dynamic routing with votes holds at its peak
Row = dict[str, Any]
HEADINGS = {
    "case": "",
    "classes": "classes",
    "milliseconds": "ms",
    "spread_percent": "± %",
    "images_per_second": "images/s",
    "memory_mb": "MB",
    "times_reference": "times the reference",
    "times_reference_kept": "its memory kept",
    "limit_percent": "% of limit",
}


def run_bench(
    *,
    networks: Sequence[str] = ("mnist",),
    kinds: Sequence[str] = KINDS,
    batch_size: int = 128,
    threads: Sequence[int] | None = None,
    rounds: int = 5,
    classes: bool = True,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Measure, print ratios to the reference, and keep the figures as CSV, JSON and pictures in ``out``.

    Args:
        networks: names of :data:`NETWORKS`.
        kinds: routings and models, of :data:`KINDS`.
        batch_size: images in a step.
        threads: each number of threads is measured by itself; by default as many as there are cores.
        rounds: how often each case has its turn.
        classes: whether a class-capsule layer is measured by its number of classes, too.
        out: a folder for the files.
        as_json: print everything as JSON.
    """
    for name, known in (*((name, NETWORKS) for name in networks), *((name, KINDS) for name in kinds)):
        if name not in known:
            raise UserError(f"There is no {name!a} to measure: choose from {', '.join(known)}.")
    counts = [check_threads(count) for count in threads or [usable_cores()]]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before the work, in case it cannot be
    rates = {count: gemm_rate(count) for count in counts}
    rows: list[Row] = []
    for count in counts:
        for network in networks:
            rows += network_rows(network, kinds, batch_size, count, rounds, rates[count])
        if classes:
            rows += class_rows(batch_size, count, rounds)
    summary = {
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "torchcaps": __version__,
        "commit": commit(),
        "batch_size": batch_size,
        "gemm_gflops": {str(count): round(rate, 1) for count, rate in rates.items()},
        "rows": rows,
    }
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        _print(summary)
    if out is not None:
        words = f"{summary['cpu']} {'-'.join(map(str, counts))} threads torch {torch.__version__.partition('+')[0]}"
        _keep(out / slug(f"{words} {' '.join(networks)}"), summary)
        _say(f"Kept in {out}")


def slug(text: str) -> str:
    """A text as part of a file's name.

    >>> slug("AMD EPYC, 2 threads")
    'amd-epyc-2-threads'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def network_rows(
    network: str, kinds: Sequence[str], batch_size: int, threads: int, rounds: int, rate: float
) -> list[Row]:
    """Training and inference of a network, all cases of each in turns; the first two are the reference."""
    common: dict[str, Any] = {"network": network, "batch_size": batch_size, "threads": threads}
    limit = training_gflop(network, batch_size) / rate
    rows = []
    steps: dict[str, Callable[..., Case]] = {"training": TrainingStep, "inference": Inference}
    for what, step in steps.items():
        _say(f"{network}, {threads} thread(s): {what}")
        cases = [step(kind=REFERENCE, keep=keep, **common) for keep in (False, True)]
        cases += [step(kind=kind, **common) for kind in kinds]
        if what == "training" and "l2" in kinds:
            cases += [
                step(kind="l2", **common, **other) for other in ({"alternation": "strict"}, {"optimiser": "muon"})
            ]
        measured = measure(cases, rounds=rounds, say=_say)
        for measurement in measured:
            row = {"network": network, "what": what, **_row(measurement)}
            for name, reference in zip(("times_reference", "times_reference_kept"), measured):
                row[name] = _ratio(reference.median, measurement.median)
            case = measurement.case
            counted = isinstance(case, TrainingStep) and (case.alternation, case.optimiser) == ("fused", "adam")
            if counted and issubclass(ROUTINGS.get(case.kind, object), DiscriminativeRouting):
                row["limit_percent"] = _ratio(100 * limit, measurement.median)
            rows.append(row)
    return rows


def _ratio(one: float, other: float) -> float | None:
    """Rounded; None if either could not be measured."""
    return None if math.isnan(one) or math.isnan(other) else round(one / other, 2)


def class_rows(batch_size: int, threads: int, rounds: int) -> list[Row]:
    """The reference, which holds all votes, dynamic routing without votes, and L2, by number of classes.

    Each case by itself, because the large ones leave no room for others; those that cannot fit into the machine's
    memory are not tried.
    """
    rows = []
    for count in CLASS_COUNTS:
        for kind in (REFERENCE, "dynamic", "l2"):
            case = ClassLayerStep(kind=kind, batch_size=batch_size, threads=threads, classes=count)
            needed = case.state_mb() + (VOTE_COPIES * case.votes_mb() if kind == REFERENCE else 0)
            if needed * 2**20 > 0.9 * (physical_memory() or math.inf):
                _say(f"{case.label}, {count} classes: needs about {needed / 1024:.0f} GB, not tried")
                measurement = Measurement(case, (), needed)
            else:
                _say(f"{case.label}, {count} classes")
                (measurement,) = measure([case], rounds=min(rounds, 3), seconds=0.3, say=lambda line: None)
                if not measurement.seconds:  # it died
                    measurement = Measurement(case, (), needed)
            rows.append({"network": "class layer", "what": "training", **_row(measurement), "classes": count})
    return rows


def _row(measurement: Measurement) -> Row:
    """A measurement; without times if it did not fit into memory, which is then an estimate."""
    case = measurement.case
    row: Row = {"case": case.label, "threads": case.threads, "batch_size": case.batch_size}
    if measurement.seconds:
        row |= {
            "milliseconds": round(1000 * measurement.median, 2),
            "milliseconds_min": round(1000 * min(measurement.seconds), 2),
            "milliseconds_max": round(1000 * max(measurement.seconds), 2),
            "spread_percent": round(100 * measurement.spread, 1),
            "images_per_second": round(measurement.images_per_second, 1),
        }
    if not math.isnan(measurement.memory_mb):  # of a process that died
        row["memory_mb"] = round(measurement.memory_mb, 1)
    return row


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str, int], list[Row]]:
    """Rows that were measured together, by network, what, and threads."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["network"], row["what"], row["threads"]), []).append(row)
    return groups


def _print(summary: dict[str, Any]) -> None:
    console = Console(markup=False, emoji=False)
    console.width = max(console.width, 120)
    rates = ", ".join(f"{rate:g} GFLOP/s with {count} thread(s)" for count, rate in summary["gemm_gflops"].items())
    console.print(
        f"{summary['cpu']}, torch {summary['torch']}, torchcaps {summary['torchcaps']}, batch {summary['batch_size']}; "
        f"matrix products: {rates}. Limit: the operations of a step at that rate.",
        highlight=False,
    )
    for (network, what, threads), rows in _groups(summary["rows"]).items():
        shown = Table(title=f"{network}, {what}, {threads} thread(s)", title_justify="left", box=None)
        names = [name for name in HEADINGS if any(name in row for row in rows)]
        for name in names:
            shown.add_column(HEADINGS[name], justify="left" if name == "case" else "right", no_wrap=True)
        for row in rows:
            shown.add_row(*(str(row.get(name, "–")) for name in names))
        console.print(shown)


def _keep(path: Path, summary: dict[str, Any]) -> None:
    """CSV, JSON and pictures, named by what they were measured on."""
    columns = list(dict.fromkeys(name for row in summary["rows"] for name in row))
    lines = [[row.get(name) for name in columns] for row in summary["rows"]]
    write_atomically(Path(f"{path}.csv"), table(columns, lines))
    write_json(Path(f"{path}.json"), summary)
    for (network, what, threads), rows in _groups(summary["rows"]).items():
        name = f"{path}-{slug(network)}-{threads}"
        if network == "class layer":
            save(pictures.plot_classes(rows), Path(f"{name}.png"))
        elif what == "training":
            save(pictures.plot_steps(rows, network), Path(f"{name}.png"))
