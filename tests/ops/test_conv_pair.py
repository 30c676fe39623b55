"""The fused front end against two ordinary convolutions in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.ops import compiled, conv_pair, transform_kernel
from torchcaps.ops.conv_pair import TransformedKernel, bilinear_conv_pair
from torchcaps.ops.plan import ConvolutionShape, pays, supported

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


# The same for the compiled kernels, which want whole vectors of channels, with padding at the end
VECTOR_SHAPES = [
    (3, 1, 28, 28, 16, 24, 9, 9, 2, 0),
    (2, 1, 36, 36, 8, 8, 9, 9, 2, 0),
    (2, 3, 24, 24, 72, 8, 9, 9, 2, 4),  # "same"; channels that are no multiple of a block
    (1, 3, 32, 32, 8, 64, 9, 9, 2, 0),
    (1, 2, 31, 27, 8, 8, 9, 9, 2, 0),
    (2, 2, 21, 40, 16, 8, 5, 7, 3, 1),
    (5, 1, 12, 13, 8, 8, 3, 5, 1, 2),
    (1, 1, 9, 11, 8, 8, 3, 3, 2, 0),
]


def reference_pair(
    images: Tensor, *parameters: Tensor | None, stride: int, padding: int = 0, negative_slope: float = 0.0
) -> Tensor:
    weight1, bias1, weight2, bias2 = parameters
    assert weight1 is not None
    assert weight2 is not None
    hidden = F.leaky_relu(F.conv2d(images, weight1, bias1, padding=padding), negative_slope)
    return F.conv2d(hidden, weight2, bias2, stride, padding).permute(0, 2, 3, 1)


def relative(result: Tensor, reference: Tensor) -> float:
    """rms error over rms value."""
    return float((result.detach().double() - reference.detach()).norm() / reference.detach().norm())


@pytest.fixture(params=["compiled", "reference"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute in float32."""
    if request.param == "reference":
        monkeypatch.setattr(compiled, "native", lambda: None)
    elif compiled.native() is None:
        pytest.skip("there are no compiled kernels here")
    return str(request.param)


