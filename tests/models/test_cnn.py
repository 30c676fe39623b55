import pytest
import torch

from torchcaps.errors import UserError
from torchcaps.functional import multi_hot
from torchcaps.models import CapsuleNetwork, ConvolutionalNetwork
from torchcaps.routing import L2Routing


def test_it_has_the_size_of_the_capsule_network():
    cnn = sum(each.numel() for each in ConvolutionalNetwork((1, 28, 28), 10).parameters())
    capsnet = sum(each.numel() for each in CapsuleNetwork((1, 28, 28), 10, [L2Routing()]).parameters())
    assert abs(cnn / capsnet - 1) < 0.002


def test_its_activations_are_probabilities_and_its_loss_is_cross_entropy():
    network = ConvolutionalNetwork((3, 20, 22), 5, conv_channels=4, second_channels=8)
    labels = torch.tensor([[0], [4], [2]])
    output = network(torch.rand(3, 3, 20, 22), labels)
    torch.testing.assert_close(output.capsules.activations.sum(1), torch.ones(3))
    expected = torch.nn.functional.cross_entropy(output.capsules.totals[:, :, 0], labels[:, 0])
    torch.testing.assert_close(network.loss(output.capsules, multi_hot(labels, 5), 0.0), expected)
    assert output.reconstructions is not None
    assert output.reconstructions.shape == (3, 1, 3, 20, 22)


def test_an_image_too_small_is_told_the_smallest_size():
    with pytest.raises(UserError, match="smallest size is 17x17"):
        ConvolutionalNetwork((1, 16, 16), 10)
