"""The yardstick computes what the library computes, or a ratio to it would mean nothing."""

import pytest
import torch

from torchcaps.lab.bench.cases import TrainingStep
from torchcaps.lab.bench.networks import NETWORKS
from torchcaps.lab.bench.reference import ReferenceNetwork, training_step


@pytest.mark.parametrize("name", ["mnist", "cifar-10-24"])
def test_it_is_the_same_network(name):
    ours = NETWORKS[name].build("dynamic")
    plain = ReferenceNetwork(NETWORKS[name])
    plain.first.load_state_dict(ours.front.first.state_dict())
    plain.second.load_state_dict(ours.front.second.state_dict())
    plain.capsules.load_state_dict({"weight": ours.layers[0].weight})
    images = torch.rand(3, *ours.image_shape)
    torch.testing.assert_close(plain(images), ours(images).capsules.poses, atol=1e-4, rtol=1e-3)
    assert sum(tensor.numel() for tensor in plain.parameters()) == ours.numbers()


def test_a_padded_network_has_the_map_of_ours():
    plain = ReferenceNetwork(NETWORKS["cifar-10-24-same"])
    rows, columns, types = NETWORKS["cifar-10-24-same"].build("uniform").map_shape
    assert plain.capsules.weight.shape[0] == rows * columns * types == 9216


def test_it_learns():
    batch = TrainingStep(kind="reference", batch_size=4, network="multi-mnist").batch()
    network = ReferenceNetwork(NETWORKS["multi-mnist"])
    before = network(batch.images).norm(dim=-1).gather(1, batch.labels).mean()
    step = training_step(network, batch.images, batch.labels, batch.parts)
    for _ in range(5):
        step()
    after = network(batch.images).norm(dim=-1).gather(1, batch.labels).mean()
    assert after > before
