"""Timing cases in turns, each in a process of its own so that its memory can be read from the operating system."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch.utils.benchmark import Timer

from torchcaps.errors import UserError
from torchcaps.lab.bench.cases import Case
from torchcaps.ops.products import multiply
from torchcaps.training.environment import peak_memory_mb
from torchcaps.training.host import usable_cores

SLOW = 5.0  # seconds


@dataclass(frozen=True)
class Measurement:
    """The outcome of one case."""

    case: Case
    seconds: tuple[float, ...]
    """One entry for each round; empty if the case did not fit into memory."""
    memory_mb: float
    """The most memory held beyond what the process had before the case was set up."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def spread(self) -> float:
        """Half the range over the rounds, relative to the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.median if self.seconds else float("nan")

    @property
    def images_per_second(self) -> float:
        return self.case.batch_size / self.median


class Worker:
    """A process that has a case set up and runs it when told."""

    def __init__(self, case: Case) -> None:
        self.case = case
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, case), daemon=True)
        self._process.start()
        theirs.close()
        self._calls = 1
        self.times: list[float] = []
        self.dead = False

    def warm_up(self, seconds: float) -> None:
        """Calls that do not count; the second is to find how many take about ``seconds``."""
        self._ask(1)  # memory is mapped and kernels are chosen in the first call
        self._calls = max(1, round(seconds / max(1e-9, self._ask(1))))
        self._ask(self._calls)  # and memory that is kept finds its place within some more

    def take_turn(self) -> None:
        if not self.dead and not (self.times and self.times[0] > SLOW):
            answer = self._ask(self._calls)
            self.times = [] if self.dead else [*self.times, answer]

    def memory_mb(self) -> float:
        """The memory of the process, which ends with that."""
        return self._ask(0)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    def _ask(self, calls: int) -> float:
        """Seconds a call, over some calls in a row; for no calls, the memory. NaN once the process has died."""
        if self.dead:
            return float("nan")
        try:
            self._pipe.send(calls)
            return float(self._pipe.recv())
        except (EOFError, OSError):
            self.dead = True
            return float("nan")


def _serve(pipe: Connection, case: Case) -> None:
    cpu = torch.device("cpu")
    before = peak_memory_mb(cpu)
    work = case.prepare()
    while calls := pipe.recv():
        started = time.perf_counter()
        for _ in range(calls):
            work()
        pipe.send((time.perf_counter() - started) / calls)
    pipe.send(peak_memory_mb(cpu) - before)


def measure(
    cases: Sequence[Case], *, rounds: int, seconds: float = 1.0, say: Callable[[str], None] = print
) -> list[Measurement]:
    """Measure the cases in turns, ``rounds`` times, so that whatever slows the machine slows them all.

    Each turn lasts about ``seconds``. A case that takes longer than SLOW has one turn only; one that dies, for want
    of memory most likely, has no times.
    """
    with contextlib.ExitStack() as stack:  # ends all workers, however the measurement ends
        workers = [stack.enter_context(Worker(case)) for case in cases]
        for worker in workers:
            worker.warm_up(seconds)
            if worker.dead:
                say(f"{worker.case.label}: ended before it was measured, most likely for want of memory")
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for worker in workers:
                worker.take_turn()
        return [Measurement(worker.case, tuple(worker.times), worker.memory_mb()) for worker in workers]


def gemm_rate(threads: int, *, rounds: int = 7) -> float:
    """Measured GFLOP/s of matrix products of the shape that the fast convolution makes for MNIST."""
    factors = {"left": torch.randn(20, 128, 256), "right": torch.randn(20, 256, 256), "out": torch.empty(20, 128, 256)}
    timer = Timer("multiply(left, right, out=out)", globals={"multiply": multiply, **factors}, num_threads=threads)
    best = min(timer.timeit(20).median for _ in range(rounds))
    return 2 * 20 * 128 * 256 * 256 / best / 1e9


def check_threads(threads: int) -> int:
    """The number of threads to use; more than there are cores would measure the scheduler."""
    cores = usable_cores()
    if threads > cores:
        raise UserError(f"--threads {threads} is more than the {cores} cores of this machine.")
    return threads
