import pytest
import torch

from torchcaps.errors import UserError
from torchcaps.functional import presence
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.models.cnn import ConvolutionalNetwork


def test_it_has_the_size_of_the_capsule_network():
    cnn, capsnet = ConvolutionalNetwork((1, 28, 28), 10), CapsuleNetwork((1, 28, 28), 10)
    assert abs(cnn.numbers() / capsnet.numbers() - 1) < 0.002
    assert cnn.numbers() == sum(parameter.numel() for parameter in cnn.parameters())


def test_its_activations_are_probabilities_and_its_loss_is_cross_entropy():
    network = ConvolutionalNetwork((3, 20, 22), 5, conv_channels=4, second_channels=8)
    labels = torch.tensor([[0], [4], [2]])
    output = network(torch.rand(3, 3, 20, 22), labels)
    torch.testing.assert_close(output.capsules.activations.sum(1), torch.ones(3))
    expected = torch.nn.functional.cross_entropy(output.capsules.totals[:, :, 0], labels[:, 0])
    for given in (labels, labels[:, 0], presence(labels, 5)):
        torch.testing.assert_close(network.loss(output.capsules, given, 0.0), expected)
    assert output.reconstructions is not None
    assert output.reconstructions.shape == (3, 1, 3, 20, 22)


def test_several_classes_share_the_cross_entropy():
    network = ConvolutionalNetwork((1, 20, 20), 5, conv_channels=4, second_channels=8, labels_per_image=2)
    capsules = network(torch.rand(3, 1, 20, 20)).capsules
    labels = torch.tensor([[0, 1], [4, 2], [3, 0]])
    scores = capsules.totals[:, :, 0]
    halves = [torch.nn.functional.cross_entropy(scores, labels[:, place]) for place in range(2)]
    torch.testing.assert_close(network.loss(capsules, labels), sum(halves) / 2)


def test_an_image_too_small_is_told_the_smallest_size():
    with pytest.raises(UserError, match="smallest size is 17x17"):
        ConvolutionalNetwork((1, 16, 16), 10)
