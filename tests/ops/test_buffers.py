"""Memory that is used again, but never while somebody still needs it."""

import gc
import os
import weakref
from collections.abc import Iterator

import pytest
import torch

from torchcaps.ops import buffers
from torchcaps.ops.buffers import buffer, release_buffers


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    release_buffers()
    yield
    release_buffers()


class Doubled(torch.autograd.Function):
    """Keeps a buffer for its backward pass, as the convolutions do."""

    @staticmethod
    def forward(ctx, values):
        kept = buffer(*values.shape)
        kept.fill_(2)
        ctx.save_for_backward(kept)
        return values * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def test_memory_is_used_again_once_its_array_has_died() -> None:
    first = buffer(3, 5)
    address = first.data_ptr()
    second = buffer(3, 5)
    assert second.data_ptr() != address
    del first
    assert buffer(5, 2).data_ptr() == address, "a smaller array fits as well"


def test_far_smaller_arrays_do_not_hold_large_memory() -> None:
    large = buffer(1000)
    address = large.data_ptr()
    del large
    assert buffer(10).data_ptr() != address


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_shape_type_and_content_are_ones_own(dtype: torch.dtype) -> None:
    array = buffer(4, 6, dtype=dtype)
    assert (array.shape, array.dtype) == ((4, 6), dtype)
    assert array.is_contiguous()
    assert torch.equal(array.fill_(3), torch.full((4, 6), 3, dtype=dtype))


def test_no_elements_at_all() -> None:
    assert buffer(0, 4).shape == (0, 4)


def test_what_a_graph_has_saved_is_not_used_again() -> None:
    values = torch.ones(100, requires_grad=True)
    result = Doubled.apply(values).sum()
    gc.collect()
    for _ in range(3):
        buffer(100).fill_(-1)
    result.backward(retain_graph=True)
    buffer(100).fill_(-1)
    result.backward()
    assert torch.equal(values.grad, torch.full((100,), 4.0))
    assert sum(map(len, buffers._kept.values())) == 2 * 400, "the graph's memory has come back"


@pytest.mark.parametrize(
    "of_it", [torch.Tensor.detach, torch.Tensor.numpy, lambda array: array[10:20], lambda array: array.view(2, 50)]
)
def test_what_a_view_still_shows_is_not_used_again(of_it) -> None:
    view = of_it(buffer(100).fill_(1))
    gc.collect()
    buffer(100).fill_(-1)
    assert view.min() == 1
    del view
    assert len(buffers._kept) == 2


def test_no_more_is_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MOST_BYTES_KEPT", 1000)
    arrays = [buffer(100), buffer(100), buffer(100)]
    last = arrays[-1].data_ptr()
    while arrays:
        arrays.pop(0)
    assert sum(map(len, buffers._kept.values())) == 800
    kept = [buffer(100), buffer(100)]
    assert last in [array.data_ptr() for array in kept]


def test_released_memory_is_gone() -> None:
    array = buffer(100)
    gone = weakref.ref(array)
    del array
    assert gone() is None
    assert buffers._kept
    release_buffers()
    assert not buffers._kept


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_memory_of_its_own() -> None:
    array = buffer(100).fill_(1)
    child = os.fork()
    if child == 0:
        array.fill_(2)
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(array, torch.ones(100))


def test_too_much_memory_is_an_error_like_others() -> None:
    with pytest.raises(MemoryError, match="bytes of memory"):
        buffer(2**60)
