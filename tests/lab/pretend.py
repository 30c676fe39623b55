"""Cells of a reproduction that look as if they had been trained."""

import json

from torchcaps.reproduce.cells import Cell
from torchcaps.train import RunFolder


def finish(cell: Cell, error: float, curve: dict[int, float], *, seconds: float = 9.0) -> None:
    """Pretend that a cell was trained, at a tenth of a second a step."""
    folder = RunFolder.create(cell.folder.path, cell.options)
    cell.write_recipe()
    for step, evaluation in curve.items():
        folder.append_metrics({"step": step, "seconds": step / 10, "evaluation_error": evaluation})
    versions = {"python": "3", "torch": "2", "torchcaps": "0"}
    errors = {"test_error_percent": error, "validation_error_percent": None, "test_images": 10_000}
    work = {"steps": max(curve), "epochs": 1.0, "seconds": seconds}
    machine = {"train_seconds": 8.0, "processes": 1, "threads": 1, "device": "cpu", "versions": versions}
    folder.result.write_text(json.dumps({**errors, **work, **machine, "commit": None}))
