"""Runs that are killed at random moments, as often as wanted, and must end with the same bits as one that was not."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from commands import command_environment

RUN = [
    *("--conv-channels", "4", "--primary-capsules", "2", "--batch-size", "32", "--threads", "1", "--no-pictures"),
    *("--steps", "40", "--log-every", "3", "--checkpoint-every", "2", "--evaluate-every", "15", "--test-images", "32"),
    *("--average", "0.9", "--ascent", "adam", "--gamma", "1e-3", "--validation", "50", "--keep", "best"),
]
LIMIT = 600  # seconds, of a command on a busy machine


def train(*arguments: object) -> subprocess.Popen[str]:
    """A training in a process of its own."""
    command = [sys.executable, "-P", "-m", "torchcaps", "train", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=command_environment()
    )


def finished(*arguments: object) -> None:
    process = train(*arguments)
    _, told = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, told


def kill_at_random(
    folder: Path, seed: int, kills: int, *, seconds: float = 10**9, say: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, int], list[str]]:
    """Kill runs at random moments until there were this many kills; each run is killed up to four times.

    Returns:
        how many kills there were in how many runs, and what was wrong.
    """
    source = random.Random(seed)
    undisturbed = folder / "undisturbed"
    started = time.monotonic()
    finished(*RUN, "--out", undisturbed)
    length = time.monotonic() - started  # of a whole run, by which the moments are chosen
    expected = (undisturbed / "model.safetensors").read_bytes()
    done, runs, broken = 0, 0, []
    while done < kills and time.monotonic() - started < seconds:
        place = folder / f"run-{runs}"
        for _ in range(source.randint(1, min(4, kills - done))):
            arguments = ["--resume", place] if (place / "config.yaml").exists() else [*RUN, "--out", place]
            process = train(*arguments)
            _wait(process, place, source, length)
            if process.poll() is None:
                process.kill()
                done += 1
            _, told = process.communicate()
            if process.returncode > 0:
                broken.append(f"kill {done} of seed {seed}: {told}")
        last = train("--resume", place) if (place / "config.yaml").exists() else train(*RUN, "--out", place)
        _, told = last.communicate(timeout=LIMIT)
        if last.returncode or (place / "model.safetensors").read_bytes() != expected:
            broken.append(f"run {runs} of seed {seed} ended otherwise: {told}")
        left = [path.name for path in place.rglob("*") if path.name.endswith((".part", ".damaged"))]
        if left:
            broken.append(f"run {runs} of seed {seed} left {left}")
        runs += 1
        if runs % 5 == 0:
            say(f"{done} kills in {runs} runs, {len(broken)} wrong")
    return {"kills": done, "runs": runs}, broken


def _wait(process: subprocess.Popen[str], place: Path, source: random.Random, length: float) -> None:
    """Until a random moment: one in four during the start, the others after the run has begun to write."""
    if source.random() < 0.25:
        _until(process, source.uniform(0, 0.8 * length), lambda: False)
        return
    before = (place / "metrics.csv").stat().st_mtime_ns if (place / "metrics.csv").exists() else 0
    _until(
        process,
        LIMIT,
        lambda: (place / "metrics.csv").exists() and (place / "metrics.csv").stat().st_mtime_ns != before,
    )
    _until(process, source.uniform(0, 0.3 * length), lambda: False)


def _until(process: subprocess.Popen[str], seconds: float, reached: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None and not reached():
        time.sleep(0.003)
