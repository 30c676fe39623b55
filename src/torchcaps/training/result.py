"""What came out of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchcaps.atomic import DamagedFile, read_bytes, write_json
from torchcaps.errors import UserError
from torchcaps.settings import Settings, setting

LARGEST_FILE = 2**20


class RunResult(Settings):
    """The outcome of a finished run, as ``result.json`` holds it."""

    data: str = setting()
    model: str = setting()
    routing: str | None = setting(default=None)
    reconstruction: bool = setting()
    seed: int = setting()
    steps: int = setting()
    epochs: float = setting()
    batch_size: int = setting()
    images_seen: int = setting()
    test_error_percent: float = setting()
    test_images: int = setting()
    validation_error_percent: float | None = setting(default=None)
    train_images_per_second: float = setting()
    evaluate_images_per_second: float = setting()
    parameters: int = setting()
    peak_memory_mb: float = setting()
    train_seconds: float = setting()
    seconds: float = setting()
    threads: int = setting()
    processes: int = setting()
    device: str = setting()
    processor: str = setting()
    versions: dict[str, Any] = setting(default_factory=dict)
    commit: str | None = setting(default=None)

    def write(self, path: Path) -> None:
        write_json(path, self.to_mapping())

    @classmethod
    def read(cls, path: Path) -> RunResult:
        """The result that :meth:`write` wrote; a :class:`UserError` if it is not there or not whole."""
        try:
            return cls.from_mapping(json.loads(read_bytes(path, most=LARGEST_FILE)))
        except FileNotFoundError:
            raise UserError(f"There is no {path}: the run is not finished.") from None
        except (OSError, UserError, ValueError, RecursionError) as error:  # bad bytes and bad JSON are ValueErrors
            raise DamagedFile(f"{path} is damaged: {str(error).rstrip('.')[:300]}.") from None
