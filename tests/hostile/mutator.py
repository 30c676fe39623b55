"""Changes bytes and plain values at random, as damage and malice would. The same seed gives the same changes."""

from __future__ import annotations

import copy
import random
from typing import Any

TOKENS = [
    *(b".inf", b"-.inf", b".nan", b"NaN", b"Infinity", b"1e999", b"-1", b"0x" + b"f" * 5000, b"9" * 5000, b"1_0"),
    *(
        b"!!int ''",
        b"!!bool x",
        b"!!timestamp x",
        b"!!python/name:os.system",
        b"&a [*a]",
        b"*a",
        b"<<: ",
        b"!!binary x",
    ),
    *(b"[" * 3000, b"{" * 3000, b"[[[[", b'{"a":' * 300, b"---\n", b"? ", b"- ", b": ", b"# ", b"%YAML 9\n"),
    *(b"\0", b"\r", b"\n", b"\r\n", b"\x1a", b"\x85", b"\xe2\x80\xa8", b'"', b"'", b",", b";", b"\t", b"|", b"\\"),
    *(b"\xff", b"\xed\xb2\x80", b"\xef\xbb\xbf", b"\x1b[2J", b"p_1$^$", b"../../x", b"mine:Net", b"timm:resnet18"),
]
NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1]
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 10**6, 10**12, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "l2",
        "em",
        "mine:Net",
        "os:system",
        "timm:resnet18",
        "\0",
        "\x1b[31m",
        "\udc80",
        "p_1$^$",
        "a" * 10_000,
    ),
    *([], {}, [[]], [0], [1, 2, 3], ["a", "b"], [None], {"name": "l1"}, {"": None}, DEEP, [0] * 5000),
]


def mutated(data: bytes, source: random.Random, others: list[bytes]) -> bytes:
    """The data after one to six changes."""
    content = bytearray(data)
    for _ in range(source.choice((1, 1, 1, 2, 3, 6))):
        content = _changed(content, source, others)
    return bytes(content[: 4 * len(data) + 100_000])


def _changed(content: bytearray, source: random.Random, others: list[bytes]) -> bytearray:
    # Headers are short and decide most: half of all changes are near the start or the end.
    size = len(content)
    near = source.choice((16, 64, 512, size, size))
    place = min(size, source.randrange(near + 1))
    if source.random() < 0.2:
        place = size - place
    length = source.choice((1, 1, 2, 4, 8, source.randrange(size + 1)))
    match source.randrange(9):
        case 0 if place < size:
            content[place] ^= 1 << source.randrange(8)
        case 1 if place < size:
            content[place] = source.randrange(256)
        case 2:
            del content[place : place + length]
        case 3:
            content[place:place] = content[place : place + length]
        case 4:
            content[place:place] = source.randbytes(min(length, 64))
        case 5:
            del content[place:]
        case 6:
            width = source.choice((1, 2, 4, 8))
            number = source.choice(NUMBERS) % 256**width
            content[place : place + width] = number.to_bytes(width, source.choice(("little", "big")))
        case 7:
            content[place : place + source.choice((0, length))] = source.choice(TOKENS)
        case 8:
            other = source.choice(others)
            start = source.randrange(len(other) + 1)
            content[place : place + length] = other[start : start + length]
    return content


def changed_value(value: Any, source: random.Random) -> Any:
    """Plain values, as JSON and YAML have them, with one to three of them changed, removed, renamed or added."""
    result = copy.deepcopy(value)
    for _ in range(source.choice((1, 1, 2, 3))):
        places = [place for place in _places(result) if place]
        if not places:
            return source.choice(VALUES)
        *path, last = source.choice(places)
        holder = result
        for step in path:
            holder = holder[step]
        match source.randrange(5):
            case 0 if isinstance(holder, dict):
                del holder[last]
            case 1 if isinstance(holder, dict):
                holder[source.choice(("name", "settings", "iterations", "strange", "", "classes"))] = holder[last]
            case 2 if type(holder[last]) in (int, float) and abs(holder[last]) < 2**53:
                factor = source.choice((-1, 0, 2, 1000, 1e12, 0.5))
                holder[last] = source.choice((holder[last] + 1, holder[last] - 1, holder[last] * factor))
            case _:
                holder[last] = copy.deepcopy(source.choice(VALUES))
    return result


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside: list[tuple[Any, ...]] = [path]
    if isinstance(value, dict):
        for name, part in value.items():
            inside += _places(part, (*path, name))
    elif isinstance(value, list) and len(value) < 50:
        for number, part in enumerate(value):
            inside += _places(part, (*path, number))
    return inside if len(path) < 12 else []
