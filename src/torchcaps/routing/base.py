"""What a routing is."""

from __future__ import annotations

import inspect
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor, nn

from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.routing.votes import Votes
from torchcaps.settings import SettingError, check_names

USUAL_FAN_IN = 9216
"""Numbers that feed each class capsule of the paper's MNIST network: 1152 capsules of 8 components."""


def checked_iterations(iterations: int) -> int:
    """How often an iterative routing iterates, if it can."""
    if operator.index(iterations) < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations}")
    return iterations


def finite(name: str, value: float) -> float:
    """The number that an option is given, if it is one."""
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    return float(value)


def option_names(kind: type[Routing], given: Iterable[str]) -> list[str]:
    """What the constructor of a routing can be given by name; all that is given, if it takes anything."""
    parameters = {} if kind.__init__ is Routing.__init__ else inspect.signature(kind.__init__).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(given)
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in parameters.items() if parameter.kind in named and name != "self"]


def _check_options(kind: type[Routing], given: Iterable[str]) -> None:
    try:
        check_names(given, option_names(kind, given))
    except SettingError as error:
        raise TypeError(f"{kind.__name__}: {error}") from None


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python, which a file can hold."""
    return value.item() if isinstance(value, np.generic) else value


class Routing(nn.Module, ABC):
    """Turns votes for output capsules into output capsules.

    A routing is an object made from its options alone, all of them keyword arguments, and given to a capsule layer,
    which tells it the sizes once by :meth:`connect`. ``docs/adding-a-routing.md`` shows how to write one.
    """

    weight_std: ClassVar[float] = 0.01
    """Standard deviation that starts the weights of a layer with :data:`USUAL_FAN_IN` inputs at a useful scale."""

    holds_votes: ClassVar[bool] = False
    """Whether it asks for all votes at once, so that fewer images should be evaluated at a time."""

    settings: dict[str, Any]
    """The keyword arguments it was made with: enough, with its class, to make it again."""

    connected: bool = False
    """Whether it has been given to a layer."""

    _kept: dict[str, Any] | None = None

    def __new__(cls, *positional: Any, **settings: Any) -> Self:
        if positional:
            raise TypeError(f"the options of {cls.__name__} are keyword arguments, such as {cls.__name__}(start=1.0)")
        _check_options(cls, settings)
        routing = super().__new__(cls)
        object.__setattr__(routing, "settings", settings)
        return routing

    def current_settings(self) -> dict[str, Any]:
        """The keyword arguments that make it again as it is now: what it keeps of them may have been changed since."""
        given = {name: _plain(value) for name, value in self.settings.items()}
        kept = self._kept or {}
        now = {name: _plain(getattr(self, name)) for name in kept}
        return given | {name: now[name] for name, value in kept.items() if now[name] != value}

    def _kept_arguments(self) -> dict[str, Any]:
        """The arguments that it keeps, as they are, under their own names; others may be kept converted."""
        parameters = inspect.signature(type(self)).parameters
        given = {name: parameter.default for name, parameter in parameters.items()} | self.settings
        plain = {name: _plain(value) for name, value in given.items()}
        simple = {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str)}
        return {name: value for name, value in simple.items() if getattr(self, name, None) == value}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())

    def start_std(self, fan_in: int) -> float:
        """Standard deviation that starts the weights of a layer where each output sums over ``fan_in`` numbers.

        It falls with their square root, so that output capsules start with the same lengths whatever feeds them.
        """
        return self.weight_std * math.sqrt(USUAL_FAN_IN / fan_in)

    def connect(self, inputs: int, outputs: int, output_size: int) -> None:
        """Make what depends on the number of capsules, such as coefficients. Called once, by the layer."""

    def join(self, inputs: int, outputs: int, output_size: int) -> None:
        """Become the routing of a layer, and of no other."""
        if self.connected:
            raise ValueError("this routing object belongs to another layer already: make one for each layer")
        self._kept = self._kept_arguments()
        self.connect(inputs, outputs, output_size)
        self.connected = True

    def coefficients_for(self, votes: Votes, activations: Tensor) -> Tensor | float:
        """The coefficients c_ij with which Σ_i c_ij û_j|i are the totals, for these images: (B, I, J), or (I, J) or one
        number where all images share them. What explanations are made from; a routing without them has none."""
        raise NotImplementedError(f"{type(self).__name__} does not say with which coefficients it sums the votes")

    @abstractmethod
    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        """Route the votes of input capsules with these activations (B, I)."""


class SharedRouting(Routing):
    """A routing whose coefficients are the same for all images, so that they can be folded into the weights."""

    coefficients: Tensor | float
    """(I, J), or one number for all pairs."""

    def coefficients_for(self, votes: Votes, activations: Tensor) -> Tensor | float:
        return self.coefficients

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return capsules_from_totals(votes.combine(self.coefficients))
