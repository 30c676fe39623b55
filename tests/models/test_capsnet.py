import copy

import pytest
import torch
from torch import nn

from torchcaps.errors import UserError
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.routing import ROUTINGS, DiscriminativeRouting, DynamicRouting, L2Routing
from torchcaps.settings import SettingError

SMALL = {"conv_channels": 4, "primary_capsules": 2}


def count(module: nn.Module | None) -> int:
    assert module is not None
    return sum(tensor.numel() for tensor in module.state_dict().values())


def test_the_papers_mnist_network_has_as_many_numbers_to_learn_as_its_table_says():
    network = CapsuleNetwork((1, 28, 28), 10)
    assert count(network.front.first) == 20_992
    assert count(network.front.second) == 5_308_672
    assert network.layers[0].weight.numel() == 1_474_560
    assert count(network.layers[0].routing) == 11_520
    assert count(network.decoder) == 1_411_344
    assert count(network) == network.numbers() == 8_227_088


def test_weights_are_stored_under_these_names():
    names = set(CapsuleNetwork((1, 20, 20), 5, layers=[(6, 4)], reconstruction=False, **SMALL).state_dict())
    convolutions = {f"front.{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")}
    capsules = {f"layers.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "routing.coefficients")}
    assert names == convolutions | capsules


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 24, 24), (1, 36, 36), (2, 17, 30)])
def test_any_image_shape_and_number_of_classes(name, shape):
    network = CapsuleNetwork(shape, 7, ROUTINGS[name](), **SMALL)
    labels = torch.tensor([[0], [6]])
    output = network(torch.rand(2, *shape), labels)
    assert output.capsules.poses.shape == (2, 7, 16)
    assert output.capsules.activations.shape == (2, 7)
    assert output.reconstructions is not None
    assert output.reconstructions.shape == (2, 1, *shape)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 9, 12)])
def test_images_may_be_padded(shape):
    network = CapsuleNetwork(shape, 7, padding="same", **SMALL)
    assert network.map_shape == ((shape[1] + 1) // 2, (shape[2] + 1) // 2, 2)
    assert network(torch.rand(2, *shape)).capsules.poses.shape == (2, 7, 16)
    folded = network.eval().folded()
    images = torch.rand(2, *shape)
    torch.testing.assert_close(folded(images).capsules, network(images).capsules, rtol=1e-4, atol=1e-6)


def test_an_image_too_small_is_told_the_smallest_size():
    with pytest.raises(UserError, match="smallest size is 17x17"):
        CapsuleNetwork((1, 28, 16), 10, **SMALL)
    CapsuleNetwork((1, 17, 17), 10, **SMALL)


def test_classes_have_names():
    assert CapsuleNetwork((1, 20, 20), 3, **SMALL).classes == ("0", "1", "2")
    network = CapsuleNetwork([1, 20, 20], ["cat", "dog"], **SMALL)
    assert network.classes == ("cat", "dog")
    assert network.image_shape == (1, 20, 20)
    with pytest.raises(SettingError, match="classes must be at least 2"):
        CapsuleNetwork((1, 20, 20), 1, **SMALL)
    with pytest.raises(SettingError, match="labels_per_image must be at most 2"):
        CapsuleNetwork((1, 20, 20), 2, labels_per_image=3, **SMALL)


def test_an_unknown_size_is_told_with_the_closest_name():
    with pytest.raises(SettingError, match=r"conv_chanels is not a setting \(did you mean conv_channels\?\)"):
        CapsuleNetwork((1, 20, 20), 3, conv_chanels=4)


def test_images_are_normalised_inside_the_network():
    plain = CapsuleNetwork((3, 20, 20), 5, **SMALL)
    scaled = CapsuleNetwork((3, 20, 20), 5, mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3), **SMALL)
    scaled.load_state_dict(plain.state_dict())
    images = torch.rand(2, 3, 20, 20)
    by_hand = (images - torch.tensor([0.4, 0.5, 0.6])[:, None, None]) / torch.tensor([0.1, 0.2, 0.3])[:, None, None]
    torch.testing.assert_close(scaled(images).capsules.poses, plain(by_hand).capsules.poses)


