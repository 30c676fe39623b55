"""Running the command line from tests, and settings by the names they have there."""

import os

from torchcaps.cli.options import options
from torchcaps.training.config import TrainingConfig

# A network small enough for a test, on the embedded data.
TINY_FLAGS = [
    *("--conv-channels", "8", "--primary-capsules", "4", "--batch-size", "32"),
    *("--threads", "1", "--no-pictures"),
]


def command_environment() -> dict[str, str]:
    """The environment without what a launcher of distributed training may have left in it.

    One thread that sleeps while it waits: tests share their machine with others.
    """
    left_over = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"}
    kept = {name: value for name, value in os.environ.items() if name not in left_over}
    return kept | {"COLUMNS": "120", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def config_of(**settings: object) -> TrainingConfig:
    """A configuration from settings by the names of their options, such as ``ascent="adam"``."""
    places = {option.flag.removeprefix("--").replace("-", "_"): option for option in options()}
    sections: dict[str, dict[str, object]] = {}
    for name, value in settings.items():
        sections.setdefault(places[name].section, {})[places[name].name] = value
    return TrainingConfig.from_mapping(sections)
