"""Damaged inputs by the thousand, each within a bound of time."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hostile.readers import Target

SECONDS = 60
"""After which a reader counts as hanging, on a machine that may be busy."""


class Hang(BaseException):
    """Nothing that reads may catch it."""


@contextmanager
def bounded(seconds: int = SECONDS) -> Iterator[None]:
    """Within it, taking longer than this raises :class:`Hang`."""

    def ring(number: int, frame: object) -> None:
        raise Hang(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Broken(AssertionError):
    """A reader did something else than giving right data or refusing. Its message says how to see it again."""


def attack(target: Target, seed: int, first: int, count: int) -> Counter[str]:
    """Attack a reader; returns how often it read and how often it refused."""
    outcomes: Counter[str] = Counter()
    for number in range(first, first + count):
        source = random.Random(f"{seed} {target.name} {number}")
        try:
            with bounded():
                outcomes["refused" if target.attack(source) else "read"] += 1
        except (Exception, Hang) as error:
            raise Broken(f"{target.name}, seed {seed}, input {number}: {type(error).__name__}: {error}") from error
    return outcomes


def attack_all(
    targets: list[Target], seed: int, *, inputs: int, seconds: float, say: Callable[[str], None]
) -> tuple[Counter[str], list[str]]:
    """Attack all readers in turns until there were this many inputs or the time is over."""
    total: Counter[str] = Counter()
    broken: list[str] = []
    spent: Counter[str] = Counter()
    end = time.monotonic() + seconds
    tried: Counter[str] = Counter()
    while sum(total.values()) < inputs and time.monotonic() < end:
        for target in targets:
            started = time.monotonic()
            try:
                outcomes = attack(target, seed, tried[target.name], target.turn)
            except Broken as error:
                broken.append(str(error))
                say(f"BROKEN {error}")
                outcomes = Counter({"broken": 1})
            total.update(outcomes)
            tried[target.name] += target.turn
            spent[target.name] += int(1000 * (time.monotonic() - started))
    for name, milliseconds in spent.most_common():
        say(f"{name}: {tried[name]:,} inputs, {milliseconds / max(1, tried[name]):.2f} ms each")
    return total, broken
