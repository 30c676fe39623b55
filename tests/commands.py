"""Running the command line from tests."""

import os

# A network small enough for a test, on the embedded data.
TINY_FLAGS = ["--conv-channels", "8", "--primary-capsules", "4", "--batch-size", "32", "--threads", "1"]


def command_environment() -> dict[str, str]:
    """The environment without what a launcher of distributed training may have left in it."""
    left_over = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"}
    return {name: value for name, value in os.environ.items() if name not in left_over} | {"COLUMNS": "120"}
