"""The bilinear convolution against the direct one in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.ops import strided_conv2d
from torchcaps.ops.bilinear import POINTS, taps_of_phases
from torchcaps.ops.plan import ConvolutionShape, pays
from torchcaps.ops.strided_conv import bilinear_conv2d

# (batch, channels, outputs, rows, cols, kernel, stride)
SHAPES = [
    (3, 4, 5, 20, 20, 9, 2),  # MNIST: 6x6 outputs
    (2, 3, 4, 16, 16, 9, 2),  # 24x24 images: 4x4
    (2, 3, 4, 24, 24, 9, 2),  # 32x32 images: 8x8
    (2, 3, 4, 28, 28, 9, 2),  # 36x36 images: 10x10
    (1, 2, 3, 23, 19, 9, 2),  # odd, rectangular, batch 1: 8x6
    (2, 2, 3, 21, 30, 9, 2),  # 7x11
    (1, 1, 1, 9, 10, 9, 2),  # 1x1
    (2, 2, 2, 37, 9, 9, 2),  # 15x1
    (2, 3, 2, 17, 18, 5, 1),
    (2, 3, 2, 20, 23, 7, 3),
    (1, 2, 3, 15, 14, 4, 2),
    (2, 2, 2, 12, 12, 3, 3),
]


def relative(result: Tensor, reference: Tensor) -> float:
    """rms error over rms value."""
    return float((result.double() - reference).norm() / reference.norm())


def with_gradients(function, tensors, upstream: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]


def problem(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    batch, channels, outputs, rows, cols, kernel, stride = shape
    torch.manual_seed(0)
    x = torch.randn(batch, channels, rows, cols, dtype=dtype).relu()
    weight = torch.randn(outputs, channels, kernel, kernel, dtype=dtype)
    bias = torch.randn(outputs, dtype=dtype)
    upstream = torch.randn(batch, outputs, (rows - kernel) // stride + 1, (cols - kernel) // stride + 1, dtype=dtype)
    return [x, weight, bias], upstream


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_convolution(shape: tuple[int, ...]) -> None:
    tensors, upstream = problem(shape, torch.float64)
    stride = shape[-1]
    results = with_gradients(lambda x, w, b: bilinear_conv2d(x, w, b, stride), tensors, upstream)
    references = with_gradients(lambda x, w, b: F.conv2d(x, w, b, stride), tensors, upstream)
    for result, reference in zip(results, references):
        assert result.shape == reference.shape
        assert relative(result, reference) < 1e-11


@pytest.mark.parametrize("padding", [1, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding(shape: tuple[int, ...], padding: int) -> None:
    (x, weight, bias), _ = problem(shape, torch.float64)
    stride = shape[-1]
    upstream = torch.randn_like(F.conv2d(x, weight, bias, stride, padding))
    ours = with_gradients(lambda *each: bilinear_conv2d(*each, stride, padding=padding), [x, weight, bias], upstream)
    exact = with_gradients(lambda *each: F.conv2d(*each, stride, padding), [x, weight, bias], upstream)
    assert all(relative(*pair) < 1e-11 for pair in zip(ours, exact))


@pytest.mark.parametrize("size", range(1, 13))
def test_float32_rounding(size: int) -> None:
    """Under 2e-4 rms relative for every tile that 9x9 kernels with stride 2 can get, forward and backward."""
    side = 2 * (size - 1) + 9
    tensors, upstream = problem((4, 32, 32, side, side, 9, 2), torch.float32)
    doubles = [tensor.double() for tensor in tensors]
    results = with_gradients(lambda x, w, b: bilinear_conv2d(x, w, b, 2), tensors, upstream)
    references = with_gradients(lambda x, w, b: F.conv2d(x, w, b, 2), doubles, upstream.double())
    for result, reference in zip(results, references):
        assert result.dtype == torch.float32
        assert relative(result, reference) < 2e-4


@pytest.mark.parametrize(("kernel", "stride"), [(9, 1), (7, 1), (5, 1), (3, 1), (9, 2), (7, 2), (5, 2), (7, 3)])
def test_float32_rounding_of_the_widest_tiles(kernel: int, stride: int) -> None:
    """A tile that uses all twelve points, for kernels of other sizes."""
    tile = len(POINTS) + 1 - taps_of_phases(kernel, stride)[0]
    side = (tile - 1) * stride + kernel
    tensors, upstream = problem((4, 32, 32, side, side, kernel, stride), torch.float32)
    doubles = [tensor.double() for tensor in tensors]
    results = with_gradients(lambda x, w, b: bilinear_conv2d(x, w, b, stride, (tile, tile)), tensors, upstream)
    references = with_gradients(lambda x, w, b: F.conv2d(x, w, b, stride), doubles, upstream.double())
    for result, reference in zip(results, references):
        assert relative(result, reference) < 2e-4


@pytest.mark.parametrize(("tile", "bound"), [(2, 3e-6), (4, 5e-6), (5, 4e-5), (6, 6e-5), (7, 1.5e-4), (8, 2e-4)])
def test_float32_rounding_grows_with_the_tile(tile: int, bound: float) -> None:
    tensors, _ = problem((4, 32, 32, 2 * tile + 7, 2 * tile + 7, 9, 2), torch.float32)
    result = bilinear_conv2d(*tensors, 2, (tile, tile))
    assert relative(result, F.conv2d(*(tensor.double() for tensor in tensors), 2)) < bound


def test_gradcheck() -> None:
    (x, weight, bias), _ = problem((2, 2, 2, 12, 11, 5, 2), torch.float64)
    inputs = (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())
    assert torch.autograd.gradcheck(lambda *args: bilinear_conv2d(*args, 2), inputs)


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_one_gradient_alone(needed: int) -> None:
    tensors, upstream = problem(SHAPES[4], torch.float64)
    tensors[needed].requires_grad_()
    (alone,) = torch.autograd.grad(bilinear_conv2d(*tensors, 2), tensors[needed], upstream)
    (reference,) = torch.autograd.grad(F.conv2d(*tensors, 2), tensors[needed], upstream)
    torch.testing.assert_close(alone, reference)


def test_any_memory_order() -> None:
    (x, weight, bias), upstream = problem(SHAPES[0], torch.float64)
    reference = with_gradients(lambda x, w, b: F.conv2d(x, w, b, 2), [x, weight, bias], upstream)
    strange_x = torch.cat((x, x), 3).permute(0, 1, 3, 2)[:, :, :20].transpose(2, 3)
    taps_first = weight.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    for strange in (
        [strange_x, weight, bias],
        [x.contiguous(memory_format=torch.channels_last), weight, bias],
        [x, taps_first, bias],
        [x, weight.contiguous(memory_format=torch.channels_last), bias],
    ):
        result = with_gradients(lambda x, w, b: bilinear_conv2d(x, w, b, 2), strange, upstream)
        torch.testing.assert_close(result, reference)


def test_a_second_backward_through_the_same_graph() -> None:
    tensors, upstream = problem(SHAPES[0], torch.float64)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    result = bilinear_conv2d(*leaves, 2)
    once = torch.autograd.grad(result, leaves, upstream, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result, leaves, upstream), once, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_take_the_ordinary_path(dtype: torch.dtype) -> None:
    x, weight = torch.ones(1, 2, 12, 12, dtype=dtype), torch.ones(2, 2, 9, 9, dtype=dtype)
    assert torch.equal(strided_conv2d(x, weight, stride=2), F.conv2d(x, weight, stride=2))


def test_autocast_takes_the_ordinary_path() -> None:
    x, weight = torch.randn(64, 64, 20, 20), torch.randn(64, 64, 9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        assert strided_conv2d(x, weight, stride=2).dtype == torch.bfloat16


def test_other_devices_take_the_ordinary_path() -> None:
    x, weight = torch.empty(64, 64, 20, 20, device="meta"), torch.empty(64, 64, 9, 9, device="meta")
    assert strided_conv2d(x, weight, stride=2).shape == (64, 64, 6, 6)


@pytest.mark.parametrize("weight_shape", [(2, 2, 9, 7), (2, 2, 1, 1), (2, 2, 20, 20)])
def test_other_kernels_take_the_ordinary_path(weight_shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(2, 2, 21, 20), torch.randn(weight_shape)
    assert torch.equal(strided_conv2d(x, weight, stride=2), F.conv2d(x, weight, stride=2))


def test_wrong_shapes_are_told_by_torch() -> None:
    with pytest.raises(RuntimeError, match="channels"):
        strided_conv2d(torch.randn(2, 3, 20, 20), torch.randn(4, 2, 9, 9), stride=2)
    with pytest.raises(RuntimeError, match="Kernel size"):
        strided_conv2d(torch.randn(2, 2, 8, 8), torch.randn(4, 2, 9, 9), stride=2)


def test_the_public_function_takes_the_fast_path_where_it_pays() -> None:
    shape = (64, 64, 64, 20, 20, 9, 2)
    assert pays(ConvolutionShape(64, 64, 64, (6, 6), 9, 2))
    (x, weight, bias), _ = problem(shape, torch.float32)
    result = strided_conv2d(x, weight, bias, stride=2)
    assert torch.equal(result, bilinear_conv2d(x, weight, bias, 2))
    assert not torch.equal(result, F.conv2d(x, weight, bias, 2))


def test_compile_and_export_see_an_ordinary_convolution() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, 64, 9, 9) / 72)

        def forward(self, x: Tensor) -> Tensor:
            return strided_conv2d(x, self.weight, stride=2)

    layer, x = Layer().eval(), torch.randn(64, 64, 20, 20)
    exported = torch.export.export(layer, (x,))
    assert any("conv2d" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), layer(x), rtol=1e-3, atol=1e-3)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), exported.module()(x))


def test_function_transforms_take_the_ordinary_path() -> None:
    x, weight = torch.randn(64, 64, 20, 20), torch.randn(64, 64, 9, 9)
    gradient = torch.func.grad(lambda w: strided_conv2d(x, w, stride=2).square().mean())(weight)
    assert gradient.shape == weight.shape
