"""The contract, run on every routing of the registry and on the example of a third party's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from commands import TINY_FLAGS, command_environment
from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.routing import ROUTINGS, Routing, SharedRouting, Votes
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


class Coupled(Routing):
    """In evaluation, the greatest activation of the batch becomes 1."""

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        capsules = capsules_from_totals(votes.combine(1.0))
        if self.training:
            return capsules
        return capsules._replace(activations=capsules.activations / capsules.activations.amax())


class Unfoldable(SharedRouting):
    """Says that its coefficients are shared, and uses others."""

    def connect(self, inputs: int, outputs: int, output_size: int) -> None:
        self.coefficients = nn.Parameter(torch.ones(inputs, outputs))

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return capsules_from_totals(votes.combine(self.coefficients.abs()))


class HalfDetached(SharedRouting):
    """Its coefficients get half the gradient they should."""

    def connect(self, inputs: int, outputs: int, output_size: int) -> None:
        self.coefficients = nn.Parameter(torch.ones(inputs, outputs))

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return capsules_from_totals(votes.combine((self.coefficients + self.coefficients.detach()) / 2))


class Stubborn(Routing):
    """Sees one input capsule only, and hardly that."""

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        chosen = torch.zeros(votes.shape[1:3], device=activations.device, dtype=activations.dtype)
        chosen[0] = 1e-6
        return capsules_from_totals(votes.combine(chosen).detach() + 0 * votes.combine(1.0))


@pytest.mark.parametrize(
    ("routing", "check"),
    [
        (Careless, "batch_independence"),
        (Coupled, "batch_independence"),
        (Unbounded, "shapes"),
        (Unfoldable, "folding"),
        (HalfDetached, "gradients"),
        (Stubborn, "learning"),
    ],
)
def test_a_routing_that_breaks_the_contract_is_found_out(routing, check):
    with pytest.raises(AssertionError, match=check.replace("_", " ")):
        check_routing(routing, only=[check])


def test_a_check_that_does_not_exist_is_told():
    with pytest.raises(ValueError, match="unknown check 'spelling': choose from shapes"):
        check_routing(ROUTINGS["uniform"], only=["spelling"])


def test_the_guide_can_be_followed(tmp_path):
    """Its code, saved under the names it gives, does what it says."""
    guide = (EXAMPLES.parent / "docs/adding-a-routing.md").read_text()
    for name in ("half_routing.py", "check.py"):
        code = re.search(rf"`{name}`.*?```python\n(.*?)```", guide, re.DOTALL)
        assert code, name
        (tmp_path / name).write_text(code[1])
    checked = subprocess.run([sys.executable, "check.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert checked.returncode == 0, checked.stderr
    command = re.search(r"^torchcaps (train --routing half_routing:\S+)$", guide, re.MULTILINE)
    assert command
    trained = subprocess.run(
        [sys.executable, "-m", "torchcaps", *command[1].split(), *TINY_FLAGS, "--steps", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env=command_environment(),
    )
    assert trained.returncode == 0, trained.stderr


def test_the_example_keeps_the_contract_and_trains_from_the_command_line(tmp_path):
    """As its docstring says: from its own folder, with the installed command."""
    checked = subprocess.run(
        [sys.executable, "median_routing.py"], cwd=EXAMPLES, capture_output=True, text=True, timeout=600
    )
    assert checked.returncode == 0, checked.stderr
    command = [str(Path(sys.executable).with_name("torchcaps")), "train", "--routing", "median_routing:MedianRouting"]
    flags = [*TINY_FLAGS, "--steps", "3", "--out", str(tmp_path / "run")]
    trained = subprocess.run(
        [*command, *flags], cwd=EXAMPLES, capture_output=True, text=True, timeout=600, env=command_environment()
    )
    assert trained.returncode == 0, trained.stderr
