"""The notebook runs from top to bottom, and is kept with what it printed and drew."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples/paper.ipynb"


def outputs(notebook, kind: str) -> list[str]:
    made = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return [output["data"][kind] for output in made if kind in output.get("data", {})]


def test_it_runs_and_draws(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = len(outputs(notebook, "image/png"))
    assert kept == 6
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert len(outputs(notebook, "image/png")) == kept
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "32 before, 3 after" in text
