"""What a person sees while cells are trained."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from torchcaps.lab.reproduce.cells import Cell
from torchcaps.process import printable

REFRESH_SECONDS = 2.0


class CellDisplay:
    """On a terminal a bar over all cells and one for each that has begun; elsewhere a line for each event."""

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        self._console = console
        self._cells = cells
        self.side_by_side = 1  # cells that are trained at the same time
        self._last_refresh = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"))
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._overall = self._bars.add_task("all cells", total=sum(cell.total_steps for cell in cells), numbers="")
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> CellDisplay:
        self.say(f"{len(self._cells)} cells, of which {self._done()} are done")
        self._bars.start()
        self.refresh()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def started(self, cell: Cell) -> None:
        self.say(f"{cell.name}: {'goes on' if cell.started else 'starts'}")

    def finished(self, cell: Cell, problem: str | None) -> None:
        if problem:
            self.say(f"{cell.name}: {problem}")
        else:
            result = cell.result()
            self.say(f"{cell.name}: {result.test_error_percent:.2f} % test error, {result.seconds:.0f} s")
        if self._done() < len(self._cells):
            left = self._time_left(self._progress())
            self.say(f"{self._done()} of {len(self._cells)} cells are done, {left}")

    def refresh(self) -> None:
        """Look how far the cells have come."""
        if self._bars.disable or time.monotonic() - self._last_refresh < REFRESH_SECONDS:
            return
        self._last_refresh = time.monotonic()
        progress = self._progress()
        for cell in self._cells:
            (steps, _), name = progress[cell.name], cell.name
            if cell.done and name in self._tasks:
                self._bars.remove_task(self._tasks.pop(name))
            elif steps and not cell.done:
                if name not in self._tasks:
                    self._tasks[name] = self._bars.add_task(name, total=cell.total_steps, numbers="")
                self._bars.update(self._tasks[name], completed=steps, numbers=f"{steps}/{cell.total_steps}")
        numbers = f"{self._done()}/{len(self._cells)} cells, {self._time_left(progress)}"
        self._bars.update(self._overall, completed=sum(steps for steps, _ in progress.values()), numbers=numbers)

    def say(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def _done(self) -> int:
        return sum(cell.done for cell in self._cells)

    def _progress(self) -> dict[str, tuple[int, float]]:
        """Steps and seconds of every cell."""
        return {cell.name: cell.progress() for cell in self._cells}

    def _time_left(self, progress: Mapping[str, tuple[int, float]]) -> str:
        pace = {name: seconds / steps for name, (steps, seconds) in progress.items() if steps}
        if not pace:
            return "time left unknown"
        left = ((cell.total_steps - progress[cell.name][0]) * _expected(pace, cell.name) for cell in self._cells)
        return _spoken(sum(left) / self.side_by_side)


def _expected(pace: Mapping[str, float], cell: str) -> float:
    """Seconds a step, from the cell itself or else from the most similar ones that have run."""
    data, method, _ = cell.split("/")
    for alike in (cell, f"{data}/{method}/", f"{data}/"):
        if known := [seconds for name, seconds in pace.items() if name.startswith(alike)]:
            return statistics.fmean(known)
    return statistics.fmean(pace.values())


def _spoken(seconds: float) -> str:
    """
    >>> _spoken(5000)
    'about 1 h 23 min left'
    """
    if seconds == 0:
        return "nothing left to do"
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"about {hours} h {minutes} min left" if hours else f"about {minutes} min left"
