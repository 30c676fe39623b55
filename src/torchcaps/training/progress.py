"""What a person sees of a run while it goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressDisplay:
    """A live bar on a terminal, plain lines elsewhere, nothing on processes other than the first."""

    def __init__(self, console: Console, *, total_steps: int, enabled: bool) -> None:
        self._console = console
        self._enabled = enabled
        self._bar: Progress | None = None
        if enabled and console.is_terminal:
            self._bar = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("train", total=total_steps, epoch="1", numbers="")

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        if self._enabled:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(self, row: Mapping[str, Any], *, epochs: int) -> None:
        """Show a row of the metrics."""
        numbers = f"loss {row['loss']:.4f}  error {row['train_error']:.2f} %"
        if row.get("evaluation_error") is not None:
            numbers += f"  evaluation error {row['evaluation_error']:.2f} %"
        numbers += f"  {row['images_per_second']:.0f} images/s"
        epoch = f"{math.ceil(float(row['epoch']))}/{epochs}"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], epoch=epoch, numbers=numbers)
        elif self._enabled:
            self.say(f"step {row['step']}  epoch {epoch}  {numbers}")
