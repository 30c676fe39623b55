"""Random numbers and orders without a state: pure functions of a key and a position.

Whoever asks for position 7 of epoch 3 gets the same answer, whatever was asked before and by how many
processes. That is why a resumed run, or one split over more processes, sees the same batches.
"""

import hashlib
import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the constants of splitmix64, as the signed numbers torch knows
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)
_ROUNDS = 6


def key(*parts: int | str) -> int:
    """A 64-bit key for a purpose, for example `key(seed, epoch, "order")`.

    >>> key(0, 1, "order") == key(0, 1, "order"), key(0, 1, "order") == key(1, 0, "order")
    (True, False)
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(key: int, counters: Tensor) -> Tensor:
    """64 random bits (int64) for each counter: the splitmix64 generator, read at any place of its stream."""
    bits = counters * _GOLDEN + key
    bits = (bits ^ _shift_right(bits, 30)) * _MIX1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX2
    return bits ^ _shift_right(bits, 31)


def random_integers(key: int, counters: Tensor, high: int | Tensor) -> Tensor:
    """An integer in [0, high) for each counter; `high` may be at most 2^31."""
    return _shift_right(random_bits(key, counters), 32) * high >> 32


def random_uniform(key: int, counters: Tensor) -> Tensor:
    """A float64 in [-1, 1) for each counter."""
    return random_bits(key, counters).double() / 2.0**63


def permute(positions: Tensor, length: int, key: int) -> Tensor:
    """Where a random permutation of range(length) sends these positions, without storing the permutation.

    A Feistel network on the grid rows x columns >= length. The few results beyond `length` are sent
    through it again until they are inside ("cycle walking"), which keeps it one-to-one.

    >>> sorted(permute(torch.arange(10), 10, key=1).tolist()) == list(range(10))
    True
    """
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)

    def scramble(places: Tensor) -> Tensor:
        row, column = places // columns, places % columns
        for turn in range(0, _ROUNDS, 2):
            row = (row + random_integers(key, column * _ROUNDS + turn, rows)) % rows
            column = (column + random_integers(key, row * _ROUNDS + turn + 1, columns)) % columns
        return row * columns + column

    result = scramble(positions)
    while bool((outside := result >= length).any()):
        result = torch.where(outside, scramble(result), result)
    return result


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # `>>` copies the sign of a signed number; the generator wants zeros there.
    return (bits >> count) & ((1 << (64 - count)) - 1)
