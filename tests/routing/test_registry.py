import inspect
import re
import sys

import pytest
import torch
from torch import Tensor

from torchcaps.cli.options import ROUTING_OPTIONS
from torchcaps.errors import UserError
from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.routing import ROUTINGS, Routing, Votes
from torchcaps.routing.config import NAMES, RoutingConfig, import_routing
from torchcaps.routing.registry import own_name
from torchcaps.settings import SettingError


class ThirdParty(Routing):
    """Has no settings."""

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return capsules_from_totals(votes.combine(0.5))


class Sharper(Routing):
    """Has a setting of its own, with a default of its own."""

    def __init__(self, *, iterations: int = 7, sharpness: float = 2.0) -> None:
        super().__init__()
        self.iterations = iterations
        self.sharpness = sharpness

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return capsules_from_totals(votes.combine(self.sharpness))


OWN = f"{__name__}:Sharper"


def arguments(routing: type[Routing]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(routing).parameters)


def test_the_names_known_without_torch_are_those_of_the_registry():
    assert tuple(ROUTINGS) == NAMES


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_entry_is_made_by_its_name(name):
    wanted = {"iterations": 2, "start": 0.5, "strength": 1e-3}
    settings = {key: value for key, value in wanted.items() if key in arguments(ROUTINGS[name])}
    routing = RoutingConfig(name=name, settings=settings).build()
    assert type(routing) is ROUTINGS[name]
    assert routing.settings == settings
    assert own_name(type(routing)) == name


@pytest.mark.parametrize("name", ROUTINGS)
def test_what_is_not_set_has_the_routings_own_default(name):
    made, alone = RoutingConfig(name=name).build(), ROUTINGS[name]()
    assert made.settings == {}
    for argument, parameter in arguments(ROUTINGS[name]).items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert getattr(made, argument, None) == getattr(alone, argument, None)


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(UserError, match="l2, l1, dynamic, uniform"):
        RoutingConfig(name="l3").build()
    with pytest.raises(UserError, match="l2, l1, dynamic, uniform"):
        import_routing("l3")


def test_a_routing_of_ones_own_is_named_by_module_and_class():
    assert import_routing(f"{__name__}:ThirdParty") is ThirdParty
    assert import_routing("l2") is None
    assert own_name(ThirdParty) == f"{__name__}:ThirdParty"
    assert type(RoutingConfig(name=f"{__name__}:ThirdParty").build(ThirdParty)) is ThirdParty


def test_a_routing_of_ones_own_keeps_its_own_defaults():
    routing = RoutingConfig(name=OWN, settings={"sharpness": 0.5}).build(Sharper)
    assert (routing.iterations, routing.sharpness) == (7, 0.5)


def test_the_class_given_does_not_replace_one_of_torchcaps():
    assert type(RoutingConfig(name="uniform").build(Sharper)) is ROUTINGS["uniform"]


@pytest.mark.parametrize(
    ("name", "own", "settings", "message"),
    [
        ("dynamic", None, {"iteration": 2}, r"iteration is not a setting \(did you mean iterations\?\)"),
        ("uniform", None, {"alpha": 2.0}, "alpha is not a setting: there are start"),
        (OWN, Sharper, {"sharpnes": 2}, r"did you mean sharpness\?\): there are iterations, sharpness"),
        (f"{__name__}:ThirdParty", ThirdParty, {"start": 2}, "start is not a setting: there are none"),
        (f"{__name__}:ThirdParty", ThirdParty, {"settings": 2}, "settings is not a setting: there are none"),
    ],
)
def test_an_unknown_setting_is_an_error_that_lists_the_valid_ones(name, own, settings, message):
    with pytest.raises(SettingError, match=message):
        RoutingConfig(name=name, settings=settings).build(own)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dynamic", {"iterations": 0}),
        ("dynamic", {"iterations": 2.5}),
        ("dynamic", {"iterations": True}),
        ("dynamic", {"iterations": "3"}),
        ("dynamic", {"iterations": None}),
        ("dynamic", {"iterations": 10**9}),
        ("em", {"iterations": 10**9}),
        ("em", {"beta_a": "high"}),
        ("em", {"decay": []}),
        ("clustering", {"alpha": float("inf")}),
        ("clustering", {"alpha": 0}),
        ("l2", {"start": "one"}),
        ("l2", {"start": [1.0]}),
        ("l1", {"strength": float("nan")}),
        ("l1", {"strength": {}}),
        ("uniform", {"start": float("nan")}),
        ("learned", {"start": 10**400}),
    ],
)
def test_a_setting_that_a_routing_cannot_have_is_refused_before_anything_is_built(name, settings):
    (setting,) = settings
    with pytest.raises(SettingError, match=rf"routing|{setting}"):
        RoutingConfig(name=name, settings=settings).build()


def test_a_name_alone_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingError, match=re.escape("load(path, routing=Class)")):
        RoutingConfig(name="stranger:Net").build()
    assert "stranger" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [("no_such_module:X", "No module"), ("torchcaps.routing:X", "no attribute"), ("pathlib:Path", "not a subclass")],
)
def test_a_routing_that_cannot_be_loaded_says_why(name, message):
    with pytest.raises(UserError, match=message):
        import_routing(name)


@pytest.mark.parametrize("option", ROUTING_OPTIONS)
def test_options_of_the_command_line_are_arguments_of_some_routing(option):
    kind, _ = ROUTING_OPTIONS[option]
    found = [arguments(routing)[option] for routing in ROUTINGS.values() if option in arguments(routing)]
    assert found
    for parameter in found:
        assert type(parameter.default) is kind


@pytest.mark.parametrize("name", ROUTINGS)
def test_settings_are_enough_to_make_a_routing_again(name):
    routing = RoutingConfig(name=name).build()
    again = type(routing)(**routing.settings)
    layers = []
    for made in (routing, again):
        torch.manual_seed(0)
        layers.append(CapsuleLayer(6, 4, 5, 8, made))
    poses = torch.randn(2, 6, 4)
    torch.testing.assert_close(layers[0](poses), layers[1](poses), rtol=0, atol=0)
