import torch

from torchcaps.layers import Decoder


def test_draws_from_the_chosen_capsule_alone():
    decoder = Decoder(4, 3, (2, 5, 6))
    poses = torch.randn(2, 4, 3)
    labels = torch.tensor([[1], [3]])
    drawn = decoder(poses, labels)
    assert drawn.shape == (2, 1, 2, 5, 6)
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    others = poses.clone()
    others[0, [0, 2, 3]] = 9.0
    others[1, [0, 1, 2]] = -9.0
    torch.testing.assert_close(decoder(others, labels), drawn)


def test_draws_each_class_of_an_overlapping_image_by_itself():
    decoder = Decoder(4, 3, (1, 5, 5))
    poses = torch.randn(2, 4, 3)
    both = decoder(poses, torch.tensor([[1, 2], [0, 3]]))
    torch.testing.assert_close(both[:, 0], decoder(poses, torch.tensor([[1], [0]]))[:, 0])
    torch.testing.assert_close(both[:, 1], decoder(poses, torch.tensor([[2], [3]]))[:, 0])
