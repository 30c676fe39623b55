import dataclasses
from pathlib import Path

import pytest

from torchcaps.errors import UserError
from torchcaps.lab.reproduce.budgets import BUDGETS, Budget, differences
from torchcaps.lab.reproduce.cells import all_cells, select
from torchcaps.lab.reproduce.paper import BENCHMARKS, METHODS
from torchcaps.lab.results import all_settings
from torchcaps.settings import SettingError
from torchcaps.training.config import RunConfig, TrainingConfig
from torchcaps.training.files import read_config
from torchcaps.training.folder import RunFolder

ROOT = Path("cells")


def names(cells) -> list[str]:
    return [cell.name for cell in cells]


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_budget_has_the_whole_table(budget):
    found = {name.rpartition("/")[0] for name in names(all_cells(budget, ROOT))}
    with_and_without = {"dr", "l2", "l1", "l2-fc", "l1-fc", "uniform-fc"}
    expected = {f"{data}/{method}" for data in ("mnist", "fashion-mnist") for method in with_and_without}
    expected |= {f"cifar-10/{method}" for method in ("dr", "l2-fc", "l1-fc", "uniform-fc")}
    expected |= {f"multi-mnist/{method}" for method in ("dr", "l2", "l1", "uniform")}
    assert found == expected


@pytest.mark.parametrize("budget", BUDGETS)
def test_cells_differ_in_nothing_but_the_method_where_methods_are_compared(budget):
    for cell in all_cells(budget, ROOT):
        method = METHODS[cell.method]
        assert cell.config.routing.name == method.routing
        assert cell.config.model.reconstruction == (cell.benchmark.decoder and not method.title.endswith("/FC"))
        assert cell.config.run.seed == cell.seed
        assert cell.config.run.steps or cell.config.run.epochs
        assert cell.total_steps > 0
        if budget == "paper":
            assert cell.config.data.validation == 0  # all training images
        if budget != "smoke":
            assert cell.config.data.name == cell.benchmark.data


def test_the_papers_budget_has_the_papers_iterations():
    steps = {cell.benchmark.data: cell.config.run.steps for cell in all_cells("paper", ROOT)}
    assert steps == {"mnist": 99_000, "fashion-mnist": 298_500, "cifar-10": 232_500, "multi-mnist": 200_000}


def test_seeds():
    cells = all_cells("cpu", ROOT)
    assert {cell.seed for cell in cells if cell.name.startswith("fashion-mnist/uniform-fc/")} == {0, 1, 2}
    assert {cell.seed for cell in cells if cell.name.startswith("mnist/l1-fc/")} == {0, 1, 2}
    assert {cell.seed for cell in cells if cell.benchmark.data == "multi-mnist"} == {0}
    assert {cell.seed for cell in all_cells("cpu", ROOT, seeds=2, first_seed=5)} == {5, 6}
    seeds = [cell.seed for cell in all_cells("cpu", ROOT, seeds=2)]
    assert seeds == sorted(seeds)  # one seed of everything before the second of anything


def test_a_selection_by_data_method_and_seed():
    cells = all_cells("cpu", ROOT)
    assert names(select(cells, [])) == names(cells)
    assert {cell.benchmark.data for cell in select(cells, ["mnist"])} == {"mnist"}
    assert {cell.method for cell in select(cells, ["L2-FC"])} == {"l2-fc"}
    assert names(select(cells, ["fashion-mnist/dr/seed-1"])) == ["fashion-mnist/dr/seed-1"]
    with pytest.raises(UserError, match="matches no cell"):
        select(cells, ["mnist", "cifar-10/l2"])


def test_a_cell_refuses_what_was_trained_otherwise(tmp_path):
    cell = all_cells("smoke", tmp_path)[0]
    RunFolder.create(cell.folder.path, TrainingConfig(run=RunConfig(steps=3)))
    with pytest.raises(UserError, match="other settings"):
        cell.check_settings()


def test_a_cells_recipe_is_all_that_is_needed_to_train_it(tmp_path):
    for cell in all_cells("cpu", tmp_path):
        cell.write_recipe()
        assert read_config(cell.recipe) == cell.config


def test_what_differs_from_the_paper_is_found_out():
    benchmark = BENCHMARKS["mnist"]
    paper, cpu = (all_settings(BUDGETS[name].config(benchmark, "l2", 3)) for name in ("paper", "cpu"))
    assert differences(paper, benchmark, "l2") == {}
    changed = differences(cpu, benchmark, "l2")
    assert changed["optimiser.schedule"][0] == "staircase"
    assert "routing.name" not in changed
    assert "run.seed" not in changed


def test_one_recipe_serves_all_methods_but_hides_no_mistake():
    def budget(**settings: float) -> Budget:
        return Budget("", lambda benchmark, method: {"routing": {"name": "l2", "settings": settings}})

    benchmark = BENCHMARKS["mnist"]
    assert budget(strength=0.1).config(benchmark, "l1", 0).routing.settings == {"strength": 0.1}
    assert budget(strength=0.1).config(benchmark, "dr", 0).routing.settings == {}
    with pytest.raises(SettingError, match="strenth"):
        budget(strenth=0.1).config(benchmark, "dr", 0).routing.build()


def test_the_length_of_a_cell_may_be_given_in_epochs():
    cell = all_cells("cpu", ROOT)[0]
    config = cell.config.replace(run=RunConfig(epochs=2, batch_size=128))
    assert dataclasses.replace(cell, config=config).total_steps == 2 * (60_000 // 128)


def test_how_others_ascend_is_no_setting_of_a_cell_that_does_not():
    def recipe(gamma: float) -> Budget:
        return Budget("", lambda benchmark, method: {"data": {"name": benchmark.data}, "ascent": {"gamma": gamma}})

    benchmark = BENCHMARKS["fashion-mnist"]
    for method, changes in {"dr": False, "uniform-fc": False, "l2": True, "l1-fc": True}.items():
        gentle, strong = (recipe(gamma).config(benchmark, method, 0) for gamma in (0.01, 0.1))
        assert (gentle != strong) is changes
