"""The contract, run on every routing of the registry and on the example of a third party's."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from commands import TINY_FLAGS, command_environment
from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.routing import ROUTINGS, Routing, Votes
from torchcaps.testing import CONTRACT, check_routing

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing_keeps_the_contract(name, check):
    check_routing(ROUTINGS[name], only=[check])


class Careless(Routing):
    """Normalises over the batch, so that an image's neighbours change its result."""

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        totals = votes.combine(1.0)
        return capsules_from_totals(totals / totals.std(0, keepdim=True).clamp_min(1e-3))


class Unbounded(Routing):
    """Returns activations that are no probabilities."""

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        totals = votes.combine(1.0)
        return Capsules(totals, 2 + torch.linalg.vector_norm(totals, dim=-1), totals)


@pytest.mark.parametrize(("routing", "check"), [(Careless, "batch_independence"), (Unbounded, "shapes")])
def test_a_routing_that_breaks_the_contract_is_found_out(routing, check):
    with pytest.raises(AssertionError, match=check.replace("_", " ")):
        check_routing(routing, only=[check])


def test_the_example_keeps_the_contract_and_trains_from_the_command_line(tmp_path):
    """As its docstring says: from its own folder, with the installed command."""
    checked = subprocess.run(
        [sys.executable, "median_routing.py"], cwd=EXAMPLES, capture_output=True, text=True, timeout=120
    )
    assert checked.returncode == 0, checked.stderr
    command = [str(Path(sys.executable).with_name("torchcaps")), "train", "--routing", "median_routing:MedianRouting"]
    flags = [*TINY_FLAGS, "--steps", "3", "--out", str(tmp_path / "run")]
    trained = subprocess.run(
        [*command, *flags], cwd=EXAMPLES, capture_output=True, text=True, timeout=120, env=command_environment()
    )
    assert trained.returncode == 0, trained.stderr
