"""What is discriminative routing worth? Experiments where ascended coefficients should help if they help at all.

Run: ``python tools/findings.py EXPERIMENT OUT [--runs DIR] [--seeds N] [--data-dir DIR] [--network RUN]``.

- ``labels``: few labelled images of Fashion-MNIST, ``noise``: wrong labels. Ordinary runs in ``--runs``; those that are
  finished are not trained again. OUT gets ``results.csv`` and ``curves.csv.gz``.
- ``frozen``: weights at random, what can coefficients alone learn? OUT gets ``frozen.csv``.
- ``adapt``: a trained MNIST network (``--network``) meets images that are turned, moved or noisy. OUT gets
  ``adapt.csv``.
"""

from __future__ import annotations

import argparse
import copy
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcaps import CapsuleNetwork, L2Routing, RoutingAscent
from torchcaps.ascent import Balanced, Difference, FixedNorm
from torchcaps.data.augmentation import turn
from torchcaps.data.datasets import load
from torchcaps.functional import Capsules
from torchcaps.lab.results import Results, collect
from torchcaps.ops import keep_memory
from torchcaps.optim import Muon, parameter_groups
from torchcaps.trained.run import TrainedRun
from torchcaps.training.config import TrainingConfig
from torchcaps.training.fit import fit
from torchcaps.training.host import cpu_name

HELD_OUT = 2000
"""Training images on which step sizes are chosen."""
BATCH = 128
GENTLE = {"gamma": 0.1, "decaying_gamma": True, "objective": "balanced", "constraint": "fixed-norm"}
METHODS: dict[str, dict[str, Any]] = {
    "l2": {"routing": "l2", "ascent": GENTLE},
    "l2-strong": {"routing": "l2", "ascent": GENTLE | {"gamma": 10.0}},
    "uniform": {"routing": "uniform"},
    "learned": {"routing": "learned"},
    "dynamic": {"routing": "dynamic"},
}
"""Routing and settings of the ascent. Both keep ‖b_j‖; the second turns the coefficients faster."""
LABELS = {10: 10_000, 100: 20_000, 1000: 40_000}
"""Labelled images of each class: images shown in training."""
NOISE = (0.4, 0.2)
"""Share of the labels that are drawn anew; without any it is the last of LABELS."""
SHOWN_WITH_NOISE = 40_000


def fashion(folder: str | None, per_class: int, noise: float, seed: int, path: Path) -> Path:
    """Some of the training images of each class, with some of their labels drawn anew, and all test images."""
    data = load("fashion-mnist", folder=folder)
    everything = [split.fetch(torch.arange(len(split))) for split in (data.train, data.test)]
    (images, labels), (test_images, test_labels) = [
        (batch.images[:, 0].numpy(), batch.labels[:, 0].numpy()) for batch in everything
    ]
    random = np.random.default_rng(seed)
    chosen = np.concatenate(
        [random.choice(np.flatnonzero(labels == label), per_class, replace=False) for label in range(10)]
    )
    given = np.where(random.random(len(chosen)) < noise, random.integers(0, 10, len(chosen)), labels[chosen])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x_train=images[chosen], y_train=given, x_test=test_images, y_test=test_labels)
    return path


def train(name: str, data: Path, shown: int, method: str, seed: int, runs: Path) -> None:
    """One run, as ``torchcaps train`` makes it; nothing to do if it is finished."""
    folder = runs / name / method / f"seed-{seed}"
    if (folder / "result.json").exists():
        return
    settings = METHODS[method]
    batch_size = 50 if shown <= 10_000 else BATCH
    config = TrainingConfig.from_mapping(
        {
            "data": {"name": f"npz:{data}"},
            "augmentation": {"shift": 2, "flip": "random"},
            "model": {"reconstruction": False},
            "routing": {"name": settings["routing"]},
            "optimiser": {"name": "muon", "schedule": "linear", "warmup": 20},
            "ascent": settings.get("ascent", {}),
            "run": {
                "steps": shown // batch_size,
                "batch_size": batch_size,
                "keep": "last",
                "evaluate_every": shown // batch_size,
                "seed": seed,
                "threads": 1,
                "pictures": False,
                "out": str(folder),
            },
        }
    )
    fit(config, resume=folder if (folder / "config.yaml").exists() else None)


def few_labels(arguments: argparse.Namespace) -> None:
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for per_class, shown in LABELS.items():
            data = arguments.runs / "data" / f"labels-{per_class}-{seed}.npz"
            fashion(arguments.data_dir, per_class, 0.0, seed, data)
            for method in METHODS:
                train(f"labels-{per_class}", data, shown, method, seed, arguments.runs / "labels")
    collected(arguments)


def wrong_labels(arguments: argparse.Namespace) -> None:
    for noise in NOISE:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            data = arguments.runs / "data" / f"noise-{noise}-{seed}.npz"
            fashion(arguments.data_dir, 1000, noise, seed, data)
            for method in METHODS:
                train(f"noise-{round(100 * noise)}", data, SHOWN_WITH_NOISE, method, seed, arguments.runs / "noise")
    collected(arguments)


