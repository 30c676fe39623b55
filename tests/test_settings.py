"""Settings check themselves. What holds for all values is tried with many random ones."""

import dataclasses
import json
import math
import random
from typing import Any

import numpy as np
import pytest

from torchcaps.errors import UserError
from torchcaps.models.config import MODELS, CapsNetConfig, CnnConfig, MatrixConfig, ModelConfig, TaskConfig
from torchcaps.settings import SettingError, Settings, check_names, fields, kind, setting


class Inner(Settings):
    depth: int = setting("of it", default=2, least=1, most=5)
    name: str = setting(default="plain", choices=("plain", "fancy"))


class Outer(Settings):
    count: int = setting(default=3, least=0, most=2**40)
    rate: float = setting(default=0.5, above=0, below=10)
    share: float | None = setting(default=None, least=0, most=1)
    on: bool = setting(default=False)
    text: str = setting(default="")
    pair: tuple[int, float] = setting(default=(1, 2.0))
    many: tuple[int, ...] = setting(default=(), least=1, most=9)
    grid: tuple[tuple[int, int], ...] = setting(default=(), least=1)
    extra: dict[str, Any] = setting(default_factory=dict)
    inner: Inner = setting(default=Inner())


class Required(Settings):
    must: int = setting()
    may: int = setting(default=1)


class Together(Settings):
    low: int = setting(default=0)
    high: int = setting(default=1)

    def check(self) -> None:
        if self.low > self.high:
            raise SettingError("low", "must not be above high")


class Parent(Settings):
    together: Together = setting(default=Together())


def test_defaults_are_taken_and_values_converted():
    made = Outer(rate=2, pair=[3, 4], many=[1, 2], grid=[[1, 2], (3, 4)], extra={"a": 1})
    assert (made.count, made.share, made.on, made.text) == (3, None, False, "")
    assert (made.rate, type(made.rate)) == (2.0, float)
    assert made.pair == (3, 4.0)
    assert type(made.pair[1]) is float
    assert made.many == (1, 2)
    assert made.grid == ((1, 2), (3, 4))
    assert made.extra == {"a": 1}


def test_settings_are_frozen_and_named():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Outer().count = 4
    with pytest.raises(TypeError):
        Outer(3)
    with pytest.raises(TypeError):
        Outer(cuont=3)


def test_a_default_that_can_be_changed_is_made_anew():
    first, second = Outer(), Outer()
    first.extra["a"] = 1
    assert second.extra == {}
    given = {"a": 1}
    made = Outer(extra=given)
    given["b"] = 2
    assert made.extra == {"a": 1}


BAD = [
    ("count", "3", "a whole number"),
    ("count", 3.0, "a whole number"),
    ("count", True, "a whole number"),
    ("count", None, "a whole number"),
    ("count", [3], "a whole number"),
    ("count", -1, "at least 0"),
    ("count", 2**40 + 1, "at most"),
    ("count", 2**63, "too large"),
    ("count", 10**5000, "too large"),
    ("count", -(10**5000), "too large"),
    ("rate", "fast", "a number, not 'fast'"),
    ("rate", True, "a number"),
    ("rate", None, "a number"),
    ("rate", 0, "above 0"),
    ("rate", 10, "below 10"),
    ("rate", math.nan, "finite"),
    ("rate", math.inf, "finite"),
    ("rate", -math.inf, "finite"),
    ("rate", 10**30, "a number"),
    ("rate", 10**5000, "a number"),
    ("share", 1.5, "at most 1"),
    ("share", "half", "a number"),
    ("on", 1, "true or false"),
    ("on", "yes", "true or false"),
    ("text", 3, "a text"),
    ("text", None, "a text"),
    ("text", 10**5000, "a text"),
    ("pair", (1,), "2 values"),
    ("pair", (1, 2, 3), "2 values"),
    ("pair", (1.5, 2), "a whole number"),
    ("pair", 3, "2 values"),
    ("many", "12", "a list"),
    ("many", 3, "a list"),
    ("many", {1, 2}, "a list"),
    ("many", (1, "2"), "a whole number"),
    ("many", (1, 10), "at most 9"),
    ("many", (0,), "at least 1"),
    ("many", (True,), "a whole number"),
    ("grid", ((1, 2), (3,)), "2 values"),
    ("grid", ((1, 0),), "at least 1"),
    ("grid", (1, 2), "2 values"),
    ("extra", [1], "names with values"),
    ("extra", {1: 2}, "names with values"),
    ("extra", None, "names with values"),
    ("inner", {"depth": 2}, "a Inner"),
    ("inner", None, "a Inner"),
]


