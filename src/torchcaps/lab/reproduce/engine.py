"""Runs the cells that are not done: one after the other here, or spread over a Ray cluster."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from torchcaps.atomic import append_line
from torchcaps.errors import UserError
from torchcaps.lab.reproduce.cells import Cell
from torchcaps.lab.reproduce.display import CellDisplay
from torchcaps.lab.reproduce.worker import Execution
from torchcaps.process import signals_to
from torchcaps.training.host import END_WITH_PARENT, usable_cores

POLL_SECONDS = 0.5


class Failure(NamedTuple):
    cell: Cell
    reason: str


def run_cells(
    cells: Sequence[Cell], *, execution: Execution, ray_address: str | None, display: CellDisplay
) -> list[Failure]:
    """Train whatever is not done yet; returns the cells that could not be."""
    for cell in cells:
        cell.write_recipe()
        cell.set_aside_damage(display.say)
    waiting = [cell for cell in cells if not cell.done]
    with display, signals_to(_stop):
        if ray_address is None:
            return _here(waiting, execution, display)
        return _on_ray(waiting, execution, ray_address, display)


def train(cell: Cell, execution: Execution, meanwhile: Callable[[], None] = lambda: None) -> str | None:
    """Train a cell in a process of its own, with its output in the cell's log; returns what went wrong, if anything."""
    command = [sys.executable, "-P", "-m", "torchcaps.lab.reproduce.worker"]
    append_line(cell.log, f"{datetime.now():%Y-%m-%d %H:%M:%S}")  # which also refuses a link of that name
    with cell.log.open("a") as log:
        process = subprocess.Popen(
            [*command, str(cell.recipe), str(cell.folder.path), execution.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, END_WITH_PARENT: str(os.getpid()), "PYTHONSAFEPATH": "1"},
        )
        try:
            while process.poll() is None:
                meanwhile()
                time.sleep(POLL_SECONDS)
        except BaseException:
            process.terminate()  # it saves where it is
            process.wait()
            raise
    if process.returncode == 0 and cell.done:
        cell.forget_checkpoints()
        return None
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}"
    lines = cell.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("torchcaps: ") if lines else f"ended with exit code {process.returncode}"


def _here(cells: Sequence[Cell], execution: Execution, display: CellDisplay) -> list[Failure]:
    """One after the other; those that somebody else is training come last, and are waited for."""
    waiting, busy, failures = deque(cells), set[str](), []
    while waiting:
        cell = waiting.popleft()
        try:
            with FileLock(cell.lock, timeout=0):
                reason = None
                if not cell.done:
                    display.started(cell)
                    reason = train(cell, execution, display.refresh)
        except Timeout:
            waiting.append(cell)
            if cell.name not in busy:
                busy.add(cell.name)
                display.say(f"{cell.name}: another process is training it, and is waited for")
            elif all(other.name in busy for other in waiting):
                time.sleep(POLL_SECONDS)
            continue
        display.finished(cell, reason)
        if reason:
            failures.append(Failure(cell, reason))
    return failures


def _on_ray(cells: Sequence[Cell], execution: Execution, address: str, display: CellDisplay) -> list[Failure]:
    execution = replace(execution, threads=execution.threads or 1, devices=execution.devices or 1)
    ray = _connected(address)
    try:
        needed = _needed_on_ray(ray, execution, display)
        remote = ray.remote(num_cpus=needed["CPU"], num_gpus=needed["GPU"], max_retries=0)(_train_remotely)
        waiting = {remote.remote(cell, execution, Path.cwd()): cell for cell in cells}
        failures = []
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_SECONDS)
            for future in ready:
                cell = waiting.pop(future)
                reason = _outcome(ray, future)
                display.finished(cell, reason)
                if reason:
                    failures.append(Failure(cell, reason))
            display.refresh()
        return failures
    finally:
        ray.shutdown()


def _connected(address: str) -> Any:
    """The module ``ray``, connected to a cluster; heavy, hardly typed, and an extra."""
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise UserError("--ray needs Ray: pip install 'torchcaps[ray]'.") from None
    if ":" in address:
        _check_reachable(address)
    local = {"num_cpus": usable_cores(), "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, **local)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"Cannot reach Ray at '{address}': {error}") from error
    return ray


def _check_reachable(address: str) -> None:
    """Ray itself would go on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"Cannot reach Ray at '{address}': {error}. Give HOST:PORT, 'auto' or 'local'.") from None


def _needed_on_ray(ray: Any, execution: Execution, display: CellDisplay) -> dict[str, int]:
    """The CPUs and GPUs of a cell; tells the display how many cells fit on the cluster at a time."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    accelerator = execution.accelerator or "auto"
    with_gpus = accelerator in ("cuda", "gpu") or (accelerator == "auto" and any(node.get("GPU") for node in nodes))
    processes = execution.devices or 1
    needed = {"CPU": processes * (execution.threads or 1), "GPU": processes if with_gpus else 0}
    places = sum(min(int(node.get(kind, 0) // count) for kind, count in needed.items() if count) for node in nodes)
    if not places:
        wanted = " and ".join(f"{count} {kind}s" for kind, count in needed.items() if count)
        raise UserError(f"A cell needs {wanted} on one machine, more than any of this Ray cluster has.")
    display.side_by_side = places
    return needed


def _outcome(ray: Any, future: Any) -> str | None:
    try:
        reason: str | None = ray.get(future)
    except ray.exceptions.RayError as error:
        return f"Ray: {str(error).strip().splitlines()[-1]}"
    return reason


def _train_remotely(cell: Cell, execution: Execution, directory: Path) -> str | None:
    """On a worker, which shares the file system with whoever asked."""
    os.chdir(directory)
    while True:
        try:
            with FileLock(cell.lock, timeout=0):
                return None if cell.done else train(cell, execution)
        except Timeout:
            time.sleep(POLL_SECONDS)


def _stop(number: int, frame: FrameType | None) -> None:
    """The cell that is being trained saves where it is."""
    raise UserError("Stopped. The same command goes on from here.", exit_code=128 + number)
