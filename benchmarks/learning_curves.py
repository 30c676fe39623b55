"""Does the fast path learn as the ordinary one does, and fused Algorithm 1 as the strict one?

Trains the paper's MNIST network from the same seed in the three ways, writes ``results/learning-curves.csv`` and a
picture beside it. Run from anywhere: ``python benchmarks/learning_curves.py [STEPS] [THREADS]``.
"""

from __future__ import annotations

import csv
import multiprocessing
import sys
import time
from pathlib import Path

import torch
from lightning_fabric import Fabric
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from torchcaps.bench.cases import Case, TrainingStep
from torchcaps.evaluate import evaluate
from torchcaps.train import TrainOptions
from torchcaps.train.algorithm import AlternatingTrainer
from torchcaps.train.plan import Plan

EVERY = 10
TEST_IMAGES = 2000
RESULTS = Path(__file__).parent / "results"
Row = tuple[str, int, float, float, float]


def train(case: Case, steps: int) -> list[Row]:
    """(case, step, training seconds, loss, test error) every few steps."""
    case.set_up()
    assert isinstance(case, TrainingStep)
    options = TrainOptions(data="mnist", steps=steps, alternation=case.alternation, test_images=TEST_IMAGES)
    plan = Plan.of(options)
    fabric = Fabric(accelerator="cpu", devices=1)
    trainer = AlternatingTrainer(fabric, plan.build_network(), options, steps)
    batches, seconds, rows = plan.batches(), 0.0, []
    for step in range(steps):
        started = time.perf_counter()
        loss = float(trainer.step(batches.at(step).on("cpu"), step)[0])
        seconds += time.perf_counter() - started
        if (step + 1) % EVERY == 0:
            network = trainer.network.eval() if case.ordinary else trainer.network.folded()
            error = evaluate(network, plan.data.test, fabric=fabric, limit=TEST_IMAGES).error_percent
            trainer.network.train()
            rows.append((case.label, step + 1, seconds, loss, error))
            print(*rows[-1], flush=True)
    return rows


def main() -> None:
    steps, threads = (int(given) for given in [*sys.argv[1:], "50", "2"][:2])
    cases = [
        TrainingStep("l2", 128, threads),
        TrainingStep("l2", 128, threads, alternation="strict"),
        TrainingStep("l2", 128, threads, ordinary=True),
    ]
    rows: list[Row] = []
    for case in cases:  # in a process each, because the ordinary path replaces functions
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows += pool.apply(train, (case, steps))
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "learning-curves.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "step", "seconds", "loss", "test_error_percent"])
        writer.writerows(rows)
    draw(rows)


def draw(rows: list[Row]) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for label in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == label]
        style = "--" if "ordinary" in label else "-"
        by_step.plot([row[1] for row in own], [row[4] for row in own], style, marker=".", label=label)
        by_time.plot([row[2] for row in own], [row[4] for row in own], style, marker=".", label=label)
    by_step.set_xlabel("step")
    by_time.set_xlabel("seconds of training")
    by_step.set_ylabel(f"error on {TEST_IMAGES} test images, %")
    by_time.set_xscale("log")
    for axes in (by_step, by_time):
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    by_step.set_yticks([10, 20, 40])
    by_time.set_xticks([2, 5, 10, 20, 50, 100])
    by_step.legend(frameon=False)
    figure.savefig(RESULTS / "learning-curves.png", dpi=120)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
