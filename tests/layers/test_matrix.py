import math

import pytest
import torch
from torch import Tensor

from torchcaps.functional import Capsules
from torchcaps.layers.matrix import ClassMatrixCapsules, ConvMatrixCapsules, PrimaryMatrixCapsules
from torchcaps.routing.em import EMRouting, em_routing


def capsule_map(batch: int, height: int, width: int, types: int) -> Capsules:
    poses = torch.randn(batch, height, width, types, 16)
    return Capsules(poses, torch.rand(batch, height, width, types), poses)


def votes_seen_by(layer: torch.nn.Module, capsules: Capsules) -> tuple[Tensor, Tensor]:
    """The votes (..., I, J, E) and activations (..., I) that a layer gives to its routing."""
    seen: list[tuple[Tensor, Tensor]] = []
    route = layer.routing.route

    def listen(votes: Tensor, activations: Tensor, **settings: object) -> Capsules:
        seen.append((votes, activations))
        return route(votes, activations, **settings)

    layer.routing.route = listen
    layer(capsules)
    return seen[0]


def test_primary_capsules_are_linear_with_a_logistic_activation():
    layer = PrimaryMatrixCapsules(5, 3)
    features = torch.randn(2, 5, 4, 6)
    capsules = layer(features)
    assert capsules.poses.shape == (2, 4, 6, 3, 16)
    weight, bias = layer.conv.weight[:, :, 0, 0], layer.conv.bias
    at_a_place = weight @ features[1, :, 3, 2] + bias
    torch.testing.assert_close(capsules.poses[1, 3, 2].flatten(), at_a_place[:48])
    torch.testing.assert_close(capsules.activations[1, 3, 2], at_a_place[48:].sigmoid())


@pytest.mark.parametrize("size", [(3, 3), (5, 5), (6, 9), (14, 8)])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1), (2, 3)])
def test_shapes_of_convolutional_capsules(size, kernel, stride):
    layer = ConvMatrixCapsules(2, 3, EMRouting(), kernel=kernel, stride=stride)
    capsules = layer(capsule_map(2, *size, 2))
    height, width = ((side - kernel) // stride + 1 for side in size)
    assert capsules.poses.shape == (2, height, width, 3, 16)
    assert capsules.activations.shape == (2, height, width, 3)
    capsules.activations.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in layer.parameters())


def test_a_vote_is_the_pose_times_the_matrix_of_its_types_and_place_in_the_window():
    layer = ConvMatrixCapsules(2, 3, EMRouting(), kernel=3, stride=2)
    capsules = capsule_map(1, 7, 5, 2)
    votes, activations = votes_seen_by(layer, capsules)
    assert votes.shape == (1, 3, 2, 18, 3, 16)
    row, column, k, l, t, j = 2, 1, 1, 2, 1, 0
    pose = capsules.poses[0, 2 * row + k, 2 * column + l, t].view(4, 4)
    voter = (k * 3 + l) * 2 + t
    torch.testing.assert_close(votes[0, row, column, voter, j].view(4, 4), pose @ layer.weight[k, l, t, j])
    assert activations[0, row, column, voter] == capsules.activations[0, 2 * row + k, 2 * column + l, t]


@pytest.mark.parametrize("stride", [1, 2])
def test_what_a_capsule_gives_to_all_windows_sums_to_one(stride):
    layer = ConvMatrixCapsules(2, 3, EMRouting(), kernel=3, stride=stride).double()
    height, width = 6, 7
    places = [(side - 3) // stride + 1 for side in (height, width)]
    log_joint = 20 * torch.randn(2, *places, 18, 3, dtype=torch.float64)
    shares = layer._compete(log_joint, height, width).exp().view(2, *places, 3, 3, 2, 3)
    given = torch.zeros(2, height, width, 2, dtype=torch.float64)
    for row in range(places[0]):
        for column in range(places[1]):
            top, left = row * stride, column * stride
            given[:, top : top + 3, left : left + 3] += shares[:, row, column].sum(-1)
    covered = [(count - 1) * stride + 3 for count in places]
    torch.testing.assert_close(given[:, : covered[0], : covered[1]], torch.ones(2, *covered, 2, dtype=torch.float64))
    assert (given[:, covered[0] :] == 0).all()


def test_competition_passes_gradcheck_with_places_that_no_window_covers():
    layer = ConvMatrixCapsules(1, 2, EMRouting(), kernel=2, stride=2)
    log_joint = torch.randn(1, 1, 2, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: layer._compete(given, 3, 5), [log_joint])


def test_a_kernel_over_the_whole_map_is_ordinary_em_routing():
    layer = ConvMatrixCapsules(2, 3, EMRouting(), kernel=3)
    capsules = capsule_map(2, 3, 3, 2)
    votes, activations = votes_seen_by(layer, capsules)
    routing = layer.routing
    expected = em_routing(
        votes[:, 0, 0],
        activations[:, 0, 0],
        routing.beta_a,
        routing.beta_u,
        relative=True,
        inverse_temperature=routing.inverse_temperature,
        decay=routing.decay,
    )
    torch.testing.assert_close(layer(capsules).poses[:, 0, 0], expected.poses)
    torch.testing.assert_close(layer(capsules).activations[:, 0, 0], expected.activations)


def test_coordinates_are_added_to_the_right_hand_column():
    layer = ClassMatrixCapsules(2, 3, EMRouting(), rows=[0.25, 0.5, 0.75], columns=[0.125, 0.875])
    capsules = capsule_map(1, 3, 2, 2)
    votes, _ = votes_seen_by(layer, capsules)
    assert votes.shape == (1, 12, 3, 16)
    row, column, t, j = 2, 1, 1, 2
    plain = capsules.poses[0, row, column, t].view(4, 4) @ layer.weight[t, j]
    added = votes[0, (row * 2 + column) * 2 + t, j].view(4, 4) - plain
    expected = torch.zeros(4, 4)
    expected[0, 3], expected[1, 3] = 0.75, 0.875
    torch.testing.assert_close(added, expected, atol=1e-6, rtol=0)


def test_class_capsules_of_a_map_of_any_size():
    for height, width in [(1, 1), (3, 4)]:
        layer = ClassMatrixCapsules(5, 7, EMRouting(), rows=[0.5] * height, columns=[0.5] * width)
        assert math.prod(layer.weight.shape) == 5 * 7 * 16
        capsules = layer(capsule_map(2, height, width, 5))
        assert capsules.poses.shape == (2, 7, 16)
        assert capsules.activations.shape == (2, 7)
