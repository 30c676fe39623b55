"""Muon, held to an orthogonalisation by SVD and by the printed iteration in float64, and to torch's own Adam."""

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn

from naive import naive_orthogonalised
from torchcaps import CapsuleLayer, CapsuleNetwork, Muon
from torchcaps.optim import orthogonalised, orthogonaliser, parameter_groups
from torchcaps.storage import read_tensors, write_tensors

SHAPES = [((7, 5, 3, 3), (0,)), ((4, 2, 3, 3), (0,)), ((6, 4, 3, 5), (2, 3)), ((9, 30), (0,)), ((30, 9), (0,)),
          ((12, 5), (1,)), ((1, 8), (0,)), ((6,), (0,))]  # fmt: skip


def as_matrix(tensor: Tensor, outputs: tuple[int, ...]) -> Tensor:
    """Rows are the output axes, columns all others, whatever the order in memory."""
    others = [axis for axis in range(tensor.ndim) if axis not in outputs]
    rows = math.prod(tensor.shape[axis] for axis in outputs)
    return tensor.permute(*outputs, *others).reshape(rows, -1)


def in_order(tensor: Tensor, order: str) -> Tensor:
    """The same numbers, lying in memory otherwise."""
    if order == "taps first" and tensor.ndim == 4:
        return tensor.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    if order == "channels last" and tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_it_is_the_printed_iteration(shape, outputs):
    update = torch.randn(shape, dtype=torch.float64)
    found = as_matrix(orthogonalised(update, outputs), outputs)
    torch.testing.assert_close(found, naive_orthogonalised(as_matrix(update, outputs)), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize(("shape", "outputs"), [((8, 40), (0,)), ((40, 8), (0,)), ((10, 10, 3, 3), (0,))])
def test_singular_values_come_near_one_and_their_vectors_stay(shape, outputs, scale):
    matrix = as_matrix(torch.randn(shape, dtype=torch.float64), outputs)
    U, _, Vh = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.linspace(0.3, 1.0, len(Vh), dtype=torch.float64)
    update = scale * (U * values) @ Vh
    rows, columns = update.shape
    turned = U.T @ orthogonalised(update, (0,)) @ Vh.T / math.sqrt(max(1.0, rows / columns))
    diagonal = turned.diagonal()
    assert ((diagonal > 0.65) & (diagonal < 1.25)).all()
    torch.testing.assert_close(turned, torch.diag(diagonal), rtol=0, atol=1e-8)


def test_in_float32_it_is_as_near():
    update = torch.randn(16, 200)
    exact = orthogonalised(update.double(), (0,))
    torch.testing.assert_close(orthogonalised(update, (0,)).double(), exact, rtol=1e-3, atol=1e-4)


def test_nothing_stays_nothing():
    assert orthogonalised(torch.zeros(4, 3, 2, 2), (0,)).eq(0).all()
    assert orthogonaliser(torch.zeros(4, 4)).isfinite().all()


@pytest.mark.parametrize("order", ["taps first", "channels last"])
def test_the_memory_order_does_not_matter(order):
    update = torch.randn(7, 5, 3, 3, dtype=torch.float64)
    given = in_order(update, order)
    assert given.stride() != update.stride()
    torch.testing.assert_close(orthogonalised(given, (0,)), orthogonalised(update, (0,)), rtol=1e-9, atol=1e-12)


def test_outputs_are_the_first_axes_or_the_last():
    for outputs in ((0, 2), (1,)):
        with pytest.raises(ValueError, match="first axes"):
            orthogonalised(torch.randn(4, 3, 2), outputs)


def test_many_rows_are_made_orthogonal_in_blocks():
    update = torch.randn(300, 40, 16, dtype=torch.float64)  # 640 rows of 300 columns, in blocks of 214, 214 and 212
    found = orthogonalised(update, (1, 2)).reshape(300, 640)
    for block in found.split(214, dim=1):
        values = torch.linalg.svdvals(block)
        assert 0.6 < values.min() <= values.max() < 1.3
    torch.testing.assert_close(
        orthogonalised(update.permute(1, 2, 0), (0, 1)).permute(2, 0, 1), orthogonalised(update, (1, 2))
    )


@pytest.mark.parametrize("shape", [(256, 40), (257, 40), (1600, 256), (160, 900)])
def test_outputs_change_alike_whatever_the_shape(shape):
    norms = torch.linalg.vector_norm(orthogonalised(torch.randn(shape), (0,)), dim=1)
    assert 0.7 < float(norms.mean()) < 1.1


def problem(order: str = "contiguous", dtype: torch.dtype = torch.float64) -> tuple[list[nn.Parameter], list[dict]]:
    """A kernel for orthogonal steps, a kernel and a bias for Adam, and their groups."""
    torch.manual_seed(0)
    kernels = [nn.Parameter(in_order(torch.randn(6, 4, 3, 3, dtype=dtype), order)) for _ in range(2)]
    bias = nn.Parameter(torch.randn(6, dtype=dtype))
    groups = [{"params": [kernels[0]], "outputs": (0,), "lr": 0.1}, {"params": [kernels[1], bias]}]
    return [*kernels, bias], groups


def gradients(steps: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(6, 4, 3, 3), (6, 4, 3, 3), (6,)]
    return [[torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes] for _ in range(steps)]


def run(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: list[list[Tensor]]) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, step):
            parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.95])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_steps_are_momentum_ahead_orthogonalised_by_loops(momentum, decay):
    parameters, groups = problem()
    expected = as_matrix(parameters[0].detach().clone(), (0,))
    optimizer = Muon(groups, momentum=momentum, weight_decay=decay)
    mean = torch.zeros_like(expected)
    steps = gradients(4)
    for step in steps:
        gradient = as_matrix(step[0], (0,))
        mean = momentum * mean + (1 - momentum) * gradient
        ahead = momentum * mean + (1 - momentum) * gradient
        expected = (1 - 0.1 * decay) * expected - 0.1 * naive_orthogonalised(ahead)
    run(optimizer, parameters, steps)
    torch.testing.assert_close(as_matrix(parameters[0].detach(), (0,)), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("order", ["taps first", "channels last"])
@pytest.mark.parametrize("gradient_order", ["contiguous", "taps first"])
def test_steps_do_not_depend_on_the_memory_order(order, gradient_order):
    outcomes = []
    for layout in ("contiguous", order):
        parameters, groups = problem(layout)
        steps = [[in_order(gradient, gradient_order) for gradient in step] for step in gradients(4)]
        run(Muon(groups, weight_decay=0.1), parameters, steps)
        assert parameters[0].stride() == problem(layout)[0][0].stride()
        outcomes.append([parameter.detach() for parameter in parameters])
    torch.testing.assert_close(*outcomes, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", ["contiguous", "taps first"])
def test_groups_without_outputs_move_bit_for_bit_as_torchs_fused_adam(dtype, order):
    ours, _ = problem(order, dtype)
    torchs, _ = problem("contiguous", dtype)
    options = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-7}
    run(Muon(ours, **options), ours, gradients(5, dtype))
    run(torch.optim.Adam(torchs, fused=True, **options), torchs, gradients(5, dtype))
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0)


