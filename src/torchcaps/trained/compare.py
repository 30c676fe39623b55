"""Several runs beside each other."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchcaps.atomic import write_atomically
from torchcaps.data.files import shown
from torchcaps.errors import UserError
from torchcaps.training.folder import RunFolder
from torchcaps.training.result import RunResult

COLUMNS = ("run", "test error", "validation", "images seen", "parameters", "images/s", "minutes")


@dataclass(frozen=True)
class RunSummary:
    """What a comparison shows of a run; ``result`` is None while it is not finished."""

    name: str
    settings: dict[str, Any]
    metrics: list[dict[str, float | None]]
    result: RunResult | None

    def cells(self) -> tuple[str, ...]:
        """A row for :data:`COLUMNS`."""
        if self.result is None:
            evaluated = [row["evaluation_error"] for row in self.metrics if row["evaluation_error"] is not None]
            last = f"{evaluated[-1]:.2f} % so far" if evaluated else "not yet"
            held_out = self.settings["data.validation"] or self.settings["run.keep"] == "best"
            return (self.name, "", last, "", "", "", "") if held_out else (self.name, last, "", "", "", "", "")
        result = self.result
        validation = result.validation_error_percent
        return (
            self.name,
            f"{result.test_error_percent:.2f} %",
            "" if validation is None else f"{validation:.2f} %",
            f"{result.images_seen:,}",
            f"{result.parameters:,}",
            f"{result.train_images_per_second:.0f}",
            f"{result.seconds / 60:.1f}",
        )


def compare(paths: Sequence[Path]) -> list[RunSummary]:
    """The runs in these folders, in that order."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    summaries = []
    for name, path in zip(names, paths):
        folder = RunFolder.open(path)
        result = RunResult.read(folder.result) if folder.result.exists() else None
        summaries.append(RunSummary(name, folder.config().determining(), folder.read_metrics(), result))
    return summaries


def differing_settings(summaries: Sequence[RunSummary]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, with each run's value."""
    names = sorted({name for summary in summaries for name in summary.settings})
    values = {name: [str(summary.settings.get(name, "")) for summary in summaries] for name in names}
    return {name: row for name, row in values.items() if len(set(row)) > 1}


def write_page(summaries: Sequence[RunSummary], folder: Path) -> None:
    """A picture of the curves, and one HTML page with the table, the curves, and the settings that differ."""
    from torchcaps.plots.evaluation import compared_curves
    from torchcaps.plots.files import png

    if not summaries:
        raise UserError("There is nothing to compare.")
    folder.mkdir(parents=True, exist_ok=True)
    picture = png(compared_curves({summary.name: summary.metrics for summary in summaries}))
    write_atomically(folder / "compared.png", picture)
    source = base64.b64encode(picture).decode()
    settings = [[name, *row] for name, row in differing_settings(summaries).items()]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Runs compared</title>",
        f"<style>{STYLE}</style><h1>Runs compared</h1>",
        _table(COLUMNS, [summary.cells() for summary in summaries]),
        f"<img alt='evaluation error and loss by step and by second' src='data:image/png;base64,{source}'>",
        "<h2>Settings that differ</h2>",
        _table(("setting", *(summary.name for summary in summaries)), settings) if settings else "<p>None.</p>",
        "</html>",
    ]
    write_atomically(folder / "compare.html", "\n".join(parts).encode())


STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8884 }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; background: white }
"""


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(shown(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row(headings, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
