import re

import pytest

from torchcaps.data.datasets import DATASETS
from torchcaps.data.sources import SAME_FILES, SOURCES, Source


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_tables_are_complete(source: Source) -> None:
    assert source.mirrors
    assert source.package.client in ("npm", "apt-get")
    for file in source.files:
        assert re.fullmatch("[0-9a-f]{64}", file.sha256)
        assert re.fullmatch(r"[\w.-]+", file.name)  # becomes a path in the cache
        assert file.size > 0
    for attribute in ("name", "sha256"):
        values = [getattr(file, attribute) for file in source.files]
        assert len(set(values)) == len(values)


def test_every_source_has_a_data_set() -> None:
    assert set(SOURCES) | set(SAME_FILES) == set(DATASETS) - {"digits", "multi-digits", "folder", "csv", "npz"}
    assert set(SAME_FILES.values()) <= set(SOURCES)