def test_weight_decay_of_the_others_takes_from_weights_and_not_from_biases():
    plain, groups = problem()
    run(Muon(groups, lr=0.01), plain, gradients(1))
    decayed, groups = problem()
    start = decayed[1].detach().clone()
    run(Muon(groups, lr=0.01, weight_decay=0.5), decayed, gradients(1))
    torch.testing.assert_close(plain[1] - decayed[1], 0.01 * 0.5 * start)
    torch.testing.assert_close(plain[2], decayed[2], rtol=0, atol=0)


@pytest.mark.parametrize("order", ["contiguous", "taps first"])
@pytest.mark.parametrize("through", ["torch", "our files"])
def test_what_is_resumed_is_bit_identical(order, through, tmp_path):
    """Also from files that keep the numbers only, and not the order they had in memory."""
    steps = gradients(6, torch.float32)
    whole, groups = problem(order, torch.float32)
    run(Muon(groups), whole, steps)
    resumed, groups = problem(order, torch.float32)
    first = Muon(groups)
    run(first, resumed, steps[:3])
    state = first.state_dict()
    if through == "torch":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    else:
        tensors = {f"{index}.{name}": value for index, held in state["state"].items() for name, value in held.items()}
        write_tensors(tmp_path / "state.safetensors", tensors, {})
        tensors, _ = read_tensors(tmp_path / "state.safetensors")
        for index, held in state["state"].items():
            state["state"][index] = {name: tensors[f"{index}.{name}"] for name in held}
    groups = [{**group, "params": list(group["params"])} for group in groups]
    second = Muon([{key: group[key] for key in ("params", "outputs", "lr") if key in group} for group in groups])
    second.load_state_dict(state)
    run(second, resumed, steps[3:])
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_it_can_be_copied_together_with_its_parameters():
    parameters, groups = problem()
    optimizer = Muon(groups)
    run(optimizer, parameters, gradients(2))
    copied, copied_optimizer = copy.deepcopy((parameters, optimizer))
    run(optimizer, parameters, gradients(3))
    run(copied_optimizer, copied, gradients(3))
    torch.testing.assert_close(copied, parameters, rtol=0, atol=0)


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned():
    layer = nn.Linear(8, 4)
    groups = [{"params": [layer.weight], "outputs": (0,), "lr": 0.02}, {"params": [layer.bias]}]
    optimizer = Muon(groups)
    inputs = torch.randn(16, 8)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer(inputs).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    returned = [optimizer.step(closure).item() for _ in range(5)]
    assert returned == losses
    assert losses[-1] < losses[0]
    assert optimizer.step() is None


