"""Kills, signals, full disks and races: nothing is lost, and one sentence says what happened."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import command_environment
from hostile.kills import LIMIT, RUN, finished, kill_at_random, train
from torchcaps.cli.main import main
from torchcaps.storage import read_tensors, write_tensors
from torchcaps.training.files import read_config

pytestmark = pytest.mark.timeout(1200)
STEPS = [*RUN, "--steps", "12"]


def sentence(told: str) -> str:
    """The one message of a command that went wrong; nothing may look like a crash."""
    assert "Traceback" not in told, told
    assert "Something went wrong" not in told, told
    lines = [line for line in told.splitlines() if line.startswith("torchcaps: ")]
    assert len(lines) == 1, told
    return lines[0]


def test_runs_killed_at_random_end_with_the_same_bits(tmp_path):
    done, broken = kill_at_random(tmp_path, seed=10, kills=2)
    assert not broken, "\n".join(broken)
    assert done["kills"] == 2


def caught(process: subprocess.Popen[str], number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_start_is_answered_in_a_sentence(tmp_path, number):
    process = train(*STEPS, "--out", tmp_path / "run")
    while not caught(process, signal.SIGTERM):  # Python itself handles SIGINT from earlier on
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    time.sleep(random.Random(number).uniform(0, 2))  # wherever that is: importing, reading data, building
    process.send_signal(number)
    _, told = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number, told
    assert "Stopped." in sentence(told)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no such signal")
def test_what_nohup_asks_for_is_respected(tmp_path):
    program = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = ["-c", program, "-P", "-m", "torchcaps", "train", *STEPS, "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=command_environment()
    )
    while process.poll() is None and not (tmp_path / "run" / "result.json").exists():
        process.send_signal(signal.SIGHUP) if (tmp_path / "run" / "config.yaml").exists() else None
        time.sleep(0.05)
    _, told = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, told


def limited(size: int) -> None:
    """No file may grow beyond this, which a program sees as it sees a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_is_told_and_loses_nothing(tmp_path):
    finished(*STEPS, "--out", tmp_path / "undisturbed")
    largest = max(path.stat().st_size for path in (tmp_path / "undisturbed" / "checkpoints").iterdir())
    folder = tmp_path / "run"
    command = [sys.executable, "-P", "-m", "torchcaps", "train"]
    full = subprocess.run(
        [*command, *STEPS, "--out", str(folder)],
        capture_output=True,
        text=True,
        env=command_environment(),
        preexec_fn=lambda: limited(largest // 2),
    )
    assert full.returncode == 2
    assert "No space left" in sentence(full.stderr)
    assert not list(folder.rglob("*.part"))
    finished("--resume", folder)
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "undisturbed/model.safetensors").read_bytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
def test_an_output_that_cannot_be_written_is_told():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-m", "torchcaps", "data", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=command_environment())
    assert done.returncode == 2
    assert "No space left" in sentence(done.stderr)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a folder that nobody can write to, not even root")
def test_a_folder_that_cannot_be_written_is_told(torchcaps):
    done = torchcaps("train", *STEPS, "--out", "/proc/torchcaps-run", timeout=LIMIT)
    assert done.returncode == 2
    assert "Cannot write to /proc/torchcaps-run" in sentence(done.stderr)


