"""A process that trains one cell: ``python -P -m torchcaps.lab.reproduce.worker RECIPE FOLDER EXECUTION``."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchcaps.process import begin, told
from torchcaps.training.config import TrainingConfig
from torchcaps.training.host import follow_parent


@dataclass(frozen=True)
class Execution:
    """Where and how a cell is trained, which does not change what comes out. None: as the recipe says."""

    threads: int | None = None
    devices: int | None = None
    accelerator: str | None = None
    data_folder: str | None = None

    def applied(self, config: TrainingConfig, folder: Path) -> TrainingConfig:
        """The settings with these instead, and with the run in ``folder``."""
        given = {"threads": self.threads, "devices": self.devices, "accelerator": self.accelerator}
        run = config.run.replace(**{name: value for name, value in given.items() if value is not None}, out=str(folder))
        data = config.data if self.data_folder is None else config.data.replace(folder=self.data_folder)
        return config.replace(run=run, data=data)

    def options(self) -> list[str]:
        """The same for ``torchcaps train``."""
        given = {
            "--threads": self.threads,
            "--devices": self.devices,
            "--accelerator": self.accelerator,
            "--data-dir": self.data_folder,
        }
        return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def main(arguments: Sequence[str]) -> int:
    """Train, or go on where the run was stopped. What the user did wrong is told in a sentence."""
    return told(lambda: _train(arguments))


def _train(arguments: Sequence[str]) -> int:
    follow_parent()
    from torchcaps.ops import keep_memory
    from torchcaps.training.files import read_config
    from torchcaps.training.fit import fit
    from torchcaps.training.folder import RunFolder

    recipe, path, execution = arguments
    folder = Path(path)
    keep_memory()
    config = Execution(**json.loads(execution)).applied(read_config(Path(recipe)), folder)
    begun = RunFolder(folder).config_file.exists()
    fit(config, resume=folder if begun else None)
    return 0


if __name__ == "__main__":
    begin()
    sys.exit(main(sys.argv[1:]))