def collected(arguments: argparse.Namespace) -> None:
    results = Results.read(arguments.out)
    for experiment in ("labels", "noise"):
        found = collect(arguments.runs / experiment, experiment=experiment)
        for key, row in found.rows.items():
            data = Path(row.data).name  # wherever it was
            results.add(row.replace(data=data, settings=row.settings | {"data.name": data}), found.curves[key])
    results.write(arguments.out)


@dataclass(frozen=True)
class Examples:
    """Images, or their primary capsules, and class numbers."""

    inputs: Tensor
    labels: Tensor

    def batches(self, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.labels), generator=random).split(BATCH):
            yield self.inputs[rows], self.labels[rows]

    def part(self, rows: slice) -> Examples:
        return Examples(self.inputs[rows], self.labels[rows])


@torch.no_grad()
def in_capsules(network: CapsuleNetwork, images: Examples) -> Examples:
    """The primary capsules of images, for as long as the convolutions stay as they are."""
    poses = [network.primary_capsules(part).poses for part in images.inputs.split(500)]
    return Examples(torch.cat(poses), images.labels)


def route(network: CapsuleNetwork, poses: Tensor) -> Capsules:
    return network.route(Capsules(poses, torch.linalg.vector_norm(poses, dim=-1), poses))


@torch.no_grad()
def error(network: CapsuleNetwork, capsules: Examples) -> float:
    found = torch.cat([route(network, part).activations.argmax(1) for part in capsules.inputs.split(500)])
    return 100 * (found != capsules.labels).float().mean().item()


def images_of(data: str, folder: str | None) -> tuple[Examples, Examples]:
    """Training and test images in [0, 1]."""
    splits = load(data, folder=folder)
    batches = [split.fetch(torch.arange(len(split))) for split in (splits.train, splits.test)]
    train, test = [Examples(batch.images.float() / 255, batch.labels[:, 0]) for batch in batches]
    return train, test


def ascend(network: CapsuleNetwork, capsules: Examples, rate: float, epochs: int, objective: Any) -> None:
    """Coefficient steps alone: no loss, no back-propagation through the network."""
    ascent = RoutingAscent(network, gamma=rate, objective=objective, constraint=FixedNorm())
    for poses, labels in shuffled(capsules, epochs):
        ascent.step(route(network, poses), labels)


def descend(network: CapsuleNetwork, capsules: Examples, rate: float, epochs: int, moved: Sequence[Tensor]) -> None:
    """Adam on the margin loss, for the coefficients or weights of the class capsules."""
    optimizer = torch.optim.Adam(moved, lr=rate)
    for poses, labels in shuffled(capsules, epochs):
        optimizer.zero_grad()
        network.loss(route(network, poses), labels).backward()
        optimizer.step()


def fine_tune(network: CapsuleNetwork, images: Examples, rate: float, epochs: int) -> None:
    """Everything but the coefficients, from the images on."""
    optimizer = Muon(parameter_groups(network, lr=rate / 10, matrix_lr=rate))
    for pixels, labels in shuffled(images, epochs):
        optimizer.zero_grad()
        network.loss(network(pixels).capsules, labels).backward()
        optimizer.step()


def shuffled(examples: Examples, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        yield from examples.batches(random)


Learn = Callable[[CapsuleNetwork, Examples, float, int], None]


def coefficients(network: CapsuleNetwork) -> Tensor:
    return cast(Tensor, network.layers[0].routing.coefficients)


def by_ascent(objective: Any) -> Learn:
    return lambda network, capsules, rate, epochs: ascend(network, capsules, rate, epochs, objective)


def of_coefficients(network: CapsuleNetwork, capsules: Examples, rate: float, epochs: int) -> None:
    descend(network, capsules, rate, epochs, [coefficients(network).requires_grad_()])


def of_class_weights(network: CapsuleNetwork, capsules: Examples, rate: float, epochs: int) -> None:
    descend(network, capsules, rate, epochs, [cast(Tensor, network.layers[0].weight)])


GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0)
ADAM = (0.001, 0.01, 0.1)
WAYS: dict[str, tuple[Learn, Sequence[float]]] = {
    "ascent, the paper's difference": (by_ascent(Difference()), GAMMAS),
    "ascent, balanced": (by_ascent(Balanced()), GAMMAS),
    "coefficients by back-propagation": (of_coefficients, ADAM),
    "class weights by back-propagation": (of_class_weights, (0.0001, 0.001, 0.01)),
}
"""How the class capsules of fixed primary capsules learn, and the step sizes to choose from."""


