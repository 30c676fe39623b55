"""The contract of a routing, as checks that anyone can run on their own.

>>> from torchcaps.routing import UniformRouting
>>> check_routing(UniformRouting, only=["shapes", "batch_independence"])
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchcaps.functional import Capsules, margin_loss, squash
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.routing.base import Routing
from torchcaps.routing.votes import LinearVotes

MakeRouting = Callable[[], Routing]

B, I, J, D, E = 4, 6, 5, 3, 4
RECENT = 20  # batches that an error is taken over
LEARNED = 0.02


def check_routing(make: MakeRouting, *, only: Iterable[str] | None = None) -> None:
    """Run the contract on a routing, given its class or a function that makes one with all its defaults.

    Raises ``AssertionError`` at the first check that fails. ``only`` names some of :data:`CONTRACT`.
    """
    if isinstance(make, Routing):
        raise TypeError("give the class of the routing, or a function that makes one, not an object")
    names = list(CONTRACT if only is None else only)
    if unknown := [name for name in names if name not in CONTRACT]:
        raise ValueError(f"unknown check {unknown[0]!r}: choose from {', '.join(CONTRACT)}")
    for name in names:
        try:
            CONTRACT[name](make)
        except Exception as error:
            raise AssertionError(f"{make} does not keep the contract on {name.replace('_', ' ')}: {error}") from error


def _layer(make: MakeRouting, *, seed: int = 0) -> CapsuleLayer:
    torch.manual_seed(seed)
    return CapsuleLayer(I, D, J, E, make(), weight_std=0.5)


def _trained(layer: CapsuleLayer) -> CapsuleLayer:
    """As after training: no parameter where it started."""
    for tensor in [*layer.parameters(), *layer.buffers()]:
        if tensor.is_floating_point():
            nn.init.normal_(tensor, std=0.3)
    return layer


def _inputs(dtype: torch.dtype = torch.float32, *, batch: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    poses = squash(torch.randn(batch, I, D, generator=generator, dtype=torch.float64)).to(dtype)
    return poses, torch.linalg.vector_norm(poses, dim=-1)


def _check_capsules(capsules: Capsules, batch: int = B) -> None:
    assert capsules.poses.shape == (batch, J, E), f"poses have shape {tuple(capsules.poses.shape)}"
    assert capsules.totals.shape == (batch, J, E), f"totals have shape {tuple(capsules.totals.shape)}"
    assert capsules.activations.shape == (batch, J), f"activations have shape {tuple(capsules.activations.shape)}"
    for tensor in capsules:
        assert tensor.isfinite().all(), "not all numbers are finite"
    assert (capsules.activations >= 0).all(), "an activation is negative"
    assert (capsules.activations <= 1).all(), "an activation is above 1"


def check_shapes(make: MakeRouting) -> None:
    """(B, I, D) -> (B, J, E), for any batch size, with activations in [0, 1]."""
    layer = _layer(make)
    for batch in (1, B):
        _check_capsules(layer(*_inputs(batch=batch)), batch)


def check_dtypes(make: MakeRouting) -> None:
    """float64 agrees with float32; bfloat16 autocast does so roughly, and gives finite gradients."""
    layer = _layer(make)
    single = layer(*_inputs())
    assert single.poses.dtype == torch.float32
    double = _layer(make).double()(*_inputs(torch.float64))
    assert double.poses.dtype == torch.float64, "float64 in, something else out"
    assert_close(tuple(tensor.float() for tensor in double), tuple(single), rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer(*_inputs())
    _check_capsules(rough)
    assert_close(rough.activations.float(), single.activations, rtol=0.1, atol=0.05)
    torch.autograd.backward(rough.activations.float().sum())
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all(), "a gradient under autocast is not finite"


def check_gradients(make: MakeRouting) -> None:
    """All gradients are right, of the inputs and of every parameter: by finite differences, in float64."""
    layer = _layer(make).double()
    poses, activations = _inputs(torch.float64, batch=2)
    names = [name for name, _ in layer.named_parameters()]

    def outputs(poses: Tensor, activations: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.func.functional_call(layer, dict(zip(names, parameters)), (poses, activations)))

    inputs = [poses, activations, *layer.parameters()]
    assert torch.autograd.gradcheck(outputs, [tensor.detach().requires_grad_() for tensor in inputs], atol=1e-5)


def check_zero_input(make: MakeRouting) -> None:
    """Capsules that are all zero give finite outputs and gradients."""
    layer = _layer(make)
    poses = torch.zeros(2, I, D, requires_grad=True)
    capsules = layer(poses, torch.zeros(2, I))
    _check_capsules(capsules, 2)
    torch.autograd.backward(capsules.poses.sum() + capsules.activations.sum())
    assert poses.grad is not None
    assert poses.grad.isfinite().all(), "the gradient at zero is not finite"


def check_input_order(make: MakeRouting) -> None:
    """The order in which input capsules are numbered does not matter, as long as nothing is learned yet."""
    layer = _layer(make)
    poses, activations = _inputs()
    expected = layer(poses, activations)
    order = torch.randperm(I)
    with torch.no_grad():
        layer.weight.copy_(layer.weight[order].clone())
    assert_close(layer(poses[:, order], activations[:, order]), expected, rtol=1e-4, atol=1e-5)


def check_output_order(make: MakeRouting) -> None:
    """Numbering the output capsules otherwise numbers the results otherwise, and changes nothing else."""
    layer = _layer(make)
    poses, activations = _inputs()
    expected = layer(poses, activations)
    order = torch.randperm(J)
    with torch.no_grad():
        layer.weight.copy_(layer.weight[:, :, order].clone())
    permuted = Capsules(*(tensor[:, order] for tensor in expected))
    assert_close(layer(poses, activations), permuted, rtol=1e-4, atol=1e-5)


def check_batch_independence(make: MakeRouting) -> None:
    """At inference the result for an image does not depend on the images beside it."""
    layer = _layer(make).eval()
    poses, activations = _inputs()
    with torch.no_grad():
        together = layer(poses, activations)
        for image in range(B):
            alone = layer(poses[image : image + 1], activations[image : image + 1])
            assert_close(tuple(alone), tuple(tensor[image : image + 1] for tensor in together), rtol=1e-4, atol=1e-6)


def check_shared_batches(make: MakeRouting) -> None:
    """The gradient of a batch is the mean of its halves' gradients, so that processes can share a batch."""
    poses, activations = _inputs(torch.float64)
    labels = torch.arange(B) % J

    def gradients(part: slice) -> tuple[Tensor, ...]:
        layer = _layer(make).double()
        loss = margin_loss(layer(poses[part], activations[part]).activations, labels[part])
        return torch.autograd.grad(loss, list(layer.parameters()))

    first, second = gradients(slice(0, B // 2)), gradients(slice(B // 2, B))
    halves = tuple((one + other) / 2 for one, other in zip(first, second))
    assert_close(halves, gradients(slice(None)), rtol=1e-6, atol=1e-9)


def check_evaluation(make: MakeRouting) -> None:
    """In evaluation the same input gives the same bits, without labels, and leaves the layer as it was."""
    layer = _layer(make).eval()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with torch.no_grad():
        first, second = (layer(*_inputs()) for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)
    assert_close(dict(layer.state_dict()), before, rtol=0, atol=0)


def check_saving(make: MakeRouting) -> None:
    """The state is all that a new layer needs to give the same answers, and the settings fit into a file."""
    layer = _trained(_layer(make))
    settings = layer.routing.settings
    assert json.loads(json.dumps(settings)) == settings, f"{settings} do not come back from JSON as they are"
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = _layer(make, seed=9)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_close(other(*_inputs()), layer(*_inputs()), rtol=0, atol=0)


def check_folding(make: MakeRouting) -> None:
    """Folding shared coefficients into the weights changes no answer."""
    layer = _trained(_layer(make)).eval()
    with torch.no_grad():
        expected = layer(*_inputs())
        layer.fold()
        assert_close(layer(*_inputs()), expected, rtol=1e-4, atol=1e-6)


def check_coefficients(make: MakeRouting) -> None:
    """The votes summed with ``coefficients_for``, if it has them, are the totals."""
    layer = _trained(_layer(make)).eval()
    poses, activations = _inputs()
    votes = LinearVotes(poses, layer.weight)
    with torch.no_grad():
        totals = layer(poses, activations).totals
        try:
            coefficients = layer.routing.coefficients_for(votes, activations)
        except NotImplementedError:
            return
        assert_close(votes.combine(coefficients), totals, rtol=1e-4, atol=1e-5)


def check_compilation(make: MakeRouting) -> None:
    """``torch.compile`` captures the layer whole, and the result is the same."""
    layer = _layer(make)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close(tuple(compiled(*_inputs())), tuple(layer(*_inputs())), rtol=1e-4, atol=1e-5)


def check_export(make: MakeRouting) -> None:
    """``torch.export`` captures the layer with any batch size."""
    layer = _layer(make).eval()
    size = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(layer, _inputs(), dynamic_shapes=(size, size))
    inputs = _inputs(batch=B + 3)
    assert_close(tuple(program.module()(*inputs)), tuple(layer(*inputs)), rtol=1e-4, atol=1e-5)


def check_learning(make: MakeRouting) -> None:
    """A layer learns to tell classes apart that are marked by the direction of one capsule."""
    torch.manual_seed(0)
    layer = CapsuleLayer(I, D, J, E, make())
    directions = 2 * torch.randn(J, I, D)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    errors: list[float] = []
    for _ in range(300):
        labels = torch.randint(J, (32,))
        poses = squash(directions[labels] + 0.5 * torch.randn(32, I, D))
        activations: Tensor = layer(poses, torch.linalg.vector_norm(poses, dim=-1)).activations
        errors.append(float((activations.argmax(1) != labels).float().mean()))
        if len(errors) >= RECENT and _mean_error(errors) < LEARNED:
            return
        optimizer.zero_grad()
        torch.autograd.backward(margin_loss(activations, labels))
        optimizer.step()
    raise AssertionError(f"after 300 steps {100 * _mean_error(errors):.0f} % of the images are still wrong")


def _mean_error(errors: list[float]) -> float:
    return sum(errors[-RECENT:]) / RECENT


CONTRACT: dict[str, Callable[[MakeRouting], None]] = {
    "shapes": check_shapes,
    "dtypes": check_dtypes,
    "gradients": check_gradients,
    "zero_input": check_zero_input,
    "input_order": check_input_order,
    "output_order": check_output_order,
    "batch_independence": check_batch_independence,
    "shared_batches": check_shared_batches,
    "evaluation": check_evaluation,
    "saving": check_saving,
    "folding": check_folding,
    "coefficients": check_coefficients,
    "compilation": check_compilation,
    "export": check_export,
    "learning": check_learning,
}