def problem(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    batch, image_channels, rows, cols, hidden, outputs, kernel1, kernel2 = shape[:8]
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


@pytest.mark.parametrize("negative_slope", [0.0, 0.2])
@pytest.mark.parametrize("shape", VECTOR_SHAPES, ids=str)
@pytest.mark.usefixtures("path")
def test_float32_with_whole_vectors(shape: tuple[int, ...], negative_slope: float) -> None:
    leaves = [tensor.requires_grad_() for tensor in problem(shape, torch.float32)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in leaves]
    stride, padding = shape[8:]
    options = {"stride": stride, "padding": padding, "negative_slope": negative_slope}
    result, reference = bilinear_conv_pair(*leaves, **options), reference_pair(*doubles, **options)
    assert result.shape == reference.shape
    assert result.is_contiguous()
    upstream = torch.randn_like(result)
    gradients = torch.autograd.grad(result, leaves, upstream)
    references = torch.autograd.grad(reference, doubles, upstream.double())
    assert all(relative(*pair) < 2e-4 for pair in zip((result, *gradients), (reference, *references)))


@pytest.mark.parametrize("padding", [1, 2, 4, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding(shape: tuple[int, ...], padding: int) -> None:
    leaves = [tensor.requires_grad_() for tensor in problem(shape)]
    options = {"stride": shape[-1], "padding": padding, "negative_slope": 0.2}
    result, reference = bilinear_conv_pair(*leaves, **options), reference_pair(*leaves, **options)
    torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(reference)
    torch.testing.assert_close(
        torch.autograd.grad(result, leaves, upstream),
        torch.autograd.grad(reference, leaves, upstream),
        rtol=1e-9,
        atol=1e-8,
    )


def test_padding_of_the_fallback() -> None:
    tensors = problem(SHAPES[2])
    assert torch.equal(conv_pair(*tensors, stride=2, padding=4), reference_pair(*tensors, stride=2, padding=4))


def test_inputs_smaller_than_the_stride_are_left_to_the_fallback() -> None:
    """Some phase of a single padded row would have no samples at all."""
    tensors = problem((64, 1, 1, 30, 64, 64, 9, 9, 2))
    assert not supported(ConvolutionShape.of(64, (1, 30), tensors[3], 2, padding=4))
    options = {"stride": 2, "padding": 4}
    assert torch.equal(conv_pair(*tensors, **options), reference_pair(*tensors, **options))


def test_the_padded_network_is_on_the_fast_path() -> None:
    """24x24 crops stay 24x24 and become 12x12."""
    shape = ConvolutionShape.of(128, (24, 24), torch.empty(512, 256, 9, 9, device="meta"), 2, padding=4)
    assert shape.size == (12, 12)
    assert pays(shape)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("path")
def test_results_are_the_same_bit_by_bit(threads: int) -> None:
    leaves = [tensor.requires_grad_() for tensor in problem((7, 1, 28, 28, 64, 32, 9, 9, 2), torch.float32)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = []
        for _ in range(3):
            result = bilinear_conv_pair(*leaves, stride=2)
            runs.append((result, *torch.autograd.grad(result.square().sum(), leaves)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for run in runs[1:] for pair in zip(run, runs[0]))


@pytest.mark.usefixtures("path")
def test_tensors_that_are_not_contiguous() -> None:
    leaves = problem((3, 2, 28, 28, 16, 24, 9, 9, 2), torch.float32)
    expected = bilinear_conv_pair(*leaves, stride=2)
    strided = [tensor.transpose(0, -1).contiguous().transpose(0, -1) for tensor in leaves]
    strided[2], strided[4] = (torch.stack((tensor, tensor), 1)[:, 0] for tensor in (leaves[2], leaves[4]))
    torch.testing.assert_close(bilinear_conv_pair(*strided, stride=2), expected, rtol=1e-3, atol=1e-3)
    for tensor in strided:
        tensor.requires_grad_()
    upstream = torch.randn(24, 6, 6, 3).permute(3, 1, 2, 0)
    gradients = torch.autograd.grad(bilinear_conv_pair(*strided, stride=2), strided, upstream)
    doubles = [tensor.detach().double().requires_grad_() for tensor in leaves]
    references = torch.autograd.grad(reference_pair(*doubles, stride=2), doubles, upstream.double())
    assert all(relative(*pair) < 2e-4 for pair in zip(gradients, references))


@pytest.mark.parametrize("needed", range(5))
@pytest.mark.usefixtures("path")
def test_one_gradient_alone_in_float32(needed: int) -> None:
    leaves = problem(VECTOR_SHAPES[4], torch.float32)
    doubles = [tensor.double() for tensor in leaves]
    leaves[needed].requires_grad_()
    doubles[needed].requires_grad_()
    (alone,) = torch.autograd.grad(bilinear_conv_pair(*leaves, stride=2).sum(), leaves[needed])
    (reference,) = torch.autograd.grad(reference_pair(*doubles, stride=2).sum(), doubles[needed])
    assert relative(alone, reference) < 2e-4


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.usefixtures("path")
def test_a_transformed_kernel_in_float32(batch: int, padding: int) -> None:
    images, *parameters = problem((batch, 1, 28, 28, 16, 24, 9, 9, 2), torch.float32)
    doubles = [tensor.double() for tensor in (images, *parameters)]
    size = (14, 14) if padding else (6, 6)
    kernel = transform_kernel(parameters[2], stride=2, size=size)
    result = conv_pair(images, *parameters, stride=2, padding=padding, kernel=kernel)
    assert relative(result, reference_pair(*doubles, stride=2, padding=padding)) < 2e-4


@pytest.mark.usefixtures("path")
def test_a_second_backward_in_float32() -> None:
    leaves = [tensor.requires_grad_() for tensor in problem(VECTOR_SHAPES[0], torch.float32)]
    result = bilinear_conv_pair(*leaves, stride=2)
    once = torch.autograd.grad(result.sum(), leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), leaves), once, rtol=0, atol=0)


def test_memory_that_the_kernels_write_is_never_read_before() -> None:
    """Deterministic mode fills it with NaN."""
    leaves = [tensor.requires_grad_() for tensor in problem(VECTOR_SHAPES[2], torch.float32)]
    torch.use_deterministic_algorithms(True)
    try:
        result = bilinear_conv_pair(*leaves, stride=2, padding=4)
        gradients = torch.autograd.grad(result.sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(tensor.isfinite().all() for tensor in (result, *gradients))


@pytest.mark.parametrize("left", [0, 1, 20, 63])
@pytest.mark.parametrize(("side", "padding"), [(28, 0), (24, 4)])
@pytest.mark.usefixtures("path")
def test_images_without_gradient(side: int, padding: int, left: int) -> None:
    """They are left out of the backward pass where that is faster, and nothing else changes."""
    images, *parameters = problem((64, 1, side, side, 8, 16, 9, 9, 2), torch.float32)
    leaves = [tensor.requires_grad_() for tensor in parameters]
    doubles = [tensor.detach().double().requires_grad_() for tensor in leaves]
    options = {"stride": 2, "padding": padding}
    result, reference = (
        bilinear_conv_pair(images, *leaves, **options),
        reference_pair(images.double(), *doubles, **options),
    )
    upstream = torch.randn_like(result)
    upstream[torch.arange(64) * 37 % 64 >= left] = 0
    gradients = torch.autograd.grad(result, leaves, upstream)
    references = torch.autograd.grad(reference, doubles, upstream.double())
    if left:
        assert all(relative(*pair) < 2e-4 for pair in zip(gradients, references))
    else:
        assert not any(gradient.any() for gradient in gradients)


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
        torch.autograd.grad(result.sum(), leaves), torch.autograd.grad(reference_pair(*leaves, stride=2).sum(), leaves)
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
        torch.autograd.grad(result.sum(), leaves), torch.autograd.grad(reference_pair(*leaves, stride=2).sum(), leaves)
    )


def test_a_taps_first_parameter_gets_its_gradient_in_the_same_order() -> None:
    leaves = problem(SHAPES[0])
    leaves[3] = leaves[3].permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    weight = leaves[3].requires_grad_()
    bilinear_conv_pair(*leaves, stride=2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    (reference,) = torch.autograd.grad(reference_pair(*leaves, stride=2).sum(), weight)
    torch.testing.assert_close(weight.grad, reference)


@pytest.mark.parametrize("keep", [torch.Tensor.detach, lambda tensor: tensor.view_as(tensor)])
def test_gradients_do_not_hang_on_how_saved_tensors_are_kept(keep):
    """Two graphs at once, whose large arrays are held by views alone."""
    images = [torch.rand(32, 1, 28, 28) for _ in range(2)]
    weight1, weight2 = torch.randn(32, 1, 9, 9) / 9, (torch.randn(64, 32, 9, 9) / 50).requires_grad_()

    def gradient(pack):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            total = sum(
                bilinear_conv_pair(image, weight1, None, weight2, None, stride=2).square().sum() for image in images
            )
        return torch.autograd.grad(total, weight2)[0]

    assert torch.equal(gradient(keep), gradient(lambda tensor: tensor))


def test_a_kernel_transformed_by_compiled_code_serves_where_there_is_none(monkeypatch) -> None:
    images, *parameters = problem(SHAPES[0])
    kernel = TransformedKernel((6, 6), (), compiled=True)
    expected = reference_pair(images, *parameters, stride=2)
    monkeypatch.setattr(compiled, "native", lambda *module: None)
    torch.testing.assert_close(conv_pair(images, *parameters, stride=2, kernel=kernel), expected)
