"""Every model with every routing, precision and alternation takes two steps, or says in a sentence why it cannot."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from torchcaps import load
from torchcaps.errors import UserError
from torchcaps.routing.config import NAMES
from torchcaps.settings import fields
from torchcaps.training.config import AscentConfig, RunConfig, TrainingConfig
from torchcaps.training.fit import fit


def choices(settings: type, name: str) -> tuple[str, ...]:
    return next(field.metadata["choices"] for field in fields(settings) if field.name == name)


SIZES = {
    "capsnet": {"conv_channels": 4, "primary_capsules": 2},
    "matrix": {"matrix_sizes": [4, 2, 2, 2]},
    "cnn": {"conv_channels": 4, "second_channels": 4},
}
NETWORKS = [("capsnet", name) for name in NAMES] + [("matrix", "l2"), ("cnn", "l2")]
COMBINATIONS = [
    (model, routing, precision, alternation)
    for model, routing in NETWORKS
    for precision in choices(RunConfig, "precision")
    for alternation in choices(AscentConfig, "alternation")
    if alternation == "fused" or (model == "capsnet" and routing in ("l2", "l1"))  # elsewhere there is no ascent
]


@pytest.mark.parametrize(("model", "routing", "precision", "alternation"), COMBINATIONS)
def test_two_steps_or_a_sentence(tmp_path, model, routing, precision, alternation):
    run = {"precision": precision, "steps": 2, "batch_size": 4, "test_images": 8, "threads": 1, "accelerator": "cpu"}
    config = TrainingConfig.from_mapping(
        {
            "model": {"name": model, **SIZES[model]},
            "routing": {"name": routing},
            "ascent": {"alternation": alternation},
            "run": {**run, "pictures": False, "out": str(tmp_path / "run")},
        }
    )
    if precision == "16-mixed":
        with pytest.raises(UserError, match="16-mixed needs a GPU"):
            fit(config, console=Console(file=io.StringIO()))
        return
    network = load(fit(config, console=Console(file=io.StringIO())))
    assert all(bool(tensor.isfinite().all()) for tensor in network.state_dict().values())
    if model == "capsnet" and routing in ("l2", "l1"):
        coefficients = network.layers[-1].routing.coefficients
        assert not torch.equal(coefficients, torch.ones_like(coefficients))  # the ascent has moved them
