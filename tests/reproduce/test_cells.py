from pathlib import Path

import pytest
from torchcaps.reproduce.budgets import BUDGETS, differences
from torchcaps.reproduce.cells import all_cells, select
from torchcaps.reproduce.paper import BENCHMARKS, METHODS

from torchcaps.errors import UserError

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
        assert cell.options.routing == method.routing
        assert cell.options.reconstruction == (cell.benchmark.decoder and not method.title.endswith("/FC"))
        assert cell.options.seed == cell.seed
        assert cell.options.steps
        assert cell.options.validation == 0  # the final runs use all training images
        if budget != "smoke":
            assert cell.options.data == cell.benchmark.data


def test_the_papers_budget_has_the_papers_iterations():
    steps = {cell.benchmark.data: cell.options.steps for cell in all_cells("paper", ROOT)}
    assert steps == {"mnist": 99_000, "fashion-mnist": 298_500, "cifar-10": 232_500, "multi-mnist": 200_000}


def test_seeds():
    assert {cell.seed for cell in all_cells("cpu", ROOT) if cell.benchmark.data == "fashion-mnist"} == {0, 1, 2}
    assert {cell.seed for cell in all_cells("cpu", ROOT) if cell.benchmark.data == "mnist"} == {0}
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
    from torchcaps.train import RunFolder, TrainOptions

    cell = all_cells("smoke", tmp_path)[0]
    RunFolder.create(cell.folder.path, TrainOptions(steps=3))
    with pytest.raises(UserError, match="other settings"):
        cell.check_settings()


def test_a_cells_recipe_is_all_that_is_needed_to_train_it(tmp_path):
    from torchcaps.train import TrainOptions, read_options

    for cell in all_cells("cpu", tmp_path):
        cell.write_recipe()
        assert TrainOptions(**read_options(cell.recipe)) == cell.options


def test_what_differs_from_the_paper_is_found_out():
    benchmark = BENCHMARKS["mnist"]
    assert differences(BUDGETS["paper"], benchmark, "l2") == {}
    changed = differences(BUDGETS["cpu"], benchmark, "l2")
    assert changed["steps"][0] == 99_000
    assert "routing" not in changed
