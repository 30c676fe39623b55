"""What a person sees of a run while it goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from torchcaps.process import printable


def say(console: Console, text: str) -> None:
    """Print text as it is: names of classes and folders are no markup."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class ProgressDisplay:
    """A live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, *, total_steps: int) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._evaluated = ""  # what the last evaluation said
        if console.is_terminal:
            self._bar = Progress(
                MofNCompleteColumn(),
                BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task("train", total=total_steps, numbers="")

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        say(self._console, line)

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(self, row: Mapping[str, Any], *, epochs: int) -> None:
        """Show a row of the metrics."""
        if row.get("evaluation_error") is not None:
            self._evaluated = f"  evaluation {row['evaluation_error']:.2f} %"
        if self._bar is not None:
            numbers = f"loss {row['loss']:.3f}  error {row['train_error']:.1f} %{self._evaluated}"
            self._bar.update(self._task, completed=row["step"], numbers=numbers)
            return
        numbers = f"loss {row['loss']:.4f}  error {row['train_error']:.2f} %"
        if row.get("evaluation_error") is not None:
            numbers += f"  evaluation error {row['evaluation_error']:.2f} %"
        numbers += f"  {row['images_per_second']:.0f} images/s"
        self.say(f"step {row['step']}  epoch {math.ceil(float(row['epoch']))}/{epochs}  {numbers}")
