import math

import pytest
import torch
from torch import Tensor

from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.routing import DenseVotes, EMRouting
from torchcaps.routing.em import em_routing, inverse_temperatures


def naive_em_routing(
    votes: Tensor, activations: Tensor, beta_a: Tensor, beta_u: Tensor, temperatures: list[float], floor: float
) -> tuple[Tensor, Tensor]:
    """Procedure 1 of the paper for one image, number by number."""
    I, J, E = votes.shape
    R = [[1 / J] * J for _ in range(I)]
    mean = torch.zeros(J, E, dtype=votes.dtype)
    variance = torch.zeros(J, E, dtype=votes.dtype)
    outputs = torch.zeros(J, dtype=votes.dtype)
    for temperature in temperatures:
        for j in range(J):  # M-step
            weights = [R[i][j] * float(activations[i]) for i in range(I)]
            cost = 0.0
            for h in range(E):
                mean[j, h] = sum(w * float(votes[i, j, h]) for i, w in enumerate(weights)) / sum(weights)
                squares = [(float(votes[i, j, h]) - float(mean[j, h])) ** 2 for i in range(I)]
                variance[j, h] = sum(w * s for w, s in zip(weights, squares)) / sum(weights) + floor
                cost += (float(beta_u[j]) + math.log(math.sqrt(variance[j, h]))) * sum(weights)
            outputs[j] = 1 / (1 + math.exp(-temperature * (float(beta_a[j]) - cost)))
        for i in range(I):  # E-step
            densities = []
            for j in range(J):
                density = 1.0
                for h in range(E):
                    distance = (float(votes[i, j, h]) - float(mean[j, h])) ** 2 / (2 * float(variance[j, h]))
                    density *= math.exp(-distance) / math.sqrt(2 * math.pi * float(variance[j, h]))
                densities.append(float(outputs[j]) * density)
            R[i] = [density / sum(densities) for density in densities]
    return mean, outputs