@pytest.mark.parametrize(("name", "value", "problem"), BAD, ids=lambda part: f"{type(part).__name__}")
def test_a_value_that_does_not_fit_is_told_by_its_name(name, value, problem):
    with pytest.raises(SettingError, match=f"^{name} .*{problem}") as caught:
        Outer(**{name: value})
    assert caught.value.setting == name
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("depth", [10, 500, 5000, 100_000])
def test_deep_nesting_is_told_as_any_other_wrong_value(depth):
    nested: Any = []
    for _ in range(depth):
        nested = [nested]
    for name in ("count", "many", "grid", "text", "inner"):
        with pytest.raises(SettingError, match=f"^{name} "):
            Outer(**{name: nested})
        with pytest.raises(SettingError, match=f"^{name} "):
            Outer.from_mapping({name: nested})


def test_a_choice_lists_what_there_is():
    assert Inner(name="fancy").name == "fancy"
    with pytest.raises(SettingError, match="name must be one of plain, fancy, not 'fanzy'"):
        Inner(name="fanzy")


def test_nested_settings_are_named_with_their_section():
    made = Outer.from_mapping({"count": 1, "inner": {"depth": 4}})
    assert made.inner == Inner(depth=4)
    with pytest.raises(SettingError, match=r"^inner\.depth must be at most 5, not 9$"):
        Outer.from_mapping({"inner": {"depth": 9}})
    with pytest.raises(SettingError, match=r"^inner\.depht is not a setting \(did you mean depth\?\)"):
        Outer.from_mapping({"inner": {"depht": 4}})
    with pytest.raises(SettingError, match=r"^model\.inner must be names with values, not 3"):
        Outer.from_mapping({"inner": 3}, where="model")


def test_unknown_names_list_the_valid_ones_and_suggest_the_closest():
    with pytest.raises(SettingError, match=r"^cuont is not a setting \(did you mean count\?\): there are count, rate,"):
        Outer.from_mapping({"cuont": 3})
    with pytest.raises(SettingError, match=r"^zzz is not a setting: there are count, rate,"):
        Outer.from_mapping({"zzz": 3})
    with pytest.raises(SettingError, match=r"^3 is not a setting"):
        Outer.from_mapping({3: 3})
    with pytest.raises(SettingError, match=r"^a is not a setting: there are none$"):
        check_names(["a"], [])
    check_names([], [])
    check_names(["a"], ["b", "a"])


@pytest.mark.parametrize("values", [None, [], "text", 3, [("count", 3)]])
def test_what_is_not_names_with_values_is_refused(values):
    with pytest.raises(SettingError, match="must be names with values"):
        Outer.from_mapping(values)


def test_what_must_be_given_is_missed():
    assert Required(must=2).may == 1
    with pytest.raises(SettingError, match=r"^must is missing$"):
        Required.from_mapping({"may": 3})
    with pytest.raises(SettingError, match=r"^part\.must is missing$"):
        Required.from_mapping({}, where="part")


def test_settings_that_do_not_go_together():
    with pytest.raises(SettingError, match=r"^low must not be above high$"):
        Together(low=3)
    with pytest.raises(SettingError, match=r"^together\.low must not be above high$"):
        Parent.from_mapping({"together": {"low": 3}})
    with pytest.raises(SettingError, match=r"^low "):
        Together().replace(low=3)


def test_replace_checks_again():
    assert Outer().replace(count=9).count == 9
    with pytest.raises(SettingError, match="count must be"):
        Outer().replace(count="9")


def test_fields_and_their_kinds():
    assert [field.name for field in fields(Inner)] == ["depth", "name"]
    assert kind(Outer, "share") is float
    assert kind(Outer, "inner") is Inner


# Any values: hundreds of random ones, the same in every run.


def random_settings(source: random.Random) -> Outer:
    return Outer(
        count=source.choice([0, source.randrange(2**40)]),
        rate=source.uniform(1e-9, 9.99),
        share=source.choice([None, 0.0, 1.0, source.random()]),
        on=source.random() < 0.5,
        text="".join(chr(source.randrange(1, 0xD800)) for _ in range(source.randrange(5))),
        pair=(source.randrange(-9, 9), source.uniform(-1e300, 1e300)),
        many=tuple(source.randrange(1, 10) for _ in range(source.randrange(4))),
        grid=tuple((source.randrange(1, 99), source.randrange(1, 99)) for _ in range(source.randrange(3))),
        extra={f"k{number}": source.choice([1, 0.5, "x", None, [1, 2]]) for number in range(source.randrange(3))},
        inner=Inner(depth=source.randrange(1, 6), name=source.choice(["plain", "fancy"])),
    )


def random_value(source: random.Random, depth: int = 3) -> Any:
    """Anything that YAML or JSON may give."""
    plain = [
        None,
        True,
        False,
        0,
        1,
        -1,
        2**62,
        2**63,
        10**25,
        0.5,
        -0.0,
        1e308,
        math.nan,
        math.inf,
        "",
        "l2",
        "3",
        "é",
    ]
    if depth == 0 or source.random() < 0.6:
        return source.choice(plain)
    parts = [random_value(source, depth - 1) for _ in range(source.randrange(4))]
    if source.random() < 0.5:
        return parts
    return {source.choice(["count", "depth", "name", "rate", "inner", "x"]): part for part in parts}