def learned(
    network: CapsuleNetwork, learn: Learn, rates: Sequence[float], given: Examples, held_out: Examples, epochs: int
) -> tuple[CapsuleNetwork, float]:
    """The best of the step sizes on held-out capsules or images."""
    tried = []
    for rate in rates:
        taught = copy.deepcopy(network)
        learn(taught, given, rate, epochs)
        capsules = held_out if held_out.inputs.dim() == 3 else in_capsules(taught, held_out)
        tried.append((error(taught, capsules), rate, taught))
    _, rate, best = min(tried, key=lambda one: one[:2])
    return best, rate


def frozen(arguments: argparse.Namespace) -> None:
    train_images, test_images = images_of("fashion-mnist", arguments.data_dir)
    table = Table(arguments.out / "frozen.csv", ["way", "seed"], ["step", "test_error_percent"])
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        torch.manual_seed(seed)
        network = CapsuleNetwork((1, 28, 28), 10, L2Routing(strength=0.0), reconstruction=False)
        order = torch.randperm(len(train_images.labels))[: 10_000 + HELD_OUT]
        shuffled_images = Examples(train_images.inputs[order], train_images.labels[order])
        known, test = in_capsules(network, shuffled_images), in_capsules(network, test_images)
        held_out, given = known.part(slice(HELD_OUT)), known.part(slice(HELD_OUT, None))
        table.add(["nothing", seed], "", error(network, test))
        for way, (learn, rates) in WAYS.items():
            if not table.has(way, seed):
                best, rate = learned(network, learn, rates, given, held_out, epochs=3)
                table.add([way, seed], rate, error(best, test))


def turned(images: Tensor) -> Tensor:
    degrees = torch.full((len(images),), 30.0)
    return turn((255 * images).round().byte(), degrees, torch.ones(len(images))).float() / 255


def moved(images: Tensor) -> Tensor:
    return pad(images, (5, -5, 0, 0))


def noisy(images: Tensor) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + 0.5 * noise).clamp(0, 1)


CHANGES = {"turned by 30°": turned, "moved by 5 pixels": moved, "noise of 0.5": noisy}
GIVEN = {100: 20, 1000: 5}
"""Labelled images of the new kind: times that each is shown."""


def adapt(arguments: argparse.Namespace) -> None:
    train_images, test_images = images_of("mnist", arguments.data_dir)
    network = cast(CapsuleNetwork, TrainedRun(arguments.network).network).requires_grad_()
    ways: dict[str, tuple[Learn, Sequence[float]]] = {
        **WAYS,
        "all weights by back-propagation": (fine_tune, (0.001, 0.01)),
    }
    table = Table(arguments.out / "adapt.csv", ["images", "way", "labelled", "seed"], ["step", "test_error_percent"])
    table.add(["as it is", "nothing", 0, 0], "", error(network, in_capsules(network, test_images)))
    for change, apply in CHANGES.items():
        test = in_capsules(network, Examples(apply(test_images.inputs), test_images.labels))
        table.add([change, "nothing", 0, 0], "", error(network, test))
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            order = torch.randperm(len(train_images.labels), generator=torch.Generator().manual_seed(seed))
            for count, epochs in GIVEN.items():
                rows_of = order[: HELD_OUT // 4 + count]
                images = Examples(apply(train_images.inputs[rows_of]), train_images.labels[rows_of])
                capsules = in_capsules(network, images)
                for way, (learn, rates) in ways.items():
                    if table.has(change, way, count, seed):
                        continue
                    known = images if learn is fine_tune else capsules
                    held_out, given = known.part(slice(HELD_OUT // 4)), known.part(slice(HELD_OUT // 4, None))
                    best, rate = learned(network, learn, rates, given, held_out, epochs)
                    seen = test
                    if learn is fine_tune:
                        seen = in_capsules(best, Examples(apply(test_images.inputs), test_images.labels))
                    table.add([change, way, count, seed], rate, error(best, seen))


class Table:
    """A CSV file that grows row by row, so that what was measured is not measured again."""

    def __init__(self, path: Path, keys: Sequence[str], values: Sequence[str]) -> None:
        self._path = path
        self._there: set[tuple[str, ...]] = set()
        if path.exists():
            with path.open(newline="") as file:
                self._there = {tuple(row[key] for key in keys) for row in csv.DictReader(file)}
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write([*keys, *values, "processor"])

    def has(self, *key: object) -> bool:
        return tuple(map(str, key)) in self._there

    def add(self, key: Sequence[object], step: float | str, error: float) -> None:
        if not self.has(*key):
            self._there.add(tuple(map(str, key)))
            self._write([*key, step, round(error, 2), cpu_name()])
            print(*key, step, round(error, 2), flush=True)

    def _write(self, row: Sequence[object]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)


EXPERIMENTS = {"labels": few_labels, "noise": wrong_labels, "frozen": frozen, "adapt": adapt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/findings"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--data-dir")
    parser.add_argument("--network", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    EXPERIMENTS[arguments.experiment](arguments)


if __name__ == "__main__":
    main()
