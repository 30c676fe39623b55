"""Settings as options of the command line: one flat list, made from the settings of all parts."""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from torchcaps.models.config import MODELS, MatrixConfig
from torchcaps.settings import SettingError, Settings, fields, kind
from torchcaps.training.config import TrainingConfig

ROUTING_OPTIONS: dict[str, tuple[type, str]] = {
    "iterations": (int, "iterations of an iterative routing [3]"),
    "alpha": (float, "strength of the clustering routing's regularisation [1]"),
    "start": (float, "start value of shared coefficients [1]"),
    "strength": (float, "λ, the strength of the penalty of l2 and l1 [1e-5]"),
}
"""Arguments of torchcaps' own routings; one that the chosen routing does not have is an error."""
SHORTHANDS = {"--balanced": ("objective", "balanced"), "--projected": ("constraint", "fixed-norm")}
"""Options without a value that set something of the ascent: its name and the value."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A setting on the command line."""

    flag: str
    section: str
    name: str
    kind: Any
    field: dataclasses.Field[Any]
    group: str


def options() -> Iterator[Option]:
    """All settings that can be given as options; those that several models have, once."""
    seen: set[str] = set()
    for section in fields(TrainingConfig):
        base = kind(TrainingConfig, section.name)
        parts: list[type[Settings]] = [*MODELS.values()] if section.name == "model" else [base]
        for part in parts:
            for field in fields(part):
                word = field.metadata.get("option")
                if word == "":
                    continue
                flag = f"--{(word or field.name).replace('_', '-')}"
                if flag not in seen:
                    seen.add(flag)
                    yield Option(flag, section.name, field.name, kind(part, field.name), field, part.title)


def option_of(setting: str) -> str:
    """What the command line calls a setting, given as ``name`` or ``section.name``: itself if it has no option.

    >>> option_of("run.batch_size"), option_of("batch_size"), option_of("data.name"), option_of("task.mean")
    ('--batch-size', '--batch-size', '--data', 'task.mean')
    """
    section, _, name = setting.rpartition(".")
    for option in options():
        if option.name == name and section in ("", option.section):
            return option.flag
    return f"--{name}" if name in ROUTING_OPTIONS else setting


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """An option for every setting of a training run."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options():
        group = groups.setdefault(option.group, parser.add_argument_group(option.group))
        _add(group, option)
        if option.flag == "--routing":
            _add_routing_options(group)
        if option.flag == "--primary-size":
            group.add_argument(
                "--model", dest="model.name", choices=tuple(MODELS), default=argparse.SUPPRESS, help=MODEL_HELP
            )
            group.add_argument(
                "--activation",
                choices=("relu", "leaky-relu"),
                default=argparse.SUPPRESS,
                help="leaky-relu is short for --negative-slope 0.2",
            )
    ascent = groups["discriminative routing"]
    for flag, (name, value) in SHORTHANDS.items():
        where, help = f"ascent.{name}", f"short for --{name} {value}"
        ascent.add_argument(flag, dest=where, action="store_const", const=value, default=argparse.SUPPRESS, help=help)


MODEL_HELP = "capsnet (the paper's), matrix (capsules with EM routing), cnn (an ordinary network of its size) [capsnet]"


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    metadata, default = option.field.metadata, option.field.default
    text = metadata["help"].replace("%", "%%")
    if default not in (None, "", ()) and not isinstance(default, bool) and default is not dataclasses.MISSING:
        text += f" [{','.join(map(str, default)) if isinstance(default, tuple) else default}]"
    common = {"dest": f"{option.section}.{option.name}", "default": argparse.SUPPRESS, "help": text}
    if option.kind is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    elif option.name == "flip":
        group.add_argument(option.flag, nargs="?", const="random", choices=metadata["choices"], **common)
    elif metadata["choices"]:
        group.add_argument(option.flag, type=option.kind, choices=metadata["choices"], **common)
    elif typing.get_origin(option.kind) is tuple:
        group.add_argument(option.flag, type=_numbers, metavar=option.name.upper(), **common)
    else:
        metavar = {int: "N", float: "X"}.get(option.kind, option.name.upper())
        group.add_argument(option.flag, type=option.kind, metavar=metavar, **common)


def _numbers(text: str) -> list[Any]:
    """``64,8`` as [64, 8], ``32x8,16x8`` as [[32, 8], [16, 8]].

    >>> _numbers("64,8"), _numbers("32x8")
    ([64, 8], [[32, 8]])
    """
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})?(,\d{1,9}(x\d{1,9})?)*", text):
        raise argparse.ArgumentTypeError(f"must be numbers such as 64,8 or 32x8, not '{text}'")
    parts = [[int(number) for number in part.split("x")] for part in text.split(",")]
    return [part if "x" in text else part[0] for part in parts]


def _add_routing_options(group: argparse._ArgumentGroup) -> None:
    for name, (number, help) in ROUTING_OPTIONS.items():
        metavar = "N" if number is int else "X"
        group.add_argument(f"--{name}", type=number, metavar=metavar, default=argparse.SUPPRESS, help=help)
    group.add_argument(
        "--routing-setting",
        action="append",
        type=_pair,
        metavar="NAME=VALUE",
        default=argparse.SUPPRESS,
        help="an argument of the routing, such as regulariser=entropy; may be given several times",
    )


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not '{text}'")
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            continue
    return name, {"true": True, "false": False}.get(value, value)


def given_settings(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What was given on the command line, by section."""
    given: dict[str, dict[str, Any]] = {}
    values = vars(arguments)
    for word, value in values.items():
        section, dot, name = word.partition(".")
        if dot:
            given.setdefault(section, {})[name] = value
    if values.get("activation"):
        given.setdefault("model", {})["negative_slope"] = 0.2 if values["activation"] == "leaky-relu" else 0.0
    settings = {name: values[name] for name in ROUTING_OPTIONS if name in values}
    settings |= dict(values.get("routing_setting", []))
    if settings:
        given.setdefault("routing", {})["settings"] = settings
    return given


def merged(base: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Settings of a recipe with those given instead."""
    for section, values in base.items():
        if not isinstance(values, Mapping):
            raise SettingError(str(section), "must be names with values")
    result = {section: dict(values) for section, values in base.items()}
    settings = given.get("routing", {}).get("settings", {})
    for section, values in given.items():
        into = result.setdefault(section, {})
        if section == "run" and ("epochs" in values or "steps" in values):
            into.pop("epochs", None)  # one replaces whichever of the two the recipe has
            into.pop("steps", None)
        if section == "routing" and values.get("name", into.get("name")) != into.get("name"):
            into.pop("settings", None)  # another routing's
        if section == "routing" and "settings" in values:
            before = into.get("settings", {})
            if not isinstance(before, Mapping):
                raise SettingError("routing.settings", "must be names with values")
            values = {**values, "settings": {**before, **values["settings"]}}
        if section == "model" and values.get("name", into.get("name", "capsnet")) != into.get("name", "capsnet"):
            into.clear()
        into |= values
    if result.get("model", {}).get("name") == MatrixConfig.name and "iterations" in settings:
        result["model"]["iterations"] = result["routing"]["settings"].pop("iterations")  # the routing is a part of it
    return result
