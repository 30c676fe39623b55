"""Runs that look as if they had been trained."""

from torchcaps.lab.reproduce.cells import Cell
from torchcaps.lab.results import Results, collect
from torchcaps.training.folder import RunFolder
from torchcaps.training.result import RunResult


def finish(cell: Cell, error: float, curve: dict[int, float], *, seconds: float = 9.0) -> None:
    """Pretend that a cell was trained, at a tenth of a second a step."""
    folder = RunFolder.create(cell.folder.path, cell.config)
    for step, evaluation in curve.items():
        folder.append_metrics({"step": step, "seconds": step / 10, "evaluation_error": evaluation})
    RunResult(
        data=cell.config.data.name,
        model="capsnet",
        routing=cell.config.routing.name,
        reconstruction=cell.config.model.to_mapping()["reconstruction"],
        seed=cell.seed,
        steps=max(curve),
        epochs=1.0,
        batch_size=cell.config.run.batch_size or 128,
        images_seen=max(curve) * (cell.config.run.batch_size or 128),
        test_error_percent=error,
        test_images=10_000,
        train_images_per_second=100.0,
        evaluate_images_per_second=1000.0,
        parameters=8_000_000,
        peak_memory_mb=900.0,
        train_seconds=max(curve) / 10,
        seconds=seconds,
        threads=1,
        processes=1,
        device="cpu",
        processor="pocket calculator",
        versions={"python": "3", "torch": "2", "torchcaps": "0"},
    ).write(folder.result)


def keep(cells: list[Cell]) -> Results:
    """The results of all cells beside them, as a reproduction keeps them."""
    root = cells[0].root
    results = collect(root, experiment="cpu")
    results.write(root.parent)
    return results
