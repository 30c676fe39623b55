import pytest
import torch

from torchcaps import CapsuleNetwork, L1Routing, load
from torchcaps.errors import UserError
from torchcaps.models.cnn import ConvolutionalNetwork
from torchcaps.routing.registry import ROUTINGS
from torchcaps.trained.prune import prune


def network_of(**settings) -> CapsuleNetwork:
    return CapsuleNetwork((1, 21, 23), ["a", "b", "c"], L1Routing(), conv_channels=4, primary_capsules=5, **settings)


def sparse_network(**settings) -> CapsuleNetwork:
    network = network_of(**settings)
    coefficients = network.layers[0].routing.coefficients.data
    coefficients.normal_()
    by_type = coefficients.view(*network.map_shape, -1)
    by_type[:, :, 1] = 0  # a type that is used nowhere
    by_type[:, :, 3] = 0
    by_type[0, 1, 2] = 0  # a single capsule that is not used
    by_type[1, 1, 4, 0] = 0  # used by some classes only
    return network


@pytest.mark.parametrize("layers", [(), ((6, 4),)])
def test_the_smaller_network_gives_the_same_answers(layers, tmp_path):
    network = sparse_network(layers=layers)
    pruned = prune(network)
    places = network.map_shape[0] * network.map_shape[1]
    assert pruned.types_removed == 2
    assert pruned.capsules_removed == 2 * places + 1
    assert pruned.network.front.second.weight.shape[0] == 3 * 8
    images = torch.rand(4, 1, 21, 23)
    torch.testing.assert_close(pruned.network(images).capsules, network(images).capsules, rtol=1e-4, atol=1e-6)
    pruned.network.save(tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors")
    torch.testing.assert_close(loaded(images).capsules, pruned.network(images).capsules, rtol=0, atol=0)
    torch.testing.assert_close(loaded.folded()(images).capsules, network(images).capsules, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stem", ["small", "backbone"])
def test_other_stems_are_pruned_too(stem):
    own = {"backbone": torch.nn.Conv2d(1, 4, 5, 3)} if stem == "backbone" else {"stem": "small"}
    network = sparse_network(**own)
    pruned = prune(network)
    assert pruned.types_removed == 2
    images = torch.rand(4, 1, 21, 23)
    torch.testing.assert_close(pruned.network(images).capsules, network(images).capsules, rtol=1e-4, atol=1e-6)


def test_what_serves_only_hidden_capsules_that_no_class_uses_is_removed_with_them():
    network = network_of(layers=((6, 4), (5, 3)))
    for layer in network.layers:
        layer.routing.coefficients.data.normal_()
    first, second, third = (layer.routing.coefficients.data for layer in network.layers)
    third[2] = 0  # no class uses capsule 2 of the second hidden layer,
    second[3] = 0
    second[3, 2] = 1.0  # which is all that capsule 3 of the first serves,
    first[7] = 0
    first[7, 3] = 1.0  # which is all that primary capsule 7 serves
    pruned = prune(network)
    assert pruned.network.config.layers == ((5, 4), (4, 3))
    assert pruned.capsules_removed == 1
    images = torch.rand(4, 1, 21, 23)
    torch.testing.assert_close(pruned.network(images).capsules, network(images).capsules, rtol=1e-4, atol=1e-6)


def test_a_pruned_network_can_be_pruned_again():
    once = prune(sparse_network())
    once.network.layers[0].routing.coefficients.data[:4] = 0
    twice = prune(once.network)
    assert twice.capsules_removed == 4
    images = torch.rand(2, 1, 21, 23)
    torch.testing.assert_close(twice.network(images).capsules, once.network(images).capsules, rtol=1e-4, atol=1e-6)


def test_nothing_is_removed_from_a_dense_network():
    network = network_of()
    pruned = prune(network)
    assert (pruned.types_removed, pruned.capsules_removed) == (0, 0)
    assert pruned.network.config == network.config


@pytest.mark.parametrize("routing", ["dynamic", "uniform"])
def test_a_network_without_coefficients_cannot_be_pruned(routing):
    with pytest.raises(UserError, match="nothing to prune"):
        prune(CapsuleNetwork((1, 21, 23), 3, ROUTINGS[routing](), conv_channels=4, primary_capsules=5))


def test_only_capsule_networks_can_be_pruned():
    with pytest.raises(UserError, match="Only the capsnet"):
        prune(ConvolutionalNetwork((1, 21, 23), 3, conv_channels=4, second_channels=8))


def test_a_network_with_only_zeros_is_refused():
    network = network_of()
    network.layers[0].routing.coefficients.data.zero_()
    with pytest.raises(UserError, match="learned nothing"):
        prune(network)
