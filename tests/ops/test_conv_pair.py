"""The fused front end against two ordinary convolutions in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.ops import conv_pair, taps_first, transform_kernel
from torchcaps.ops.conv_pair import bilinear_conv_pair

# (batch, image channels, rows, cols, hidden channels, outputs, first kernel, second kernel, stride)
SHAPES = [
    (3, 1, 28, 28, 4, 6, 9, 9, 2),  # MNIST
    (2, 1, 36, 36, 3, 4, 9, 9, 2),
    (2, 3, 24, 24, 3, 4, 9, 9, 2),  # CIFAR-10, cropped
    (2, 3, 32, 32, 3, 8, 9, 9, 2),
    (1, 2, 31, 27, 3, 4, 9, 9, 2),  # odd, rectangular, batch 1
    (2, 2, 21, 40, 2, 3, 5, 7, 3),
    (2, 1, 12, 13, 2, 3, 3, 5, 1),
]


def reference_pair(images: Tensor, *parameters: Tensor | None, stride: int, negative_slope: float = 0.0) -> Tensor:
    weight1, bias1, weight2, bias2 = parameters
    assert weight1 is not None
    assert weight2 is not None
    hidden = F.leaky_relu(F.conv2d(images, weight1, bias1), negative_slope)
    return F.conv2d(hidden, weight2, bias2, stride).permute(0, 2, 3, 1)


def problem(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    batch, image_channels, rows, cols, hidden, outputs, kernel1, kernel2, _ = shape
    torch.manual_seed(0)
    return [
        torch.rand(batch, image_channels, rows, cols, dtype=dtype),
        torch.randn(hidden, image_channels, kernel1, kernel1, dtype=dtype),
        torch.randn(hidden, dtype=dtype),
        torch.randn(outputs, hidden, kernel2, kernel2, dtype=dtype),
        torch.randn(outputs, dtype=dtype),
    ]


@pytest.mark.parametrize("negative_slope", [0.0, 0.2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_two_convolutions(shape: tuple[int, ...], negative_slope: float) -> None:
    leaves = [tensor.requires_grad_() for tensor in problem(shape)]
    options = {"stride": shape[-1], "negative_slope": negative_slope}
    result = bilinear_conv_pair(*leaves, **options)
    reference = reference_pair(*leaves, **options)
    assert result.is_contiguous()
    torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(reference)
    torch.testing.assert_close(
        torch.autograd.grad(result, leaves, upstream),
        torch.autograd.grad(reference, leaves, upstream),
        rtol=1e-9,
        atol=1e-8,
    )


def test_float32_rounding() -> None:
    shape = (8, 1, 28, 28, 32, 32, 9, 9, 2)
    leaves = [tensor.requires_grad_() for tensor in problem(shape, torch.float32)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in leaves]
    result, reference = bilinear_conv_pair(*leaves, stride=2), reference_pair(*doubles, stride=2)
    upstream = torch.randn_like(result)
    gradients = torch.autograd.grad(result, leaves, upstream)
    references = torch.autograd.grad(reference, doubles, upstream.double())
    for ours, exact in zip((result, *gradients), (reference, *references)):
        assert float((ours.detach() - exact.detach()).norm() / exact.detach().norm()) < 2e-4


@pytest.mark.parametrize("needed", range(5))
def test_one_gradient_alone(needed: int) -> None:
    leaves = problem(SHAPES[4])
    leaves[needed].requires_grad_()
    (alone,) = torch.autograd.grad(bilinear_conv_pair(*leaves, stride=2).sum(), leaves[needed])
    (reference,) = torch.autograd.grad(reference_pair(*leaves, stride=2).sum(), leaves[needed])
    torch.testing.assert_close(alone, reference)


def test_without_biases() -> None:
    images, weight1, _, weight2, _ = problem(SHAPES[0])
    arguments = (images, weight1.requires_grad_(), None, weight2.requires_grad_(), None)
    result, reference = bilinear_conv_pair(*arguments, stride=2), reference_pair(*arguments, stride=2)
    torch.testing.assert_close(result, reference)
    torch.testing.assert_close(
        torch.autograd.grad(result.sum(), (weight1, weight2)), torch.autograd.grad(reference.sum(), (weight1, weight2))
    )


def test_gradcheck() -> None:
    leaves = [tensor.requires_grad_() for tensor in problem((2, 1, 9, 10, 2, 2, 3, 3, 2))]
    assert torch.autograd.gradcheck(lambda *args: bilinear_conv_pair(*args, stride=2, negative_slope=0.3), leaves)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads: int) -> None:
    tensors = problem(SHAPES[1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(bilinear_conv_pair(*tensors, stride=2), reference_pair(*tensors, stride=2))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [1, 3, 128])
def test_a_transformed_kernel_gives_the_same(batch: int) -> None:
    images, *parameters = problem((batch, *SHAPES[0][1:]))
    kernel = transform_kernel(parameters[2], stride=2, size=(6, 6))
    assert kernel is not None
    result = conv_pair(images, *parameters, stride=2, kernel=kernel)
    torch.testing.assert_close(result, reference_pair(images, *parameters, stride=2))


def test_a_transformed_kernel_for_larger_outputs_is_refused() -> None:
    images, *parameters = problem(SHAPES[2])
    kernel = transform_kernel(parameters[2], stride=2, size=(6, 6))
    with pytest.raises(ValueError, match="cannot serve outputs"):
        conv_pair(images, *parameters, stride=2, kernel=kernel)


def test_gradients_through_a_transformed_kernel() -> None:
    leaves = [tensor.requires_grad_() for tensor in problem(SHAPES[3])]
    kernel = transform_kernel(leaves[3], stride=2, size=(8, 8))
    result = conv_pair(*leaves, stride=2, kernel=kernel)
    torch.testing.assert_close(
        torch.autograd.grad(result.sum(), leaves),
        torch.autograd.grad(reference_pair(*leaves, stride=2).sum(), leaves),
    )


def test_a_second_backward_through_the_same_graph() -> None:
    leaves = [tensor.requires_grad_() for tensor in problem(SHAPES[0])]
    result = bilinear_conv_pair(*leaves, stride=2)
    once = torch.autograd.grad(result.sum(), leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), leaves), once, rtol=0, atol=0)


def test_the_fallback_agrees() -> None:
    tensors = problem(SHAPES[0])
    expected = reference_pair(*tensors, stride=2, negative_slope=0.1)
    assert torch.equal(conv_pair(*tensors, stride=2, negative_slope=0.1), expected)  # too small to pay
    compiled = torch.compile(conv_pair, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*tensors, stride=2, negative_slope=0.1), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv_pair(*problem(SHAPES[0], torch.float32), stride=2).dtype == torch.bfloat16
    assert transform_kernel(tensors[3].bfloat16(), stride=2, size=(6, 6)) is None


def test_export_sees_ordinary_convolutions() -> None:
    class FrontEnd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Conv2d(1, 64, 9), torch.nn.Conv2d(64, 64, 9, 2)

        def forward(self, images: Tensor) -> Tensor:
            first, second = self.first, self.second
            return conv_pair(images, first.weight, first.bias, second.weight, second.bias, stride=2)

    model, images = FrontEnd().eval(), torch.rand(64, 1, 28, 28)
    exported = torch.export.export(model, (images,))
    assert sum("conv2d" in str(node.target) for node in exported.graph.nodes) == 2
    torch.testing.assert_close(exported.module()(images), model(images), rtol=1e-3, atol=1e-4)


def test_uninitialised_memory_is_never_read() -> None:
    """Deterministic mode fills it with NaN."""
    leaves = [tensor.requires_grad_() for tensor in problem(SHAPES[1])]
    torch.use_deterministic_algorithms(True)
    try:
        result = bilinear_conv_pair(*leaves, stride=2)
        gradients = torch.autograd.grad(result.sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(tensor.isfinite().all() for tensor in (result, *gradients))


def test_training_after_inference_mode() -> None:
    """The cached matrices must not remember the mode they were made in."""
    leaves = [tensor.requires_grad_() for tensor in problem((2, 1, 22, 26, 2, 3, 4, 6, 2))]
    with torch.inference_mode():
        bilinear_conv_pair(*leaves, stride=2)
    result = bilinear_conv_pair(*leaves, stride=2)
    torch.testing.assert_close(
        torch.autograd.grad(result.sum(), leaves),
        torch.autograd.grad(reference_pair(*leaves, stride=2).sum(), leaves),
    )


def test_a_taps_first_parameter_gets_its_gradient_in_the_same_order() -> None:
    leaves = problem(SHAPES[0])
    leaves[3] = taps_first(leaves[3])
    weight = leaves[3].requires_grad_()
    bilinear_conv_pair(*leaves, stride=2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    (reference,) = torch.autograd.grad(reference_pair(*leaves, stride=2).sum(), weight)
    torch.testing.assert_close(weight.grad, reference)