def problem(*batch: int, I: int = 5, J: int = 3, E: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Votes, activations, β_a and β_u."""
    votes = torch.randn(*batch, I, J, E, dtype=dtype)
    return [votes, torch.rand(*batch, I, dtype=dtype), torch.randn(J, dtype=dtype), torch.randn(J, dtype=dtype)]


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_equals_the_papers_procedure_by_loops(iterations):
    votes, activations, beta_a, beta_u = problem(2)
    routed = em_routing(votes, activations, beta_a, beta_u, iterations=iterations, variance_floor=1e-3)
    temperatures = inverse_temperatures(iterations)
    for k in range(2):
        means, outputs = naive_em_routing(votes[k], activations[k], beta_a, beta_u, temperatures, 1e-3)
        torch.testing.assert_close(routed.poses[k], means)
        torch.testing.assert_close(routed.activations[k], outputs)


def test_one_iteration_by_hand():
    votes = torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]], dtype=torch.float64)  # two capsules vote for one
    activations = torch.tensor([1.0, 0.5], dtype=torch.float64)
    routed = em_routing(
        votes,
        activations,
        torch.tensor([2.0], dtype=torch.float64),
        torch.tensor([1.0], dtype=torch.float64),
        iterations=1,
        inverse_temperature=1.0,
        decay=0.5,
        variance_floor=1 / 9,
    )
    # Weights 1 and 1/2: mean 2.5 / 1.5, variances 8/9 + 1/9 = 1 and 0 + 1/9, amount 1.5.
    cost = 1.5 * (1 + 0.0) + 1.5 * (1 - math.log(3))
    torch.testing.assert_close(routed.poses, torch.tensor([[5 / 3, 0.0]], dtype=torch.float64))
    assert routed.activations.item() == pytest.approx(1 / (1 + math.exp(-0.5 * (2 - cost))))


def test_the_inverse_temperature_rises_towards_its_final_value():
    temperatures = inverse_temperatures(50)
    assert temperatures[:2] == pytest.approx([0.01 * 0.05, 0.01 * (1 - 0.95**2)])
    assert temperatures == sorted(temperatures)
    assert 0.009 < temperatures[-1] < 0.01


def test_the_relative_cost_does_not_depend_on_the_size_of_the_layer():
    votes, activations, beta_a, beta_u = problem(2)
    settings = {"relative": True, "inverse_temperature": 1.0}
    routed = em_routing(votes, activations, beta_a, beta_u, **settings)
    # Every input capsule twice over, and every component of the votes twice over where only one iteration counts.
    doubled = em_routing(votes.repeat(1, 2, 1, 1), activations.repeat(1, 2), beta_a, beta_u, **settings)
    torch.testing.assert_close(doubled.activations, routed.activations)
    once = [
        em_routing(given, activations, beta_a, beta_u, iterations=1, **settings) for given in (votes, votes.tile(2))
    ]
    torch.testing.assert_close(once[0].activations, once[1].activations)


def test_leading_axes_are_problems_of_their_own():
    votes, activations, beta_a, beta_u = problem(2, 3)
    together = em_routing(votes, activations, beta_a, beta_u)
    assert together.poses.shape == (2, 3, 3, 4)
    assert together.activations.shape == (2, 3, 3)
    alone = em_routing(votes[1, 2], activations[1, 2], beta_a, beta_u)
    torch.testing.assert_close(together.poses[1, 2], alone.poses)
    torch.testing.assert_close(together.activations[1, 2], alone.activations)


def test_the_order_of_the_input_capsules_does_not_matter():
    votes, activations, beta_a, beta_u = problem(2)
    order = torch.randperm(votes.shape[1])
    torch.testing.assert_close(
        em_routing(votes, activations, beta_a, beta_u),
        em_routing(votes[:, order], activations[:, order], beta_a, beta_u),
    )


def test_an_input_capsule_that_is_off_has_no_say():
    votes, activations, beta_a, beta_u = problem(2)
    activations[:, 0] = 0
    torch.testing.assert_close(
        em_routing(votes, activations, beta_a, beta_u),
        em_routing(votes[:, 1:], activations[:, 1:], beta_a, beta_u),
        atol=1e-9,
        rtol=1e-9,
    )


def test_votes_that_agree_turn_a_capsule_on_and_move_to_it():
    votes = torch.randn(1, 20, 2, 8)
    votes[:, :, 0] = 0.05 * votes[:, :, 0] + 1
    activations = torch.ones(1, 20)
    routed = em_routing(votes, activations, torch.zeros(2), torch.zeros(2), inverse_temperature=0.1, decay=0.5)
    assert routed.activations[0, 0] > 0.9
    assert routed.activations[0, 1] < 0.6
    torch.testing.assert_close(routed.poses[0, 0], torch.ones(8), atol=0.05, rtol=0)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("iterations", [1, 3])
def test_gradients(relative, iterations):
    inputs = [tensor.requires_grad_() for tensor in problem(2, I=4, J=3, E=2)]
    settings = {"iterations": iterations, "relative": relative, "inverse_temperature": 0.5}
    assert torch.autograd.gradcheck(lambda *given: em_routing(*given, **settings)[:2], inputs)


def nothing(votes: Tensor, activations: Tensor) -> None:
    activations.zero_()


def almost_nothing(votes: Tensor, activations: Tensor) -> None:
    activations.mul_(1e-20)


def one_active(votes: Tensor, activations: Tensor) -> None:
    activations[:, 1:] = 0


def huge(votes: Tensor, activations: Tensor) -> None:
    votes.mul_(1e15)


def tiny(votes: Tensor, activations: Tensor) -> None:
    votes.mul_(1e-20)


def all_alike(votes: Tensor, activations: Tensor) -> None:
    votes.copy_(votes[:, :1])


def zeros(votes: Tensor, activations: Tensor) -> None:
    votes.zero_()


def far_apart(votes: Tensor, activations: Tensor) -> None:
    votes[:, ::2].add_(1e6)


@pytest.mark.parametrize("spoil", [nothing, almost_nothing, one_active, huge, tiny, all_alike, zeros, far_apart])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_nothing_overflows(spoil, autocast, relative):
    votes, activations, beta_a, beta_u = problem(2, I=30, J=5, E=16, dtype=torch.float32)
    spoil(votes, activations)
    inputs = [votes, activations, beta_a, beta_u]
    if autocast:
        inputs[:2] = votes.bfloat16(), activations.bfloat16()
    inputs = [tensor.requires_grad_() for tensor in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routed = em_routing(*inputs, relative=relative, inverse_temperature=4.0 if relative else 0.01, decay=0.5)
        assert all(tensor.isfinite().all() for tensor in routed)
        gradients = torch.autograd.grad(routed.activations.sum() + routed.poses.mean(), inputs)
    assert all(tensor.isfinite().all() for tensor in gradients)


def test_is_computed_in_float32_under_autocast():
    inputs = problem(4, I=30, J=5, E=16, dtype=torch.float32)
    inputs[0] = inputs[0].bfloat16()
    expected = em_routing(inputs[0].float(), *inputs[1:])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(em_routing(*inputs), expected)


def test_parameters_of_low_precision_give_capsules_of_low_precision():
    inputs = [tensor.bfloat16() for tensor in problem(2)]
    routed = em_routing(*inputs)
    assert {tensor.dtype for tensor in routed} == {torch.bfloat16}


def test_the_backward_pass_keeps_one_tensor_of_the_size_of_the_votes():
    inputs = [tensor.requires_grad_() for tensor in problem(4, I=30, J=5, E=16)]
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        routed = em_routing(*inputs)
    vote_sized = [size for size in saved.values() if size >= inputs[0].nbytes]
    assert len(vote_sized) == 1
    assert routed.poses.requires_grad


def test_compiled_gives_the_same():
    inputs = problem(2, dtype=torch.float32)
    compiled = torch.compile(em_routing, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), em_routing(*inputs))


def test_the_layer_learns_one_pair_of_betas_for_each_output_capsule():
    layer = CapsuleLayer(6, 4, 3, 5, EMRouting(iterations=2))
    assert {name for name, _ in layer.named_parameters()} == {"weight", "routing.beta_a", "routing.beta_u"}
    assert layer.routing.beta_a.shape == layer.routing.beta_u.shape == (3,)
    poses = torch.randn(2, 6, 4)
    routed = layer(poses, poses.norm(dim=-1))
    assert routed.poses.shape == routed.totals.shape == (2, 3, 5)
    assert ((routed.activations > 0) & (routed.activations < 1)).all()
    routed.activations.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in layer.parameters())


def test_an_image_does_not_depend_on_its_neighbours():
    routing = EMRouting()
    routing.connect(6, 3, 5)
    votes, activations = torch.randn(4, 6, 3, 5), torch.rand(4, 6)
    together = routing(DenseVotes(votes), activations)
    alone = routing(DenseVotes(votes[2:3]), activations[2:3])
    torch.testing.assert_close(together.poses[2:3], alone.poses)
    torch.testing.assert_close(together.activations[2:3], alone.activations)


@pytest.mark.parametrize("settings", [{"iterations": 0}, {"inverse_temperature": 0.0}, {"variance_floor": 0.0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        EMRouting(**settings)


def test_shapes_can_be_found_on_the_meta_device():
    layer = CapsuleLayer(6, 4, 3, 4, EMRouting()).to("meta")
    assert layer(torch.empty(2, 6, 4, device="meta"), torch.empty(2, 6, device="meta")).poses.shape == (2, 3, 4)