def test_of_two_runs_that_start_in_one_folder_one_is_refused(tmp_path):
    folder = tmp_path / "run"
    both = [train(*STEPS, "--seed", seed, "--out", folder) for seed in (1, 2)]
    told = [process.communicate(timeout=LIMIT)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], told
    loser = next(number for number, process in enumerate(both) if process.returncode)
    message = sentence(told[loser])
    assert any(words in message for words in ("already has a run", "Another process", "is not empty")), message
    result = json.loads((folder / "result.json").read_text())
    assert result["seed"] == read_config(folder / "config.yaml").run.seed == 2 - loser


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("which", ["first", "second"])
def test_a_killed_process_of_two_ends_the_run_and_leaves_none_behind(tmp_path, which):
    folder = tmp_path / "run"
    process = train(*RUN, "--steps", 400, "--devices", 2, "--accelerator", "cpu", "--out", folder)
    while not list(folder.glob("checkpoints/*.safetensors")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    other = next(child for child in children if b"torchcaps" in Path(f"/proc/{child}/cmdline").read_bytes())
    os.kill(process.pid if which == "first" else other, signal.SIGKILL)
    _, told = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert "Traceback" not in told, told
    end = time.monotonic() + LIMIT
    while Path(f"/proc/{other}").exists() and "Z" not in Path(f"/proc/{other}/stat").read_text().split()[2]:
        assert time.monotonic() < end, "the other process goes on alone"
        time.sleep(0.05)


def main_in(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """A command in this process, which has torch imported already: its exit code, and what it said of mistakes."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.err if code else said.out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", *STEPS, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.mark.parametrize("damage", [b'{"steps": 12, \0', b"[]", b"\xff\xfe", b""])
def test_damaged_records_are_set_aside_and_made_anew(run, capsys, damage):
    before = (run / "model.safetensors").read_bytes()
    (run / "result.json").write_bytes(damage)
    (run / "metrics.csv").write_bytes((run / "metrics.csv").read_bytes()[:-7] + b"\0\xff")
    code, said = main_in(capsys, "train", "--resume", run)
    assert code == 0, said
    assert json.loads((run / "result.json").read_text())["steps"] == 12
    assert (run / "model.safetensors").read_bytes() == before
    assert (run / "result.json.damaged").read_bytes() == damage


@pytest.mark.parametrize("setting", ["gamma: 0.001", "seed: 0", "average: 0.9"])
def test_other_settings_than_those_of_the_network_are_refused(run, capsys, setting):
    name, _, value = setting.partition(": ")
    text = (run / "config.yaml").read_text()
    assert f"  {setting}\n" in text
    (run / "config.yaml").write_text(text.replace(f"  {setting}\n", f"  {name}: {1 if value == '0' else 0.5}\n"))
    code, said = main_in(capsys, "evaluate", run, "--threads", 1)
    assert code == 2
    assert name in sentence(said)
    (run / "result.json").unlink()
    code, said = main_in(capsys, "train", "--resume", run)
    assert code == 2
    assert name in sentence(said)


def test_settings_cut_at_a_line_end_are_refused(run, capsys):
    (run / "result.json").unlink()
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text[: text.index("\nrun:") + 1])
    code, said = main_in(capsys, "train", "--resume", run)
    assert code == 2
    assert "config.yaml is not the one" in sentence(said)


@pytest.mark.parametrize("damage", ["link", "pipe", "folder", "foreign", "torn"])
def test_unreadable_and_foreign_checkpoints_are_passed_over(run, tmp_path, capsys, damage):
    before = (run / "model.safetensors").read_bytes()
    newest = sorted((run / "checkpoints").iterdir())[-1]
    tensors, state = read_tensors(newest)
    content = newest.read_bytes()
    newest.unlink()
    if damage == "link":
        newest.symlink_to("nowhere")
    elif damage == "pipe":
        os.mkfifo(newest)
    elif damage == "folder":
        newest.mkdir()
    elif damage == "foreign":
        write_tensors(newest, tensors, {**state, "settings": {**state["settings"], "run.seed": 77}})
    else:
        newest.write_bytes(content[:-100])
    (run / "result.json").unlink()
    code, said = main_in(capsys, "train", "--resume", run)
    assert code == 0, said
    assert "Going back to the checkpoint before it" in said
    assert (run / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("words", [["train"], ["predict", "x", "y"], ["evaluate", "x"], ["bench"]])
def test_threads_beyond_reason_are_refused(capsys, words):
    try:
        code = main([*words, "--threads", "100000"])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert "--threads" in capsys.readouterr().err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a little; skipped where none can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_run_goes_on_when_a_full_disk_has_room_again(whole, small_disk, capsys):
    folder = small_disk / "run"
    code, said = main_in(capsys, "train", *STEPS, "--out", folder)
    assert code == 2
    assert "No space left" in sentence(said)
    assert not list(folder.rglob("*.part"))
    subprocess.run(["mount", "-o", "remount,size=500m", str(small_disk)], check=True)
    code, said = main_in(capsys, "train", "--resume", folder)
    assert code == 0, said
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
