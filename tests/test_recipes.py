import json
from pathlib import Path

import pytest
import torch
from torchcaps.recipes import find_recipe, recipe_names
from torchcaps.train import TrainOptions, fit, read_options

from torchcaps.data import DataSet, ImageSplit, OverlappingDigits
from torchcaps.errors import UserError

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

OURS = {"mnist-short", "fashion-mnist-short", "mnist-three-layers", "mnist-matrix", "mnist-cnn"}
OURS |= {f"{data}-cpu" for data in ("mnist", "fashion-mnist", "cifar-10", "multi-mnist")}


def pretend(name: str, **request: object) -> DataSet:
    """A data set of the right shape that needs no download."""
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
        options = TrainOptions(**read_options(find_recipe(name)))
        found.append((options.data, options.routing, options.reconstruction))
    assert sorted(found) == sorted(TABLE)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_runs(name, tmp_path, monkeypatch):
    monkeypatch.setattr("torchcaps.train.plan.load", pretend)
    recipe = read_options(find_recipe(name))
    options = TrainOptions(
        **{**recipe, "epochs": None, "steps": 2, "batch_size": 4, "out": str(tmp_path / "run"), "threads": 1}
    )
    folder = fit(options)
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == 2
    assert 0 <= result["test_error_percent"] <= 100


def test_a_recipe_is_found_by_name_or_path(tmp_path):
    assert find_recipe("mnist-l2") == find_recipe("mnist-l2.yaml")
    own = tmp_path / "own.yaml"
    own.write_text("data: digits\n")
    assert find_recipe(str(own)) == Path(own)
    with pytest.raises(UserError, match=r"one of .*mnist-l2"):
        find_recipe("mnist-l3")
