import pytest
import torch

from torchcaps.errors import UserError
from torchcaps.models import CapsuleNetwork
from torchcaps.routing import ROUTINGS, L2Routing, make_routing

SMALL = {"conv_channels": 4, "primary_capsules": 2}


def count(module: torch.nn.Module | None) -> int:
    assert module is not None
    return sum(each.numel() for each in module.parameters())


def test_the_papers_mnist_network_has_as_many_numbers_to_learn_as_its_table_says():
    network = CapsuleNetwork((1, 28, 28), 10, [L2Routing()])
    assert count(network.conv) == 20_992
    assert count(network.primary) == 5_308_672
    assert network.layers[0].weight.numel() == 1_474_560
    assert count(network.layers[0].routing) == 11_520
    assert count(network.decoder) == 1_411_344
    assert count(network) == 8_227_088


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 24, 24), (1, 36, 36), (2, 17, 30)])
def test_any_image_shape_and_number_of_classes(name, shape):
    network = CapsuleNetwork(shape, 7, [make_routing(name)], **SMALL)
    labels = torch.tensor([[0], [6]])
    output = network(torch.rand(2, *shape), labels)
    assert output.capsules.poses.shape == (2, 7, 16)
    assert output.capsules.activations.shape == (2, 7)
    assert output.reconstructions is not None
    assert output.reconstructions.shape == (2, 1, *shape)


def test_an_image_too_small_is_told_the_smallest_size():
    with pytest.raises(UserError, match="smallest size is 17x17"):
        CapsuleNetwork((1, 28, 16), 10, [L2Routing()], **SMALL)
    CapsuleNetwork((1, 17, 17), 10, [L2Routing()], **SMALL)


def test_images_are_normalised_inside_the_network():
    plain = CapsuleNetwork((3, 20, 20), 5, [L2Routing()], **SMALL)
    scaled = CapsuleNetwork((3, 20, 20), 5, [L2Routing()], mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3), **SMALL)
    scaled.load_state_dict(plain.state_dict())
    images = torch.rand(2, 3, 20, 20)
    by_hand = (images - torch.tensor([0.4, 0.5, 0.6])[:, None, None]) / torch.tensor([0.1, 0.2, 0.3])[:, None, None]
    torch.testing.assert_close(scaled(images).capsules.poses, plain(by_hand).capsules.poses)


def test_the_primary_capsules_are_those_of_the_layers_one_after_the_other():
    network = CapsuleNetwork((1, 21, 19), 5, [L2Routing()], negative_slope=0.2, **SMALL)
    images = torch.rand(3, 1, 21, 19)
    features = torch.nn.functional.leaky_relu(network.conv(images), 0.2)
    torch.testing.assert_close(network.primary_capsules(images).poses, network.primary(features).poses)


def test_leaky_activation_lets_negative_features_through():
    leaky = CapsuleNetwork((1, 20, 20), 5, [L2Routing()], negative_slope=0.2, **SMALL)
    strict = CapsuleNetwork((1, 20, 20), 5, [L2Routing()], **SMALL)
    strict.load_state_dict(leaky.state_dict())
    images = torch.rand(2, 1, 20, 20)
    assert not torch.allclose(leaky.primary_capsules(images).poses, strict.primary_capsules(images).poses)


def test_reconstruction_follows_the_labels_given_and_else_the_prediction():
    network = CapsuleNetwork((1, 20, 20), 5, [L2Routing()], **SMALL)
    images = torch.rand(3, 1, 20, 20)
    output = network(images)
    assert output.reconstructions is None
    predicted = network.predict(output.capsules)
    torch.testing.assert_close(network.reconstruct(output.capsules), network(images, predicted).reconstructions)
    torch.testing.assert_close(predicted[:, 0], output.capsules.activations.argmax(1))


def test_without_a_decoder_there_is_nothing_to_reconstruct_with():
    network = CapsuleNetwork((1, 20, 20), 5, [L2Routing()], decoder=False, **SMALL)
    output = network(torch.rand(1, 1, 20, 20), torch.tensor([[0]]))
    assert output.reconstructions is None
    with pytest.raises(UserError, match="no decoder"):
        network.reconstruct(output.capsules)


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_folded_network_gives_the_same_answers(name):
    network = CapsuleNetwork((1, 20, 20), 5, [make_routing(name), make_routing(name)], hidden=[(6, 4)], **SMALL).eval()
    for routing in network.ascending():
        torch.nn.init.normal_(routing.coefficients)
    images = torch.rand(3, 1, 20, 20)
    torch.testing.assert_close(network.folded()(images).capsules, network(images).capsules, rtol=1e-4, atol=1e-6)


def test_each_capsule_layer_needs_a_routing():
    with pytest.raises(ValueError, match="2 capsule layers"):
        CapsuleNetwork((1, 20, 20), 5, [L2Routing()], hidden=[(6, 4)])
