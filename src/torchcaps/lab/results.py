"""Results as data: every run a line of ``results.csv``, and its metrics in ``curves.csv.gz`` beside it.

>>> import tempfile
>>> from pathlib import Path
>>> results = collect(Path("no-such-folder"), experiment="none")
>>> results.write(Path(tempfile.mkdtemp()))
"""

from __future__ import annotations

import csv
import gzip
import inspect
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchcaps.atomic import DamagedFile, read_bytes, write_atomically
from torchcaps.errors import UserError
from torchcaps.settings import fields, kind, setting
from torchcaps.training.config import TrainingConfig
from torchcaps.training.folder import COLUMNS, RunFolder
from torchcaps.training.result import RunResult

OPEN = (None, "auto")
"""What is decided when a run starts, from its data."""
RESULTS, CURVES = "results.csv", "curves.csv.gz"
VIEWS = "views.json"
LARGEST_TABLE = 2**28
Key = tuple[str, str]
"""Experiment and run."""
Curve = list[dict[str, float | None]]
"""The rows of a run's metrics."""


def read_record(path: Path, *names: str) -> dict[str, Any]:
    """A JSON file that holds at least these names; :class:`DamagedFile` if it does not."""
    try:
        record = json.loads(read_bytes(path, most=2**20))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: {error}. Remove it, and it is measured anew.") from None
    if not isinstance(record, dict) or not set(names) <= record.keys():
        raise DamagedFile(f"{path} is damaged: it lacks {', '.join(names)}. Remove it, and it is measured anew.")
    return record


class RunRow(RunResult):
    """A run: what it was for, how it was trained, and what ``result.json`` says came out."""

    experiment: str = setting()
    run: str = setting(help="its name in the experiment, such as mnist/l2-fc/seed-0")
    method: str = setting()
    views_error_percent: float | None = setting(default=None, help="with several views of an image averaged")
    settings: dict[str, Any] = setting(
        default_factory=dict, help="those that differ from the defaults, as section.name"
    )

    @property
    def key(self) -> Key:
        return self.experiment, self.run


_KINDS = {field.name: kind(RunRow, field.name) for field in fields(RunRow)}


class Results:
    """Runs by experiment and name. One that is added again replaces what was there."""

    def __init__(self) -> None:
        self.rows: dict[Key, RunRow] = {}
        self.curves: dict[Key, Curve] = {}

    def add(self, row: RunRow, curve: Curve) -> None:
        self.rows[row.key] = row
        self.curves[row.key] = curve

    def update(self, other: Results) -> None:
        self.rows |= other.rows
        self.curves |= other.curves

    @classmethod
    def read(cls, folder: Path) -> Results:
        """What :meth:`write` wrote; nothing if there are no such files."""
        results = cls()
        try:
            if (folder / RESULTS).exists():
                rows = _lines(read_bytes(folder / RESULTS, most=LARGEST_TABLE))
                results.rows = {row.key: row for row in map(_parsed, rows)}
            if (folder / CURVES).exists():
                for line in _lines(_unpacked(read_bytes(folder / CURVES, most=LARGEST_TABLE))):
                    key = line.pop("experiment"), line.pop("run")
                    results.curves.setdefault(key, []).append(_point(line))
        except (
            *(OSError, UserError, EOFError, zlib.error),
            *(csv.Error, TypeError, ValueError, LookupError, RecursionError),
        ) as error:
            raise DamagedFile(f"The results in {folder} are damaged: {str(error).rstrip('.')[:300]}.") from None
        return results

    def write(self, folder: Path) -> None:
        """Two files with the same bytes for the same results."""
        folder.mkdir(parents=True, exist_ok=True)
        names = list(dict.fromkeys(["experiment", "run", "method", *_KINDS]))
        lines = [[_cell(getattr(row, name)) for name in names] for row in self.rows.values()]
        write_atomically(folder / RESULTS, table(names, lines))
        points = (
            [*key, *(_short(row.get(name)) for name in COLUMNS)] for key, curve in self.curves.items() for row in curve
        )
        write_atomically(folder / CURVES, gzip.compress(table(["experiment", "run", *COLUMNS], points), mtime=0))


