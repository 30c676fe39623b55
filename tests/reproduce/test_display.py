import io

from rich.console import Console
from torchcaps.reproduce.cells import all_cells
from torchcaps.reproduce.display import CellDisplay
from torchcaps.train import RunFolder

from pretend import finish


def display_of(cells, **console) -> tuple[CellDisplay, io.StringIO]:
    shown = io.StringIO()
    return CellDisplay(Console(file=shown, width=120, **console), cells), shown


def test_the_time_left_is_taken_from_the_most_similar_cells(tmp_path):
    cells = [cell for cell in all_cells("cpu", tmp_path, seeds=2) if cell.benchmark.data in ("mnist", "cifar-10")]
    display, shown = display_of([cell for cell in cells if cell.method in ("dr", "l2-fc")])
    done = cells[0]
    assert done.name == "mnist/dr/seed-0"
    assert {cell.options.steps for cell in display._cells} == {done.options.steps}
    finish(done, 1.0, {done.options.steps: 1.0}, seconds=900)
    display.finished(done, None)
    assert "1 of 8 cells are done, about 1 h 45 min left" in shown.getvalue()
    display.side_by_side = 2
    display.finished(done, None)
    assert "1 of 8 cells are done, about 52 min left" in shown.getvalue()


def test_a_terminal_has_a_bar_for_everything_and_for_each_cell_that_has_begun(tmp_path):
    cells = [cell for cell in all_cells("cpu", tmp_path) if cell.benchmark.data == "mnist"]
    begun = RunFolder.create(cells[1].folder.path, cells[1].options)
    begun.append_metrics({"step": 300, "seconds": 100.0})
    display, shown = display_of(cells, force_terminal=True)
    with display:
        pass
    assert "all cells" in shown.getvalue()
    assert "0/6 cells" in shown.getvalue()
    assert f"300/{cells[1].options.steps}" in shown.getvalue()
