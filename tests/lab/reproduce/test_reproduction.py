"""Whole reproductions at the smoke budget: done, killed, stopped, spread over Ray. Each cell is a process."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from commands import command_environment
from torchcaps.cli.main import main
from torchcaps.lab.results import Results
from torchcaps.training.host import usable_cores
from torchcaps.training.result import RunResult

SMOKE = ("--budget", "smoke", "--out", "out", "--threads", "1")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def reproduce(*arguments: str) -> int:
    return main(["reproduce", *arguments])


def started(*arguments: str, safe: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, *(["-P"] if safe else []), "-m", "torchcaps", "reproduce", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=command_environment()
    )


def wait_for(pattern: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not list(Path().glob(pattern)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def result_of(cell: str) -> RunResult:
    return RunResult.read(Path("out/cells", cell, "result.json"))


def test_a_cell_that_is_done_is_not_run_again(capsys):
    assert reproduce("table", *SMOKE, "--only", "mnist/l2-fc") == 0
    result = Path("out/cells/mnist/l2-fc/seed-0/result.json")
    written = result.stat().st_mtime_ns
    assert not (result.parent / "checkpoints").exists()  # a finished cell needs none
    capsys.readouterr()
    assert reproduce("convergence", *SMOKE, "--only", "mnist/l2-fc", "multi-mnist/uniform") == 0
    told = capsys.readouterr().out
    assert "2 cells, of which 1 are done" in told
    assert "multi-mnist/uniform/seed-0: starts" in told
    assert "mnist/l2-fc/seed-0: starts" not in told
    assert result.stat().st_mtime_ns == written
    report = Path("out/report.md").read_text()
    assert "mnist/l2-fc/seed-0" in report
    assert "multi-mnist/uniform/seed-0" in report
    assert Path("out/pictures/convergence-multi-mnist.png").exists()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a cell outlives what started it")
def test_a_stopped_reproduction_goes_on_where_it_was(name, capsys):
    """Even if it is killed, what it had started stops by itself and leaves a checkpoint."""
    arguments = ("table", *SMOKE, "--only", "mnist/dr")
    process = started(*arguments)
    wait_for("out/cells/mnist/*/seed-0/checkpoints/step-*.safetensors", process)
    process.send_signal(signal.Signals[name])
    _, told = process.communicate(timeout=600)
    assert process.returncode == (-9 if name == "SIGKILL" else 130)
    assert "Traceback" not in told
    assert reproduce(*arguments) == 0
    assert "mnist/dr/seed-0: goes on" in capsys.readouterr().out
    assert "Continuing after step" in Path("out/cells/mnist/dr/seed-0.log").read_text()
    assert main(["train", "--recipe", "out/cells/mnist/dr/seed-0.yaml", "--out", "whole", "--threads", "1"]) == 0
    undisturbed = RunResult.read(Path("whole/result.json"))
    assert result_of("mnist/dr/seed-0").test_error_percent == undisturbed.test_error_percent


def test_everything_about_some_cells(capsys):
    """Reconstructions need cells of their own: without them there is a report all the same."""
    assert reproduce("all", *SMOKE, "--only", "multi-mnist/l1") == 0
    report = Path("out/report.md").read_text()
    assert "multi-mnist/l1/seed-0" in report
    measured = json.loads(Path("out/runtime.json").read_text())
    assert set(measured["seconds_per_100_steps"]) == {"dr", "l2", "l1", "l2-fc", "l1-fc", "uniform-fc"}
    assert "## Time per 100 steps" in report
    page = Path("out/report.md").read_bytes()
    Path("out/report.md").unlink()
    assert reproduce("report", "--from", "out") == 0
    assert Path("out/report.md").read_bytes() == page
    assert "## Reconstruction" not in report
    assert reproduce("runtime", "--budget", "cpu", "--out", "out", "--threads", "1") == 2
    assert "other settings" in capsys.readouterr().err
    shutil.rmtree("out/cells")
    assert reproduce("runtime", "--budget", "cpu", "--out", "out", "--threads", "1") == 2
    assert "results.csv has multi-mnist/l1/seed-0 trained with other settings" in capsys.readouterr().err
    Path("out/results.csv").unlink()
    assert reproduce("runtime", "--budget", "cpu", "--out", "out", "--threads", "1") == 2
    assert "measured at the budget smoke" in capsys.readouterr().err


def test_reconstruction():
    assert reproduce("reconstruction", *SMOKE) == 0
    numbers = json.loads(Path("out/reconstruction.json").read_text())
    assert 0 < numbers["images"] <= 100
    assert "pictures/reconstruction.png" in Path("out/report.md").read_text()


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_cells_are_spread_over_a_local_ray_with_two_workers():
    process = started("table", *SMOKE, "--only", "cifar-10/dr", "cifar-10/l2-fc", "--ray", "local")
    cells = Path("out/cells/cifar-10")
    most = 0
    while process.poll() is None:  # a log is there from the start of a cell, a result at its end
        most = max(most, len(list(cells.glob("*/seed-0.log"))) - len(list(cells.glob("*/seed-0/result.json"))))
        time.sleep(0.05)
    _, told = process.communicate()
    assert process.returncode == 0, told
    assert most == 2
    assert len(list(cells.glob("*/seed-0/result.json"))) == 2
    rows = Results.read(Path("out")).rows.values()
    assert len(rows) == 2
    assert all(0 <= row.views_error_percent <= 100 for row in rows)


def test_a_cell_trains_on_several_devices():
    assert reproduce("table", *SMOKE, "--only", "mnist/l2-fc", "--devices", "2") == 0
    assert result_of("mnist/l2-fc/seed-0").processes == 2


def test_the_list_tells_how_to_train_a_cell_elsewhere(capsys):
    assert reproduce("table", *SMOKE, "--only", "mnist/l2-fc", "--list") == 0
    name, _, command = capsys.readouterr().out.strip().partition(": torchcaps ")
    assert name == "mnist/l2-fc/seed-0"
    assert main(command.split()) == 0
    capsys.readouterr()
    assert reproduce("table", *SMOKE, "--only", "mnist/l2-fc", "--list") == 0
    assert "% test error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("table", *SMOKE, "--only", "imagenet"), "matches no cell"),
        (("table", "--budget", "smoke", "--out", "file", "--only", "mnist/dr"), "another --out"),
        (("table", *SMOKE, "--only", "mnist/dr", "--ray", "nowhere:1"), "Cannot reach Ray"),
        (("runtime", *SMOKE, "--only", "mnist"), "cells of its own"),
        (("report",), "go together"),
        (("table", *SMOKE, "--from", "out"), "go together"),
        (("report", "--from", "nowhere"), "There is no nowhere"),
        (("table", *SMOKE, "--only", "mnist/dr", "--accelerator", "nonsense"), "1 of 1 cells could not be trained"),
    ],
)
def test_bad_input_is_told(arguments, words, capsys):
    Path("file").write_text("here first")
    assert reproduce(*arguments) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told


def test_a_cell_that_no_ray_machine_can_hold_is_told(torchcaps):
    outcome = torchcaps("reproduce", "table", *SMOKE, "--only", "mnist/dr", "--ray", "local", "--devices", "500")
    assert outcome.returncode == 2, outcome.stderr
    assert "more than any of this Ray cluster has" in outcome.stderr


def test_two_at_once_share_the_work_and_report_no_failure():
    """Whoever finds a cell taken trains what is left, waits for the rest, and has the same report."""
    arguments = ("table", *SMOKE, "--only", "mnist/l2-fc", "mnist/uniform-fc")
    Path("out/cells/mnist/l2-fc").mkdir(parents=True)
    with FileLock("out/cells/mnist/l2-fc/seed-0.lock"):  # as if another trained it
        processes = [started(*arguments) for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            assert any("another process is training it" in line for line in process.stdout)
    outcomes = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outcomes
    assert "Traceback" not in "".join(trouble for _, trouble in outcomes)
    assert len(Results.read(Path("out")).rows) == 2
    logs = [Path("out/cells/mnist", name, "seed-0.log").read_text() for name in ("l2-fc", "uniform-fc")]
    assert [log.count("training in") for log in logs] == [0, 0]
    assert [len(re.findall(r"^\d{4}-\d\d-\d\d ", log, re.MULTILINE)) for log in logs] == [1, 1]  # each began once


def test_what_lies_in_the_current_folder_is_not_imported_by_a_cell():
    """Workers start with ``-P``, and so do the processes that they start themselves."""
    for name in ("yaml", "torch", "rich"):
        Path(f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    process = started("table", *SMOKE, "--only", "mnist/l2-fc", "--devices", "2", safe=True)
    _, told = process.communicate(timeout=600)
    assert process.returncode == 0, told
    assert result_of("mnist/l2-fc/seed-0").processes == 2


@pytest.mark.parametrize("command", ["bench", "reproduce"])
def test_help_does_not_import_torch(command):
    code = (
        f"import sys; from torchcaps.cli.main import main\ntry: main(['{command}', '--help'])\nexcept SystemExit: pass"
    )
    code += "\nassert not {'torch', 'yaml', 'matplotlib', 'rich'} & set(sys.modules), sorted(sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=command_environment())
    assert outcome.returncode == 0, outcome.stderr
    assert "--threads" in outcome.stdout
