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

from matplotlib.figure import Figure

from torchcaps.lab.results import Results, collect
from torchcaps.models.packing import PRECISIONS
from torchcaps.trained.run import TrainedRun

BITS = dict(zip(PRECISIONS, (32, 16, 8)))


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
    answers_changed: int


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
    sizes.sort(key=lambda size: (size.strength, -size.bits))
    with (arguments.out / "sizes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Size.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(vars(size) for size in sizes)
    drawn(sizes).savefig(arguments.out / "sizes.png", dpi=120)


def measured(folder: Path, data_folder: str | None) -> list[Size]:
    trained = TrainedRun(folder)
    sizes = []
    for precision, bits in BITS.items():
        with tempfile.TemporaryDirectory() as place:
            report = trained.prune(Path(place) / "pruned", precision=precision, data_folder=data_folder)
            size = (Path(place) / "pruned/model.safetensors").stat().st_size
        config = trained.folder.config()
        types = config.model.primary_capsules - report.types_removed
        error, changed = report.after.test_error_percent, report.answers_changed
        strength = config.routing.settings["strength"]
        sizes.append(
            Size(folder.name, strength, types, report.after.parameters, bits, round(size / 1e6, 3), error, changed)
        )
        print(sizes[-1], flush=True)
    return sizes


def drawn(sizes: list[Size]) -> Figure:
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for bits in BITS.values():
        line = sorted((size for size in sizes if size.bits == bits), key=lambda size: size.megabytes)
        places = [(size.megabytes, size.test_error_percent) for size in line]
        axes.plot(*zip(*places), "o-", label=f"{bits} bits")
        for size, place in zip(line, places) if bits == 8 else ():
            axes.annotate(f"{size.types} types", place, (3, 6), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", xlabel="size of the file, MB", ylabel="test error, %", ylim=(0, None))
    ticks = [1, 2, 4, 8, 16, 32]
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(title="weights")
    return figure


if __name__ == "__main__":
    main()
