import pytest
import torch

from torchcaps import create_model, list_models
from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.models.config import MODELS
from torchcaps.models.registry import ARCHITECTURES
from torchcaps.routing import DynamicRouting

SMALL = {
    "CapsuleNetwork": {"conv_channels": 4, "primary_capsules": 2},
    "MatrixCapsuleNetwork": {"matrix_sizes": (4, 2, 2, 3)},
    "ConvolutionalNetwork": {"conv_channels": 4, "second_channels": 4},
}


def test_the_list_is_sorted_and_can_be_filtered():
    assert list_models() == sorted(ARCHITECTURES)
    assert list_models("matrix-*") == ["matrix-large", "matrix-small"]
    assert list_models("nothing") == []


def test_every_kind_of_network_is_in_the_list():
    with torch.device("meta"):
        kinds = {create_model(name).config.name for name in list_models()}
    assert kinds == set(MODELS)


@pytest.mark.parametrize("name", list_models())
def test_every_model_is_made_with_its_own_arguments(name):
    kind, arguments = ARCHITECTURES[name]
    with torch.device("meta"):  # shapes without memory
        network = create_model(name)
    assert type(network) is kind
    assert network.image_shape == arguments["image_shape"]
    assert network.classes == tuple("0123456789")
    assert network.config.reconstruction is arguments.get("reconstruction", True)
    assert (network.decoder is not None) is network.config.reconstruction
    assert network.numbers() > 60_000


@pytest.mark.parametrize("name", list_models())
def test_every_model_runs_with_arguments_of_ones_own(name):
    kind, _ = ARCHITECTURES[name]
    small = SMALL[kind.__name__]
    normal = {"mean": (0.1,), "std": (0.5,)}
    network = create_model(name, classes=["cat", "dog", "cow"], image_shape=(1, 20, 20), **normal, **small)
    images, labels = torch.rand(2, 1, 20, 20), torch.tensor([0, 2])
    output = network(images, labels)
    network.loss(output.capsules, labels).backward()
    assert network.classes == ("cat", "dog", "cow")
    assert network.predict(images).lengths.shape == (2, 3)
    assert isinstance(network, Network)


def test_arguments_replace_those_of_the_name():
    network = create_model("capsnet-cifar", routing=DynamicRouting(iterations=2), primary_capsules=2, conv_channels=4)
    assert isinstance(network, CapsuleNetwork)
    assert network.config.primary_capsules == 2
    assert network.config.negative_slope == 0.2
    assert network.layers[0].routing.iterations == 2


def test_an_unknown_model_lists_those_there_are():
    with pytest.raises(UserError, match="no model 'capsnet-imagenet': choose one of capsnet-cifar, capsnet-deep"):
        create_model("capsnet-imagenet")
