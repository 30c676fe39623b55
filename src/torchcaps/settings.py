"""Settings: frozen dataclasses that check every value they are given, by type and by range.

Each part of torchcaps has its settings beside it. The command line, recipes and ``config.yaml`` are made from them.
Nothing here imports torch, so that a mistyped option is answered at once.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, dataclass_transform

from torchcaps.errors import UserError

RANGES: dict[str, Callable[[float, float], bool]] = {
    "least": operator.ge,
    "above": operator.gt,
    "most": operator.le,
    "below": operator.lt,
}
WORDS = {"least": "at least", "most": "at most"}


class SettingError(UserError, ValueError):
    """A setting with a value it cannot have. ``setting`` is its name, ``problem`` what is wrong with the value."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting} {problem}")
        self.setting = setting
        self.problem = problem


def setting(
    help: str = "",
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: tuple[Any, ...] | None = None,
    option: str | None = None,
) -> Any:
    """A field of :class:`Settings`.

    Args:
        help: one line for the command line.
        default: its value if none is given; without one it must be given.
        default_factory: what makes the default, where that can be changed.
        least, above, most, below: the range of a number, or of every number of a tuple.
        choices: the only values allowed.
        option: its name on the command line, if that is not the field's; "" for a field that is no option there.
    """
    limits = {"least": least, "above": above, "most": most, "below": below, "choices": choices}
    metadata = {"help": help, "option": option, **limits}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(setting, dataclasses.field))
class Settings:
    """Base of all settings. A subclass is a frozen dataclass with keyword-only fields; no decorator is needed.

    >>> class Speed(Settings):
    ...     rate: float = setting("steps a second", default=0.1, above=0)
    >>> Speed(rate=2).rate
    2.0
    >>> Speed(rate="fast")
    Traceback (most recent call last):
    torchcaps.settings.SettingError: rate must be a number, not 'fast'
    """

    title: ClassVar[str] = ""
    """Heading of these settings on the command line."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in fields(type(self)):
            value = converted(field.name, hints[field.name], getattr(self, field.name))
            _check_range(field, value)
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Raise :class:`SettingError` where settings do not go together. Nothing to do unless a subclass says so."""

    @classmethod
    def from_mapping(cls, values: object, *, where: str = "") -> Self:
        """Settings from what YAML or JSON gave. ``where`` is the name of the section, for messages."""
        if not isinstance(values, Mapping):
            raise SettingError(where or "the settings", f"must be names with values, not {shown(values)}")
        check_names(
            [name if isinstance(name, str) else shown(name) for name in values],
            [field.name for field in fields(cls)],
            where,
        )
        hints = typing.get_type_hints(cls)
        prefix = f"{where}." if where else ""
        arguments: dict[str, Any] = {}
        for name, value in values.items():
            nested = hints[name]
            if isinstance(nested, type) and issubclass(nested, Settings):
                value = nested.from_mapping(value, where=f"{prefix}{name}")
            arguments[name] = value
        needed = [field for field in fields(cls) if field.default is field.default_factory is dataclasses.MISSING]
        missing = [field.name for field in needed if field.name not in arguments]
        if missing:
            raise SettingError(prefix + missing[0], "is missing")
        try:
            return cls(**arguments)
        except SettingError as error:
            raise SettingError(prefix + error.setting, error.problem) from None

    def to_mapping(self) -> dict[str, Any]:
        """The settings as nested dictionaries of plain values, which :meth:`from_mapping` takes."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(type(self))}

    def replace(self, **changes: Any) -> Self:
        """The same settings with some changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def check_names(given: Iterable[str], known: Iterable[str], where: str = "") -> None:
    """Raise :class:`SettingError` for the first name that is not known, with the closest one and all that are."""
    known = list(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name[:60], known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            prefix = f"{where}." if where else ""
            listed = ", ".join(known) if known else "none"
            raise SettingError(f"{prefix}{name[:60]}", f"is not a setting{hint}: there are {listed}")


def fields(settings: type[Settings]) -> list[dataclasses.Field[Any]]:
    """The fields of a class of settings."""
    return list(dataclasses.fields(settings))  # type: ignore[arg-type]


def kind(settings: type[Settings], name: str) -> Any:
    """The type of a field without its ``| None``."""
    return _without_none(typing.get_type_hints(settings)[name])


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return inner
    return hint


def converted(name: str, hint: Any, value: Any) -> Any:
    """The value as the field's type, or an error. A whole number serves as a float; a text as nothing but a text."""
    inner = _without_none(hint)
    if value is None and inner is not hint:
        return None
    value = _of_python(value)
    origin = typing.get_origin(inner)
    if origin is tuple:
        return _converted_tuple(name, inner, value)
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise SettingError(name, f"must be names with values, not {shown(value)}")
        return {key: _of_python(entry) for key, entry in value.items()}
    if inner is Any or (isinstance(value, inner) and not (isinstance(value, bool) and inner is not bool)):
        checked = value
    elif inner is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        checked = float(value)
    else:
        raise SettingError(name, f"must be {_described(inner)}, not {shown(value)}")
    if isinstance(checked, float) and not math.isfinite(checked):
        raise SettingError(name, f"must be a finite number, not {checked}")
    if isinstance(checked, int) and not isinstance(checked, bool) and abs(checked) >= 2**63:
        raise SettingError(name, "is too large a number")
    return checked


def _of_python(value: Any) -> Any:
    """A single number or text of numpy as one of Python, which files can hold."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _converted_tuple(name: str, hint: Any, value: Any) -> tuple[Any, ...]:
    parts = typing.get_args(hint)
    endless = len(parts) == 2 and parts[1] is Ellipsis
    if not isinstance(value, list | tuple) or (not endless and len(value) != len(parts)):
        count = "" if endless else f"{len(parts)} "
        raise SettingError(name, f"must be a list of {count}values, not {shown(value)}")
    hints = [parts[0]] * len(value) if endless else parts
    return tuple(converted(name, part, entry) for part, entry in zip(hints, value))


def _described(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}")


def shown(value: object) -> str:
    """A value as messages show it, never long."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # of a number with thousands of digits, of lists within lists within lists
        return f"this {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_range(field: dataclasses.Field[Any], value: Any) -> None:
    limits = field.metadata
    if not limits or value is None:
        return
    if limits["choices"] and value not in limits["choices"]:
        raise SettingError(field.name, f"must be one of {', '.join(map(str, limits['choices']))}, not {shown(value)}")
    for number in _numbers(value):
        for word, within in RANGES.items():
            limit = limits[word]
            if limit is not None and not within(number, limit):
                raise SettingError(field.name, f"must be {WORDS.get(word, word)} {limit:g}, not {number:g}")


def _numbers(value: Any) -> Iterable[float]:
    if isinstance(value, tuple):
        return (number for part in value for number in _numbers(part))
    return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else ()


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_mapping()
    return [_plain(part) for part in value] if isinstance(value, tuple) else copy.deepcopy(value)
