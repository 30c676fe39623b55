"""Size against error of networks that pruned themselves, as a table and a picture.

Run: ``python tools/sizes.py OUT RUN ... --data-dir DIR``. Every run is pruned and stored in 32, 16 and 8 bits; the
folder OUT gets ``results.csv`` and ``curves.csv.gz`` of the runs, ``sizes.csv``, and ``sizes.png``.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.lab.results import Results, collect
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.models.packing import PRECISIONS, pack, unpack
from torchcaps.trained.prune import prune
from torchcaps.trained.run import TrainedRun

BITS = dict(zip(PRECISIONS, (32, 16, 8)))
FEWER = (13, 11, 9, 7, 5, 3, 2)
"""Types that are left where the weakest are taken out."""


@dataclass(frozen=True)
class Size:
    """A pruned network in one precision."""

    run: str
    strength: float
    types: int
    numbers: int
    bits: int
    megabytes: float
    test_error_percent: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--data-dir")
    arguments = parser.parse_args()
    results = Results.read(arguments.out)
    for folder in arguments.runs:
        found = collect(folder.parent, experiment=arguments.out.name)
        key = (arguments.out.name, folder.name)
        results.add(found.rows[key], found.curves[key])
    results.write(arguments.out)
    sizes = [size for folder in arguments.runs for size in measured(folder, arguments.data_dir)]
    sizes.sort(key=lambda size: (size.strength, -size.types, -size.bits))
    with (arguments.out / "sizes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Size.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(vars(size) for size in sizes)
    drawn(sizes).savefig(arguments.out / "sizes.png", dpi=120)


def measured(folder: Path, data_folder: str | None) -> list[Size]:
    """A run's network pruned, in every precision; and in 8 bits with only its strongest types, as they are."""
    trained = TrainedRun(folder)
    plan, config = trained.plan(data_folder=data_folder), trained.folder.config()
    whole = prune(trained.network).network

    def size(network: CapsuleNetwork, precision: str) -> Size:
        smaller = network.copy_with(unpack(pack(network.state_dict(), precision)))
        with tempfile.TemporaryDirectory() as place:
            network.save(Path(place) / "model", precision=precision)
            megabytes = round((Path(place) / "model").stat().st_size / 1e6, 3)
        error = round(trained.evaluate(plan, network=smaller).error_percent, 2)
        types, numbers, bits = network.config.primary_capsules, network.numbers(), BITS[precision]
        found = Size(folder.name, config.routing.settings["strength"], types, numbers, bits, megabytes, error)
        print(found, flush=True)
        return found

    counts = [count for count in FEWER if count < whole.config.primary_capsules]
    return [size(whole, precision) for precision in BITS] + [size(strongest(whole, count), "int8") for count in counts]


def strongest(network: CapsuleNetwork, count: int) -> CapsuleNetwork:
    """The network with this many of its types, those with the largest coefficients. Nothing is trained again."""
    smaller = network.copy_with(network.state_dict())
    coefficients = cast(Tensor, smaller.layers[0].routing.coefficients)
    by_type = coefficients.data.view(-1, network.config.primary_capsules, coefficients.shape[1])
    weakest = by_type.square().sum((0, 2)).argsort(descending=True)[count:]
    by_type[:, weakest] = 0
    return prune(smaller).network


def drawn(sizes: list[Size]) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in dict.fromkeys(size.run for size in sizes):
        own = [size for size in sizes if size.run == run]
        types = max(size.types for size in own)
        line = [size for size in own if size.types == types]
        places = [(size.megabytes, size.test_error_percent) for size in line]
        axes.plot(*zip(*places), "o-", label=f"λ = {line[0].strength:g}: {types} of 32 types, in 32, 16 and 8 bits")
        cut = sorted((size for size in own if size.bits == 8), key=lambda size: -size.types)
        places = [(size.megabytes, size.test_error_percent) for size in cut]
        colour = axes.lines[-1].get_color()
        axes.plot(*zip(*places), ".:", color=colour, label="the same in 8 bits, its weakest types left out")
    axes.set(xscale="log", yscale="log", xlabel="size of the file with its decoder, MB", ylabel="test error, %")
    axes.set_xticks(ticks := [1.5, 2, 3, 4, 8, 16], labels=[f"{tick:g}" for tick in ticks])
    axes.set_yticks(ticks := [0.5, 1, 2, 5, 10, 20, 50], labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
