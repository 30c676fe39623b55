from collections.abc import Iterator

import pytest
import torch
from data_examples import random_images

from torchcaps.data.splits import ImageSplit, OverlappingDigits, Split


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only cost time with batches this small, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["images", "colour", "overlapping"])
def split(request: pytest.FixtureRequest) -> Split:
    if request.param == "overlapping":
        return OverlappingDigits(*random_images(50), name="test", copies=4)
    return ImageSplit(*random_images(203, (1, 28, 28) if request.param == "images" else (3, 20, 32)))
