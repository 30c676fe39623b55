"""Settings in YAML files: recipes, and the configuration of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from torchcaps.atomic import read_bytes
from torchcaps.errors import UserError
from torchcaps.settings import SettingError
from torchcaps.training.config import TrainingConfig

LARGEST_FILE = 2**17  # reading YAML takes a second or so for this much
SHIPPED = (Path(__file__).parents[1] / "shipped_recipes", Path(__file__).parents[3] / "recipes")
"""Where recipes are: beside the package in an installed wheel, at the top of a checkout otherwise."""


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, with which a few lines can stand for more than fits into memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)


_PlainLoader.add_implicit_resolver(  # YAML reads 1e-3 as a text
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_mapping(path: Path) -> dict[str, Any]:
    """What a YAML file says, as nested dictionaries."""
    try:
        values = yaml.load(read_bytes(path, most=LARGEST_FILE).decode(), _PlainLoader)
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except UserError:
        raise
    except Exception as error:  # the library raises nearly anything, such as an IndexError for "!!int ''"
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(f"{path} is not readable as YAML: {reason}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold names with values.")
    return values


def read_config(path: Path) -> TrainingConfig:
    """The configuration in a file; what it does not set has its default."""
    values = read_mapping(path)
    try:
        return TrainingConfig.from_mapping(values)
    except SettingError as error:
        raise UserError(f"{path}: {error}.") from None


def to_yaml(config: TrainingConfig) -> str:
    return yaml.safe_dump(config.to_mapping(), sort_keys=False, allow_unicode=True)


def recipe_names() -> list[str]:
    """The recipes that come with torchcaps."""
    return sorted(path.stem for place in SHIPPED for path in place.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """A file as it is named, or a shipped recipe with or without its ending."""
    candidates = [Path(name), *(place / f"{name.removesuffix('.yaml')}.yaml" for place in SHIPPED)]
    for path in candidates:
        if path.is_file():
            return path
    raise UserError(f"There is no recipe '{name}': give a YAML file, or one of {', '.join(recipe_names())}.")