def test_parameters_without_a_gradient_stay():
    parameters, groups = problem()
    before = copy.deepcopy(parameters)
    Muon(groups, weight_decay=0.5).step()
    torch.testing.assert_close(parameters, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1e-3},
        {"lr": float("nan")},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"weight_decay": -1.0},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
    ],
)
def test_bad_arguments_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*out of range"):
        Muon([nn.Parameter(torch.ones(2, 2))], **options)


def test_schedules_change_the_rate_of_every_group():
    _, groups = problem()
    optimizer = Muon(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]


@pytest.mark.parametrize("matrix_lr", [0.02, None])
def test_the_groups_of_a_network_hold_each_of_its_parameters_once(matrix_lr):
    network = CapsuleNetwork((1, 20, 20), 3, layers=[(6, 4)], conv_channels=4, primary_capsules=2)
    groups = parameter_groups(network, lr=1e-3, matrix_lr=matrix_lr)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(names)
    outputs = {names[id(parameter)]: group["outputs"] for group in groups for parameter in group["params"]}
    expected = {"front.first.weight": (0,), "front.second.weight": (0,), "layers.0.weight": (2, 3)}
    for name, axes in expected.items():
        assert outputs[name] == (axes if matrix_lr else None)
    assert outputs["front.first.bias"] is None


@pytest.mark.parametrize(
    ("inputs", "matrix_rate", "rate"), [(9216 // 8, 0.01, 1e-3), (4 * 9216 // 8, 0.005, 2.5e-4), (2, 0.04, 1.6e-2)]
)
def test_capsule_weights_with_more_inputs_take_smaller_steps(inputs, matrix_rate, rate):
    layer = CapsuleLayer(inputs, 8, 3, 4)
    (group,) = [group for group in parameter_groups(layer, lr=1e-3, matrix_lr=0.01) if group["params"]]
    assert group["lr"] == pytest.approx(matrix_rate)
    (group,) = [
        group for group in parameter_groups(layer, lr=1e-3, matrix_lr=None) if layer.weight in set(group["params"])
    ]
    assert group["lr"] == pytest.approx(rate)


def test_a_network_learns_with_it():
    network = CapsuleNetwork((1, 20, 20), 2, conv_channels=4, primary_capsules=2, reconstruction=False)
    optimizer = Muon(parameter_groups(network, matrix_lr=0.02))
    images, labels = torch.rand(16, 1, 20, 20), torch.arange(16) % 2
    images[:8] *= 0.3
    losses = []
    for _ in range(12):
        loss = network.loss(network(images).capsules, labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
