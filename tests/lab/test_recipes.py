from pathlib import Path

import pytest
import torch

from torchcaps.data.config import DataConfig
from torchcaps.data.datasets import DataSet
from torchcaps.data.splits import ImageSplit, OverlappingDigits
from torchcaps.errors import UserError
from torchcaps.training.files import find_recipe, read_config, recipe_names
from torchcaps.training.fit import fit
from torchcaps.training.result import RunResult

# name, routing, reconstruction: the rows of the paper's table, and its text on overlapping digits
TABLE = [
    *(
        (data, routing, True)
        for data in ("mnist", "fashion-mnist", "multi-mnist")
        for routing in ("dynamic", "l2", "l1")
    ),
    *((data, routing, False) for data in ("mnist", "fashion-mnist") for routing in ("l2", "l1")),
    *(("cifar-10", routing, False) for routing in ("dynamic", "l2", "l1")),
]

OURS = {"mnist-box", "mnist-short", "fashion-mnist-short", "mnist-three-layers", "mnist-matrix", "mnist-cnn"}
OURS |= {f"{data}-cpu" for data in ("mnist", "fashion-mnist", "cifar-10", "multi-mnist")}


def pretend(config: DataConfig) -> DataSet:
    """A data set of the right shape that needs no download."""
    name = config.name
    shape = (3, 32, 32) if name == "cifar-10" else (1, 28, 28)
    pixels = torch.randint(256, (40, *shape), dtype=torch.uint8)
    labels = torch.arange(40) % 10
    if name == "multi-mnist":
        splits = [OverlappingDigits(pixels, labels, name=part, copies=2) for part in ("train", "test")]
    else:
        splits = [ImageSplit(pixels, labels), ImageSplit(pixels, labels)]
    mean = (0.5,) * shape[0]
    return DataSet(name, tuple("0123456789"), splits[0], None, splits[1], mean, mean)


def test_there_is_one_recipe_for_each_row_of_the_papers_table():
    found = []
    for name in recipe_names():
        if name in OURS:
            continue
        config = read_config(find_recipe(name))
        found.append((config.data.name, config.routing.name, config.model.reconstruction))
    assert sorted(found) == sorted(TABLE)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_runs(name, tmp_path, monkeypatch):
    monkeypatch.setattr(DataConfig, "load", pretend)
    config = read_config(find_recipe(name))
    run = config.run.replace(epochs=None, steps=2, batch_size=4, out=str(tmp_path / "run"), threads=1)
    result = RunResult.read(fit(config.replace(run=run)) / "result.json")
    assert result.steps == 2
    assert 0 <= result.test_error_percent <= 100


def test_a_recipe_is_found_by_name_or_path(tmp_path):
    assert find_recipe("mnist-l2") == find_recipe("mnist-l2.yaml")
    own = tmp_path / "own.yaml"
    own.write_text("data: {name: digits}\n")
    assert find_recipe(str(own)) == Path(own)
    with pytest.raises(UserError, match=r"one of .*mnist-l2"):
        find_recipe("mnist-l3")
