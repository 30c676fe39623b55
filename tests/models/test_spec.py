import dataclasses

import pytest
import torch

from torchcaps.errors import UserError
from torchcaps.models import NetworkSpec, load_network, save_network
from torchcaps.storage import DamagedFile, write_tensors

SPEC = NetworkSpec(
    image_shape=(3, 20, 20),
    source_shape=(3, 24, 24),
    classes=("cat", "dog"),
    routing="l1",
    routing_settings={"start": 0.5, "strength": 1e-3},
    mean=(0.1, 0.2, 0.3),
    std=(1.0, 2.0, 3.0),
    hidden=((6, 4),),
    conv_channels=4,
    primary_capsules=2,
)


def test_a_network_survives_the_trip_through_its_file(tmp_path):
    network = SPEC.build()
    path = tmp_path / "model.safetensors"
    save_network(path, network, SPEC)
    loaded, spec = load_network(path)
    assert spec == SPEC
    images = torch.rand(2, 3, 20, 20)
    torch.testing.assert_close(loaded(images).capsules, network(images).capsules, rtol=0, atol=0)


def test_the_same_seed_builds_the_same_network():
    networks = []
    for _ in range(2):
        torch.manual_seed(5)
        networks.append(SPEC.build().state_dict())
    torch.testing.assert_close(*networks, rtol=0, atol=0)


def test_a_missing_or_foreign_file_is_told_as_such(tmp_path):
    with pytest.raises(UserError, match="no trained network"):
        load_network(tmp_path / "model.safetensors")
    write_tensors(tmp_path / "other.safetensors", {"x": torch.ones(1)}, {"step": 3})
    with pytest.raises(DamagedFile, match="holds no network"):
        load_network(tmp_path / "other.safetensors")


def test_a_field_of_another_version_is_told_as_such(tmp_path):
    path = tmp_path / "model.safetensors"
    write_tensors(path, {}, {"network": {**dataclasses.asdict(SPEC), "colour": "green"}})
    with pytest.raises(DamagedFile, match="colour"):
        load_network(path)
