"""The recipes that come with torchcaps."""

from __future__ import annotations

from pathlib import Path

from torchcaps.errors import UserError

# Beside the package in an installed wheel, at the top of a checkout otherwise.
_PLACES = (Path(__file__).parent / "shipped_recipes", Path(__file__).parents[2] / "recipes")


def recipe_names() -> list[str]:
    return sorted(path.stem for place in _PLACES for path in place.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """A file as it is named, or a shipped recipe with or without its ending."""
    candidates = [Path(name), *(place / f"{name.removesuffix('.yaml')}.yaml" for place in _PLACES)]
    for path in candidates:
        if path.is_file():
            return path
    raise UserError(f"There is no recipe '{name}': give a YAML file, or one of {', '.join(recipe_names())}.")
