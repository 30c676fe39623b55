import pytest
import torch

from torchcaps import CapsuleNetwork, ClusteringRouting
from torchcaps.routing.registry import ROUTINGS

MAKERS = {**ROUTINGS, "entropy": lambda: ClusteringRouting(regulariser="entropy")}


def network_of(routing, **settings) -> CapsuleNetwork:
    network = CapsuleNetwork((1, 22, 20), 3, routing, conv_channels=4, primary_capsules=3, **settings).double()
    for tensor in [*network.parameters(), *network.layers[-1].routing.buffers()]:
        torch.nn.init.normal_(tensor, std=0.3)
    return network


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("padding", ["valid", "same"])
def test_contributions_add_up_to_the_lengths_before_the_squash(name, padding):
    network = network_of(MAKERS[name](), padding=padding)
    images = torch.rand(2, 1, 22, 20, dtype=torch.float64)
    explanation = network.explain(images)
    totals = network(images).capsules.totals
    lengths = torch.linalg.vector_norm(totals, dim=-1)
    torch.testing.assert_close(explanation.lengths, lengths, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(explanation.contributions.sum(1), lengths, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(explanation.by_place.sum((2, 3, 4)), lengths, rtol=1e-10, atol=1e-12)
    assert explanation.maps.shape == (2, 3, 22, 20)
    if padding == "valid":
        torch.testing.assert_close(explanation.maps.sum((2, 3)), lengths, rtol=1e-10, atol=1e-12)


def test_contributions_are_those_of_the_formula():
    """c_ij = b_ij ⟨W_ij u_i, v_j⟩ / ‖v_j‖, entry by entry."""
    network = network_of(ROUTINGS["l2"]())
    images = torch.rand(1, 1, 22, 20, dtype=torch.float64)
    explanation = network.explain(images)
    layer = network.layers[0]
    poses = network.primary_capsules(images).poses[0]
    totals = network(images).capsules.totals[0]
    for i in (0, 5, len(poses) - 1):
        for j in range(3):
            vote = poses[i] @ layer.weight[i, :, j]
            expected = layer.routing.coefficients[i, j] * (vote @ totals[j]) / totals[j].norm()
            torch.testing.assert_close(explanation.contributions[0, i, j], expected.detach())


def test_a_map_shows_a_place_where_its_receptive_field_is():
    network = network_of(ROUTINGS["l2"]())
    rows, columns, _ = network.map_shape
    place = torch.zeros(1, rows, columns, dtype=torch.float64)
    place[0, 1, 0] = 2.0
    (pixels,) = network.front.over_pixels(place)
    assert pixels.sum() == pytest.approx(2.0)
    seen = pixels.nonzero()
    assert seen.amin(0).tolist() == [2, 0]  # one place further down is two pixels further down
    assert seen.amax(0).tolist() == [18, 16]
    assert pixels.argmax() == 10 * 20 + 8  # strongest at the centre of the field


def test_pruned_networks_are_explained_too():
    whole = network_of(ROUTINGS["l1"]())
    count = len(whole.layers[0].weight)
    network = CapsuleNetwork.from_config(
        whole.config.replace(kept_capsules=tuple(range(0, count, 2))), whole.task, routing=ROUTINGS["l1"]()
    )
    explanation = network.explain(torch.rand(2, 1, 22, 20))
    torch.testing.assert_close(explanation.by_place.sum((2, 3, 4)), explanation.lengths, rtol=1e-4, atol=1e-6)


def test_with_layers_in_between_the_last_layer_is_explained_without_maps():
    network = network_of(ROUTINGS["l2"](), layers=((4, 5),))
    explanation = network.explain(torch.rand(2, 1, 22, 20, dtype=torch.float64))
    assert explanation.contributions.shape == (2, 4, 3)
    assert explanation.maps is None