@pytest.mark.parametrize("seed", range(100))
def test_any_settings_survive_the_trip_through_json(seed):
    made = random_settings(random.Random(seed))
    mapping = made.to_mapping()
    assert Outer.from_mapping(mapping) == made
    assert Outer.from_mapping(json.loads(json.dumps(mapping))) == made


@pytest.mark.parametrize(
    "config", [Outer, TaskConfig, *MODELS.values(), ModelConfig], ids=lambda config: config.__name__
)
def test_any_mapping_gives_settings_or_a_setting_error(config):
    source = random.Random(config.__name__)
    names = [field.name for field in fields(config)] if config is not ModelConfig else ["name", "kernel", "iterations"]
    refused = longest = 0
    for _ in range(300):
        chosen = source.sample(names, min(len(names), source.randrange(4)))
        values = {name: random_value(source) for name in chosen}
        try:
            made = config.from_mapping(values)
        except SettingError as error:
            refused += 1
            longest = max(longest, len(str(error)))
        else:
            assert type(made).from_mapping(made.to_mapping() if config is not ModelConfig else values) is not None
    assert refused > 50
    assert longest < 1000


# The settings of the networks.


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_found_by_its_name(name):
    made = ModelConfig.from_mapping({"name": name, "reconstruction": False})
    assert type(made) is MODELS[name]
    assert made.reconstruction is False
    mapping = made.to_mapping()
    assert mapping["name"] == name
    assert ModelConfig.from_mapping(json.loads(json.dumps(mapping))) == made


def test_without_a_name_a_model_is_the_papers():
    assert ModelConfig.from_mapping({}) == CapsNetConfig()


@pytest.mark.parametrize("name", ["capsnett", None, 3, ["capsnet"], {"capsnet": 1}, ""])
def test_an_unknown_model_lists_those_there_are(name):
    with pytest.raises(SettingError, match=r"^model\.name must be one of capsnet, matrix, cnn, not "):
        ModelConfig.from_mapping({"name": name}, where="model")


@pytest.mark.parametrize("values", [None, 3, [], "capsnet"])
def test_a_model_that_is_no_mapping_is_refused(values):
    with pytest.raises(SettingError, match="must be names with values"):
        ModelConfig.from_mapping(values)


def test_a_setting_of_another_model_is_refused():
    with pytest.raises(SettingError, match=r"^model\.matrix_sizes is not a setting: there are reconstruction, layers"):
        ModelConfig.from_mapping({"name": "capsnet", "matrix_sizes": [1, 1, 1, 1]}, where="model")
    with pytest.raises(SettingError, match=r"^padding is not a setting"):
        CnnConfig.from_mapping({"padding": "same"})
    with pytest.raises(SettingError, match=r"^iterations must be at most 100"):
        MatrixConfig(iterations=10**9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"classes": ["one"]}, "classes must be at least 2, not 1"),
        ({"classes": []}, "classes must be at least 2, not 0"),
        ({"classes": 10}, "classes must be a list"),
        ({"mean": [0.1, 0.2]}, "mean must have one number, or one for each of 3 channels"),
        ({"std": [1.0, 1.0]}, "std must have one number"),
        ({"std": [0.0]}, "std must be at least 1e-06, not 0"),
        ({"labels_per_image": 4}, "labels_per_image must be at most 3"),
        ({"source_shape": [3, 19, 24]}, "source_shape"),
        ({"source_shape": [1, 24, 24]}, "source_shape"),
        ({"image_shape": [3, 20]}, "image_shape must be a list of 3 values"),
        ({"image_shape": [0, 20, 20]}, "image_shape must be at least 1"),
        ({"fit": "squeeze"}, "fit must be one of stretch, pad, crop"),
    ],
)
def test_a_task_that_cannot_be_is_refused(values, message):
    task = {"image_shape": [3, 20, 20], "classes": ["a", "b", "c"]}
    TaskConfig.from_mapping(task)
    with pytest.raises(SettingError, match=f"^{message}"):
        TaskConfig.from_mapping({**task, **values})


def test_numbers_of_numpy_become_numbers_of_python():
    """Which files can hold."""
    outer = Outer(count=np.int64(4), rate=np.logspace(-2, 0, 3)[1], on=np.bool_(True), extra={"a": np.float32(0.5)})
    assert outer == Outer(count=4, rate=0.1, on=True, extra={"a": 0.5})
    assert [type(value) for value in (outer.count, outer.rate, outer.on, outer.extra["a"])] == [int, float, bool, float]
