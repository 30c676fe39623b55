import pytest
import torch
from torch import nn

from torchcaps import CapsuleNetwork, load
from torchcaps.layers.stem import LARGEST_MAP, SmallStem, StemCapsules
from torchcaps.settings import SettingError


def backbone() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 12, 3, stride=4), nn.ReLU())


@pytest.mark.parametrize("shape", [(1, 41, 41), (3, 64, 48), (3, 224, 224), (1, 400, 300), (3, 17, 90)])
def test_any_size_is_brought_to_a_small_map(shape):
    _, height, width = SmallStem(shape)(torch.rand(1, *shape)).shape[1:]
    assert max(height, width) <= LARGEST_MAP


@pytest.mark.parametrize(("side", "stem"), [(28, "paper"), (40, "paper"), (41, "small"), (128, "small")])
def test_the_stem_follows_the_size_of_the_images(side, stem):
    network = CapsuleNetwork((3, side, side), 4, conv_channels=4, primary_capsules=2, reconstruction=False)
    assert network.config.stem == stem
    assert network(torch.rand(2, 3, side, side)).capsules.activations.shape == (2, 4)


def test_a_photograph_network_is_small():
    assert CapsuleNetwork((3, 224, 224), 100, reconstruction=False).numbers() < 15e6


def test_a_backbone_of_ones_own_is_the_stem_and_only_its_owner_brings_it(tmp_path):
    network = CapsuleNetwork((3, 33, 33), 4, backbone=backbone, primary_capsules=2, reconstruction=False)
    assert network.map_shape == (6, 6, 2)
    path = tmp_path / "model.safetensors"
    network.save(path)
    with pytest.raises(SettingError, match=r"somebody's own code.*load\(path, backbone=function\)"):
        load(path)
    images = torch.rand(2, 3, 33, 33)
    expected = network.eval()(images).capsules
    torch.testing.assert_close(load(path, backbone=backbone)(images).capsules, expected, rtol=0, atol=0)


def test_a_frozen_backbone_stays_as_it_is_and_its_weights_may_come_from_a_file(tmp_path):
    module = backbone()
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    network = CapsuleNetwork(
        (3, 33, 33), 4, backbone=backbone, backbone_weights=str(tmp_path / "weights.pt"), freeze_backbone=True
    )
    for name, parameter in network.front.stem.named_parameters():
        assert not parameter.requires_grad
        torch.testing.assert_close(parameter, module.state_dict()[name])
    (tmp_path / "weights.pt").write_bytes(b"rubbish")
    with pytest.raises(Exception, match="does not hold the weights"):
        CapsuleNetwork((3, 33, 33), 4, backbone=backbone, backbone_weights=str(tmp_path / "weights.pt"))


def test_what_gives_no_feature_maps_is_refused():
    with pytest.raises(SettingError, match="must give feature maps"):
        StemCapsules((3, 20, 20), nn.Flatten())


def test_maps_over_pixels_keep_their_sums():
    front = StemCapsules((3, 64, 50), SmallStem((3, 64, 50)))
    maps = torch.randn(2, *front.map_shape[:2])
    spread = front.over_pixels(maps)
    assert spread.shape == (2, 64, 50)
    torch.testing.assert_close(spread.sum((1, 2)), maps.sum((1, 2)), rtol=1e-3, atol=1e-3)
    spread = front.over_pixels(maps.abs())
    assert spread.min() >= 0  # what adds everywhere takes nowhere
    torch.testing.assert_close(spread.sum((1, 2)), maps.abs().sum((1, 2)), rtol=1e-3, atol=1e-3)


def test_a_place_is_shown_where_its_field_is():
    front = StemCapsules((3, 64, 64), SmallStem((3, 64, 64)))
    rows, columns = front.map_shape[:2]
    for row, column in ((0, 0), (rows - 1, 0), (rows // 2, columns // 2)):
        maps = torch.zeros(1, rows, columns)
        maps[0, row, column] = 1
        top, left, side = front.field(row, column)
        spread = front.over_pixels(maps)[0]
        pixels = torch.arange(64) + 0.5
        centre = float((spread.sum(1) * pixels).sum()), float((spread.sum(0) * pixels).sum())
        assert centre == pytest.approx((top + side / 2, left + side / 2), abs=3)


class ByHand(nn.Module):
    """A stem without modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.randn(8, 3, 3, 3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(images, self.kernels, stride=4)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["by hand", "traced", "scripted"])
def test_a_stem_whose_parts_cannot_be_counted(kind):
    makers = {
        "by hand": ByHand,
        "traced": lambda: torch.jit.trace(backbone(), torch.rand(1, 3, 48, 48)),
        "scripted": lambda: torch.jit.script(backbone()),
    }
    network = CapsuleNetwork((3, 48, 48), 2, backbone=makers[kind](), primary_capsules=2, reconstruction=False)
    assert network.front.numbers_per_image() >= 2 * 3 * 48 * 48
    assert network(torch.rand(2, 3, 48, 48)).capsules.activations.shape == (2, 2)


def test_a_backbone_for_other_images_is_told():
    with pytest.raises(SettingError, match=r"does not take images of 1x48x48 \(channels first\): .*3 channels"):
        CapsuleNetwork((1, 48, 48), 2, backbone=backbone())
