"""Names that are imported when they are first used, so that importing a package costs nothing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def attach(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, given the public names in each of its modules.

    The modules of the package are attributes, too, as they would be had they been imported.
    """
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        module = f"{package}.{name}"
        if name.startswith("_") or importlib.util.find_spec(module) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(module)

    return get, lambda: sorted(homes), [*homes]
