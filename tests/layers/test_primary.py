import torch

from torchcaps.functional import squash
from torchcaps.layers import PrimaryCapsules


def test_a_capsule_is_made_of_the_channels_at_one_place():
    primary = PrimaryCapsules(3, capsules=4, size=5, kernel=3)
    features = torch.randn(2, 3, 9, 7)
    capsules = primary(features)
    maps = torch.nn.functional.conv2d(features, primary.conv.weight, primary.conv.bias, stride=2)
    rows, columns = maps.shape[2:]
    assert capsules.poses.shape == (2, rows * columns * 4, 5)
    for row in range(rows):
        for column in range(columns):
            for kind in range(4):
                expected = squash(maps[:, 5 * kind : 5 * kind + 5, row, column])
                torch.testing.assert_close(capsules.poses[:, (row * columns + column) * 4 + kind], expected)
