"""Damaged and hostile inputs: right data, an earlier checkpoint or the project's own error, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from hostile.mutations import attack_all, bounded
from hostile.mutator import changed_value, mutated
from hostile.readers import TINY, refused, targets
from torchcaps.data import fetch
from torchcaps.data.listing import list_table
from torchcaps.data.readers import read_idx
from torchcaps.data.sources import SOURCES
from torchcaps.settings import fields
from torchcaps.training.config import TrainingConfig
from torchcaps.training.files import read_config
from torchcaps.training.folder import COLUMNS, RunFolder

SHORT = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PLAIN = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=20),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
NUMBERS = some.integers(-(10**30), 10**30) | some.floats()


def test_the_same_seed_makes_the_same_damage():
    changes = [mutated(b"0123456789" * 30, random.Random(5), [b"other"]) for _ in range(2)]
    assert changes[0] == changes[1] != b"0123456789" * 30
    assert changed_value(TINY, random.Random(3)) == changed_value(TINY, random.Random(3))


@pytest.mark.timeout(900)
def test_every_reader_reads_or_refuses(tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "hostile", None)  # what the targets change there is put back
    monkeypatch.setattr(fetch, "_npm", fetch._npm)
    found = targets(tmp_path)
    counted, broken = attack_all(found, 2026, inputs=3000, seconds=10**9, say=lambda line: None)
    assert not broken, "\n".join(broken)
    assert counted["read"] > 100
    assert counted["refused"] > 1000


@SHORT
@given(section=some.sampled_from([field.name for field in fields(TrainingConfig)]), value=PLAIN, data=some.data())
def test_any_value_of_any_setting_is_taken_or_refused(section: str, value: Any, data: some.DataObject):
    mapping = TrainingConfig().to_mapping()
    names = sorted(mapping[section])
    mapping[section] = data.draw(
        some.just(value) | some.fixed_dictionaries({data.draw(some.sampled_from(names)): some.just(value) | NUMBERS})
    )

    def read() -> None:
        config = TrainingConfig.from_mapping(mapping)
        assert TrainingConfig.from_mapping(config.to_mapping()) == config

    refused(read)


@SHORT
@given(text=some.text(max_size=200) | PLAIN.map(lambda value: yaml.safe_dump({"run": value})))
def test_any_text_as_settings(tmp_path: Path, text: str):
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with bounded():
        refused(lambda: read_config(path))


@SHORT
@given(rows=some.lists(some.text(max_size=60) | some.lists(NUMBERS, min_size=16, max_size=20)), torn=some.integers(0))
def test_any_rows_as_metrics(tmp_path: Path, rows: list[Any], torn: int):
    folder = RunFolder(tmp_path)
    lines = [row if isinstance(row, str) else ",".join(map(str, row)) for row in rows]
    content = "\n".join([",".join(COLUMNS), *lines, ""]).encode(errors="surrogatepass")
    folder.metrics.write_bytes(content[: max(1, len(content) - torn % 50)])
    before = folder.read_metrics()
    folder.forget_metrics_after(10**40)
    assert folder.read_metrics() == [row for row in before if (row["step"] or 0) <= 10**40]


@SHORT
@given(content=some.binary(max_size=80), axes=some.integers(0, 255), sizes=some.lists(some.integers(0, 2**32 - 1)))
def test_any_bytes_as_idx(tmp_path: Path, content: bytes, axes: int, sizes: list[int]):
    path = tmp_path / "x"
    header = bytes([0, 0, 8, axes]) + b"".join(size.to_bytes(4, "big") for size in sizes[:4])
    path.write_bytes(header + content)
    refused(lambda: read_idx(path))


@SHORT
@given(header=some.sampled_from(["path,label\n", "path;label;split\r\n", "label\tpath\n", ""]), text=some.text())
def test_any_text_as_a_list_of_images(tmp_path: Path, header: str, text: str):
    path = tmp_path / "list.csv"
    path.write_bytes((header + text).encode(errors="surrogatepass"))
    refused(lambda: list_table(path))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\n",
        "run: {seed: .inf}",
        f"run: {{seed: {'9' * 5000}}}",
        f"run: {{seed: 0x{'f' * 5000}}}",
        f"0x{'f' * 5000}: 1",
        "[" * 20_000,
        "run: !!int ''",
        "run: !!bool maybe",
        "run: !!timestamp never",
        "run: !!python/object/apply:os.system [id]",
        "? [a, b]\n: 1",
        "run: 5",
        "run:\n  threads: 1\n" + "# " * 100_000,
    ],
)
def test_yaml_that_is_a_trap_is_refused(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with bounded():
        assert refused(lambda: read_config(path))
