import pytest
import torch

from torchcaps.layers.decoder import Decoder


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


def test_one_class_an_image_may_be_given_without_the_second_axis():
    decoder = Decoder(4, 3, (1, 5, 5))
    poses = torch.randn(2, 4, 3)
    torch.testing.assert_close(decoder(poses, torch.tensor([1, 3])), decoder(poses, torch.tensor([[1], [3]])))


def test_a_label_of_minus_one_draws_from_no_capsule():
    decoder = Decoder(4, 3, (1, 5, 5))
    drawn = decoder(torch.randn(2, 4, 3), torch.tensor([[1, -1], [-1, -1]]))
    nothing = decoder(torch.zeros(1, 4, 3), torch.tensor([[0]]))[0, 0]
    for image, place in [(0, 1), (1, 0), (1, 1)]:
        torch.testing.assert_close(drawn[image, place], nothing)
    assert not torch.allclose(drawn[0, 0], nothing)


def test_no_images_and_presence():
    decoder = Decoder(4, 3, (1, 5, 5))
    for labels in (torch.zeros(0, dtype=torch.long), torch.zeros(0, 2, dtype=torch.long)):
        assert decoder(torch.randn(0, 4, 3), labels).shape == (0, labels.shape[1] if labels.ndim == 2 else 1, 1, 5, 5)
    with pytest.raises(ValueError, match="not presence"):
        decoder(torch.randn(2, 4, 3), torch.eye(4)[:2])