def collect(root: Path, *, experiment: str) -> Results:
    """The finished runs in the folders below ``root``. A run's name is its path from there.

    The folder that a run's folder is in names its method, as in mnist/l2-fc/seed-0; otherwise its routing does.
    """
    results = Results()
    for path in sorted(root.rglob("result.json")):
        folder = RunFolder.open(path.parent)
        result = RunResult.read(path)
        run = path.parent.relative_to(root)
        views = path.parent / VIEWS
        row = RunRow(
            **result.to_mapping(),
            experiment=experiment,
            run=run.as_posix(),
            method=run.parent.name or result.routing or result.model,
            views_error_percent=read_record(views, "error_percent")["error_percent"] if views.exists() else None,
            settings=all_settings(folder.config()),
        )
        results.add(row, folder.read_metrics())
    return results


def all_settings(config: TrainingConfig) -> dict[str, Any]:
    """All settings that decide what is computed, as ``section.name``; also those at their defaults, which may change.

    >>> from torchcaps.routing.config import RoutingConfig
    >>> settings = all_settings(TrainingConfig(routing=RoutingConfig(name="dynamic")))
    >>> settings["routing.name"], settings["routing.iterations"]
    ('dynamic', 3)
    """
    from torchcaps.routing.registry import ROUTINGS

    flat = config.determining()
    given = flat.pop("routing.settings")
    routing = ROUTINGS.get(config.routing.name)
    parameters = {} if routing is None else inspect.signature(routing).parameters
    own = {name: parameter.default for name, parameter in parameters.items()} | given
    return flat | {f"routing.{name}": value for name, value in own.items()}


def agrees(config: TrainingConfig, settings: Mapping[str, Any]) -> bool:
    """Whether the settings of a run are those of a configuration, which may leave some open.

    Args:
        config: what was asked for.
        settings: what a run was trained with, as :func:`all_settings` tells it; without settings that came later.
    """
    defaults = TrainingConfig(model=type(config.model)(), routing=config.routing.replace(settings={}))
    asked, trained = all_settings(config), all_settings(defaults) | dict(settings)
    same = all(value in OPEN or trained.get(name) == value for name, value in asked.items())
    return same and settings.keys() <= asked.keys()


def _unpacked(content: bytes) -> bytes:
    """What gzip packed, if that is not far more than any table has."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        unpacked = file.read(LARGEST_TABLE + 1)
    if len(unpacked) > LARGEST_TABLE:
        raise ValueError(f"it unpacks to more than {LARGEST_TABLE:,} bytes")
    return unpacked


def _lines(content: bytes) -> Iterator[dict[str, str]]:
    """The lines of a table, each with a text for each of its columns."""
    reader = csv.DictReader(io.StringIO(content.decode(), newline=""), strict=True)
    for line in reader:
        if None in line or None in line.values():
            raise ValueError(f"line {reader.line_num} has not as many cells as the first")
        yield line


def _point(line: Mapping[str, str]) -> dict[str, float | None]:
    numbers = {name: float(value) if value else None for name, value in line.items()}
    if not all(math.isfinite(number) for number in numbers.values() if number is not None):
        raise ValueError("a curve has numbers that are not finite")
    return numbers


def table(names: Sequence[str], lines: Iterable[Sequence[Any]]) -> bytes:
    """A CSV file with these lines; None is an empty cell."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(lines)
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parsed(line: dict[str, str]) -> RunRow:
    values = {}
    for name, text in line.items():
        if text:
            values[name] = text if _KINDS[name] is str else json.loads(text)
    return RunRow.from_mapping(values)


def _short(value: float | None) -> str:
    """Seven digits: what a 32-bit number has."""
    return "" if value is None else f"{value:.7g}"
