"""A routing as settings: its name, and the arguments of its constructor."""

from __future__ import annotations

import importlib
import inspect
import typing
from typing import TYPE_CHECKING, Any

from torchcaps.errors import UserError
from torchcaps.settings import SettingError, Settings, check_names, converted, setting

if TYPE_CHECKING:
    from torchcaps.routing.base import Routing

NAMES = ("l2", "l1", "dynamic", "uniform", "learned", "em", "clustering")
"""The keys of :data:`torchcaps.routing.registry.ROUTINGS`, known without importing torch."""
MOST_ITERATIONS = 1000
"""Of torchcaps' own routings: a file that somebody else wrote must not keep a machine busy for good."""


class RoutingConfig(Settings):
    """Which routing, with which settings; what is not set has the routing's own default.

    >>> RoutingConfig(name="dynamic", settings={"iterations": 2}).build().iterations
    2
    """

    title = "routing"

    name: str = setting(f"{', '.join(NAMES)}, or module:Class of your own", default="l2", option="routing")
    settings: dict[str, Any] = setting(default_factory=dict, help="arguments of its constructor", option="")

    def build(self, own: type[Routing] | None = None) -> Routing:
        """A new routing.

        Args:
            own: the class to use if ``name`` is none of torchcaps' routings. A name alone imports nothing, because
                it may come from a file that somebody else wrote.
        """
        from torchcaps.routing.base import option_names
        from torchcaps.routing.registry import ROUTINGS

        kind = ROUTINGS.get(self.name, own)
        if kind is None:
            raise SettingError(
                "routing",
                f"{self.name!a} is none of torchcaps' own ({', '.join(NAMES)}). If it is yours, name it: "
                "--routing module:Class on the command line, load(path, routing=Class) in Python",
            )
        where = f"{self.name} routing"
        check_names(self.settings, option_names(kind, self.settings), where)
        try:
            return kind(**(self._checked(kind, where) if self.name in NAMES else self._as_hinted(kind)))
        except SettingError:
            raise
        except (TypeError, ValueError) as error:
            raise SettingError("routing", f"{self.name!a} cannot be made: {error}") from error

    def _as_hinted(self, kind: type[Routing]) -> dict[str, Any]:
        """The settings, with numbers as the text or the float that the constructor asks for: YAML cannot tell."""
        try:
            hints = typing.get_type_hints(kind.__init__)
        except NameError:  # imported for type checkers only
            hints = {}
        return {
            name: hints[name](value) if hints.get(name) in (str, float) and type(value) in (int, float) else value
            for name, value in self.settings.items()
        }

    def _checked(self, kind: type[Routing], where: str) -> dict[str, Any]:
        """The settings as the types that the constructor names: they may come from a file or a command line."""
        hints = typing.get_type_hints(kind.__init__)
        checked = {
            name: converted(f"{where}.{name}", hints.get(name, Any), value) for name, value in self.settings.items()
        }
        if checked.get("iterations", 0) > MOST_ITERATIONS:
            raise SettingError(f"{where}.iterations", f"must be at most {MOST_ITERATIONS}")
        return checked


def import_routing(name: str) -> type[Routing] | None:
    """The class that ``module:Class`` names; None for a name of torchcaps' own. Runs the code of that module."""
    from torchcaps.routing.base import Routing

    if name in NAMES:
        return None
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise SettingError("routing", f"{name!a} is unknown: choose one of {', '.join(NAMES)}, or module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a module of the user's own does when it is imported
        raise UserError(f"Could not load the routing '{name}': {error}.") from error
    if not (inspect.isclass(found) and issubclass(found, Routing)):
        raise UserError(f"'{name}' is not a subclass of torchcaps.routing.Routing.")
    return found
