import pytest
from torch import Tensor

from torchcaps.errors import UserError
from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.routing import ROUTINGS, Routing, Votes, make_routing


class ThirdParty(Routing):
    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return capsules_from_totals(votes.combine(0.5))


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_entry_is_made_by_its_name(name):
    assert type(make_routing(name, iterations=2, start=0.5, strength=1e-3)) is ROUTINGS[name]


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(UserError, match="l2, l1, dynamic, uniform"):
        make_routing("l3")


def test_a_routing_of_ones_own_is_named_by_module_and_class():
    assert type(make_routing(f"{__name__}:ThirdParty")) is ThirdParty


@pytest.mark.parametrize(
    ("name", "message"),
    [("no_such_module:X", "No module"), ("torchcaps.routing:X", "no attribute"), ("pathlib:Path", "not a subclass")],
)
def test_a_routing_that_cannot_be_loaded_says_why(name, message):
    with pytest.raises(UserError, match=message):
        make_routing(name)
