"""``torchcaps info``: what somebody needs to know to help with a problem."""

from __future__ import annotations

import argparse
import os
from importlib.metadata import version

from torchcaps.routing.config import NAMES


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> None:
    from torchcaps.data.sources import SOURCES
    from torchcaps.training.files import recipe_names
    from torchcaps.training.host import cpu_features, cpu_name, versions

    lines = {
        **versions(),
        "safetensors": version("safetensors"),
        "processor": cpu_name(),
        "vector instructions": ", ".join(cpu_features()) or "unknown",
        "cores": str(os.cpu_count()),
        "routings": ", ".join(NAMES),
        "data sets to fetch": ", ".join(SOURCES),
        "recipes": ", ".join(recipe_names()),
    }
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:{width}}  {value}")
