"""What a person sees while cells are trained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from torchcaps.reproduce.cells import Cell

REFRESH_SECONDS = 2.0


class CellDisplay:
    """On a terminal a bar over all cells and one for each that is being trained; elsewhere a line for each event."""

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        self._console = console
        self._cells = cells
        self.side_by_side = 1  # cells that are trained at the same time
        self._speeds = {cell.name: seconds for cell in cells if (seconds := _seconds_per_step(cell)) is not None}
        self._last_refresh = 0.0
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"))
            self._bar = Progress(*columns, console=console)
            self._overall = self._bar.add_task(
                "all cells", total=sum(cell.options.steps or 0 for cell in cells), numbers=""
            )
            self._tasks: dict[str, object] = {}

    def __enter__(self) -> CellDisplay:
        done = sum(cell.done for cell in self._cells)
        self._say(f"{len(self._cells)} cells, of which {done} are done")
        if self._bar is not None:
            self._bar.start()
            self.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, cell: Cell) -> None:
        self._say(f"{cell.name}: {'goes on' if cell.started else 'starts'}")

    def finished(self, cell: Cell, problem: str | None) -> None:
        if problem:
            self._say(f"{cell.name}: {problem}")
        else:
            result = cell.result()
            kind = "test" if result["validation_error_percent"] is None else "validation"
            self._say(f"{cell.name}: {result[f'{kind}_error_percent']:.2f} % {kind} error, {result['seconds']:.0f} s")
        done = sum(each.done for each in self._cells)
        if done < len(self._cells):
            self._say(f"{done} of {len(self._cells)} cells are done, {self._time_left()}")

    def refresh(self) -> None:
        """Look how far the cells have come."""
        if self._bar is None or time.monotonic() - self._last_refresh < REFRESH_SECONDS:
            return
        self._last_refresh = time.monotonic()
        completed, done = 0, 0
        for cell in self._cells:
            steps = cell.options.steps or 0
            reached = steps if cell.done else cell.steps_done()
            completed += reached
            done += cell.done
            if reached > 0 and not cell.done:
                seconds = _seconds_per_step(cell)
                if seconds is not None:
                    self._speeds[cell.name] = seconds
                if cell.name not in self._tasks:
                    self._tasks[cell.name] = self._bar.add_task(cell.name, total=steps, numbers="")
                self._bar.update(self._tasks[cell.name], completed=reached, numbers=f"{reached}/{steps}")  # type: ignore[arg-type]
            elif cell.done and cell.name in self._tasks:
                self._bar.remove_task(self._tasks.pop(cell.name))  # type: ignore[arg-type]
        numbers = f"{done}/{len(self._cells)} cells, {self._time_left()}"
        self._bar.update(self._overall, completed=completed, numbers=numbers)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _time_left(self) -> str:
        for cell in self._cells:
            if cell.name not in self._speeds and (seconds := _seconds_per_step(cell)) is not None:
                self._speeds[cell.name] = seconds
        if not self._speeds:
            return "time left unknown"
        left = sum(
            ((cell.options.steps or 0) - cell.steps_done()) * self._expected_speed(cell)
            for cell in self._cells
            if not cell.done
        )
        minutes = max(1, round(left / self.side_by_side / 60))
        return f"about {minutes // 60} h {minutes % 60} min left" if minutes >= 60 else f"about {minutes} min left"

    def _expected_speed(self, cell: Cell) -> float:
        """Seconds a step, from the cell itself or else from the most similar ones that have run."""
        if cell.name in self._speeds:
            return self._speeds[cell.name]
        data, method, _ = cell.name.split("/")
        for alike in (f"{data}/{method}/", f"{data}/", ""):
            known = [seconds for name, seconds in self._speeds.items() if name.startswith(alike)]
            if known:
                return sum(known) / len(known)
        raise AssertionError("asked before anything ran")


def _seconds_per_step(cell: Cell) -> float | None:
    rows = cell.folder.read_metrics() if cell.started else []
    if not rows or not rows[-1]["seconds"]:
        return None
    return float(rows[-1]["seconds"]) / float(rows[-1]["step"] or 1)
