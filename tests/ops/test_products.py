"""Products by oneDNN are those of torch, with gradients of any order, wherever they are used."""

import pytest
import torch

from torchcaps.ops import products

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN here")


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch):
    """On every processor, and for small matrices, too."""
    monkeypatch.setattr(products, "_onednn", lambda: torch.ops.mkldnn._linear_pointwise)
    monkeypatch.setattr(products, "LEAST", 1)


def matrices(*shape, transposed=False, **options):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), **options)
    return made.mT.contiguous().mT if transposed else made


@pytest.mark.parametrize("count", [(), (1,), (5,)])
@pytest.mark.parametrize(("rows", "terms", "columns"), [(1, 1, 1), (7, 13, 9), (64, 100, 48), (48, 256, 1), (1, 8, 96)])
@pytest.mark.parametrize("left_transposed", [False, True])
@pytest.mark.parametrize("right_transposed", [False, True])
def test_is_the_product(count, rows, terms, columns, left_transposed, right_transposed):
    left = matrices(*count, rows, terms, transposed=left_transposed)
    right = matrices(*count, terms, columns, transposed=right_transposed)
    exact = left.double() @ right.double()
    out = torch.full_like(exact, torch.nan, dtype=torch.float32)
    for result in (products.multiply(left, right), products.multiply(left, right, out=out), out):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-4)


def test_writes_into_a_part_of_an_array():
    array = torch.zeros(4, 6, 8)
    products.multiply(matrices(2, 6, 5), matrices(2, 5, 8), out=array[1:3])
    assert array[0].eq(0).all()
    assert array[3].eq(0).all()
    torch.testing.assert_close(array[1:3], matrices(2, 6, 5) @ matrices(2, 5, 8))


def test_adds_to_what_is_there():
    total = torch.ones(3, 4, 6)
    products.add_product(total, matrices(3, 4, 5), matrices(3, 5, 6))
    torch.testing.assert_close(total, 1 + matrices(3, 4, 5) @ matrices(3, 5, 6))


def test_has_gradients_of_any_order():
    def gradients(multiply):
        left, right = matrices(5, 7).requires_grad_(), matrices(7, 3).requires_grad_()
        first = torch.autograd.grad(multiply(left, right).square().sum(), (left, right), create_graph=True)
        return *first, *torch.autograd.grad(first[0].square().sum(), (left, right))

    for mine, theirs in zip(gradients(products.multiply), gradients(torch.matmul)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def test_the_same_bits_each_time():
    left, right = matrices(200, 300), matrices(300, 100)
    assert products.multiply(left, right).equal(products.multiply(left.clone(), right.clone()))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (matrices(4, 5, dtype=torch.float64), matrices(5, 6, dtype=torch.float64)),
        (matrices(5), matrices(5, 6)),
        (matrices(2, 4, 5), matrices(5, 6)),
        (matrices(0, 5), matrices(5, 6)),
        (matrices(4, 0), matrices(0, 6)),
    ],
)
def test_leaves_everything_else_to_torch(left, right):
    assert products.multiply(left, right).equal(left @ right)


def test_transforms_of_torch_func_see_an_ordinary_product():
    left, right = matrices(3, 4, 5), matrices(5, 6)
    torch.testing.assert_close(torch.func.vmap(products.multiply, (0, None))(left, right), left @ right)