def test_the_primary_capsules_are_those_of_the_layers_one_after_the_other():
    network = CapsuleNetwork((1, 21, 19), 5, negative_slope=0.2, **SMALL)
    images = torch.rand(3, 1, 21, 19)
    features = nn.functional.leaky_relu(network.front.first(images), 0.2)
    maps = network.front.second(features).permute(0, 2, 3, 1)
    torch.testing.assert_close(network.primary_capsules(images).totals, maps.reshape(3, -1, 8))


def test_leaky_activation_lets_negative_features_through():
    leaky = CapsuleNetwork((1, 20, 20), 5, negative_slope=0.2, **SMALL)
    strict = CapsuleNetwork((1, 20, 20), 5, **SMALL)
    strict.load_state_dict(leaky.state_dict())
    images = torch.rand(2, 1, 20, 20)
    assert not torch.allclose(leaky.primary_capsules(images).poses, strict.primary_capsules(images).poses)


def test_reconstruction_follows_the_labels_given_and_else_what_is_found():
    network = CapsuleNetwork((1, 20, 20), 5, **SMALL)
    images = torch.rand(3, 1, 20, 20)
    output = network(images)
    assert output.reconstructions is None
    found = network.found(output.capsules)
    torch.testing.assert_close(network.reconstruct(output.capsules), network(images, found).reconstructions)
    torch.testing.assert_close(found[:, 0], output.capsules.activations.argmax(1))


def test_without_a_decoder_there_is_nothing_to_reconstruct_with():
    network = CapsuleNetwork((1, 20, 20), 5, reconstruction=False, **SMALL)
    output = network(torch.rand(1, 1, 20, 20), torch.tensor([[0]]))
    assert output.reconstructions is None
    with pytest.raises(UserError, match="no decoder"):
        network.reconstruct(output.capsules)


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_folded_network_gives_the_same_answers(name):
    network = CapsuleNetwork((1, 20, 20), 5, ROUTINGS[name](), layers=[(6, 4)], **SMALL).eval()
    for module in network.modules():
        if isinstance(module, DiscriminativeRouting):
            nn.init.normal_(module.coefficients)
    images = torch.rand(3, 1, 20, 20)
    folded = network.folded()
    torch.testing.assert_close(folded(images).capsules, network(images).capsules, rtol=1e-4, atol=1e-6)
    assert not any(parameter.requires_grad for parameter in folded.parameters())
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_each_capsule_layer_needs_a_routing():
    with pytest.raises(ValueError, match="2 capsule layers"):
        CapsuleNetwork((1, 20, 20), 5, [L2Routing()], layers=[(6, 4)])


def test_one_routing_is_copied_for_all_layers():
    routing = DynamicRouting(iterations=2)
    network = CapsuleNetwork((1, 20, 20), 5, routing, layers=[(6, 4), (5, 3)], **SMALL)
    routings = [layer.routing for layer in network.layers]
    assert len({id(made) for made in routings}) == 3
    assert routings[-1] is routing
    assert [made.iterations for made in routings] == [2, 2, 2]


def test_a_pruned_network_uses_the_capsules_it_keeps():
    whole = CapsuleNetwork((1, 20, 20), 5, reconstruction=False, **SMALL)
    kept = (1, 2, 6)
    pruned = CapsuleNetwork((1, 20, 20), 5, reconstruction=False, kept_capsules=kept, **SMALL)
    state = dict(whole.state_dict())
    for name in ("layers.0.weight", "layers.0.routing.coefficients"):
        state[name] = state[name][list(kept)]
    pruned.load_state_dict(state)
    with torch.no_grad():
        gone = [number for number in range(8) if number not in kept]
        whole.layers[0].routing.coefficients[gone] = 0
    images = torch.rand(2, 1, 20, 20)
    torch.testing.assert_close(pruned(images).capsules, whole(images).capsules)


@pytest.mark.parametrize("kept", [(), (8,), (0, 10**9), (-1,)])
def test_capsules_that_there_are_not_cannot_be_kept(kept):
    with pytest.raises(SettingError, match="kept_capsules"):
        CapsuleNetwork((1, 20, 20), 5, kept_capsules=kept, **SMALL)


@pytest.mark.parametrize("training", [True, False])
def test_predict_classifies_a_few_at_a_time_in_evaluation_mode(training):
    network = CapsuleNetwork((1, 20, 20), 5, reconstruction=False, **SMALL).train(training)
    network.evaluation_batch = 3
    images = torch.rand(7, 1, 20, 20)
    labels, lengths = network.predict(images)
    assert network.training is training
    assert (labels.shape, lengths.shape) == ((7, 1), (7, 5))
    torch.testing.assert_close(labels[:, 0], lengths.argmax(1))
    torch.testing.assert_close(lengths, network(images).capsules.activations.detach())


def test_predict_remembers_the_mode_when_something_fails():
    network = CapsuleNetwork((1, 20, 20), 5, **SMALL)
    network.front.first.weight = torch.nn.Parameter(torch.rand(4, 2, 9, 9))  # of images with two channels
    with pytest.raises(RuntimeError):
        network.predict(torch.rand(2, 1, 20, 20))
    assert network.training


@pytest.mark.parametrize("images", [torch.rand(2, 3, 20, 20), torch.rand(1, 20, 20), torch.zeros(2, 1, 20, 20).byte()])
def test_predict_says_what_images_it_takes(images):
    network = CapsuleNetwork((1, 20, 20), 5, **SMALL)
    with pytest.raises(ValueError, match=r"\(B, 1, 20, 20\).*prepare\(\)"):
        network.predict(images)


def test_what_is_found_when_images_may_show_any_number_of_classes():
    network = CapsuleNetwork((1, 20, 20), 4, labels_per_image=0, **SMALL)
    capsules = network(torch.rand(3, 1, 20, 20)).capsules
    lengths = torch.tensor([[0.6, 0.2, 0.9, 0.5], [0.1, 0.2, 0.3, 0.4], [0.6, 0.7, 0.8, 0.9]])
    found = network.found(capsules._replace(activations=lengths))
    assert found.tolist() == [[2, 0, -1, -1], [-1, -1, -1, -1], [3, 2, 1, 0]]
    two = CapsuleNetwork((1, 20, 20), 4, labels_per_image=2, **SMALL)
    assert two.found(capsules._replace(activations=lengths)).tolist() == [[2, 0], [3, 2], [3, 2]]


def test_a_copy_with_other_weights_leaves_the_network_as_it_is():
    network, other = (CapsuleNetwork((1, 20, 20), 5, **SMALL) for _ in range(2))
    before = copy.deepcopy(dict(network.state_dict()))
    copied = network.copy_with(other.state_dict())
    torch.testing.assert_close(dict(copied.state_dict()), dict(other.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(dict(network.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_same_seed_builds_the_same_network(name):
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(dict(CapsuleNetwork((1, 20, 20), 5, ROUTINGS[name](), **SMALL).state_dict()))
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_what_is_predicted_can_be_learned():
    teacher, student = (CapsuleNetwork((1, 20, 20), 3, conv_channels=4, primary_capsules=2) for _ in range(2))
    images = torch.rand(2, 1, 20, 20)
    lengths = teacher.predict(images).lengths
    assert not lengths.requires_grad
    torch.nn.functional.mse_loss(student(images).capsules.activations, lengths).backward()
    assert student.front.first.weight.grad.abs().sum() > 0
