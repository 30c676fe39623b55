import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import prune

from torchcaps.errors import UserError
from torchcaps.functional import squash
from torchcaps.layers.primary import ImageCapsules, PrimaryCapsules


def test_a_capsule_is_made_of_the_channels_at_one_place():
    primary = PrimaryCapsules(3, types=4, size=5, kernel=3)
    features = torch.randn(2, 3, 9, 7)
    capsules = primary(features)
    maps = F.conv2d(features, primary.conv.weight, primary.conv.bias, stride=2)
    rows, columns = maps.shape[2:]
    assert capsules.poses.shape == (2, rows * columns * 4, 5)
    for row in range(rows):
        for column in range(columns):
            for kind in range(4):
                expected = squash(maps[:, 5 * kind : 5 * kind + 5, row, column])
                torch.testing.assert_close(capsules.poses[:, (row * columns + column) * 4 + kind], expected)


def two_convolutions(front: ImageCapsules, images: torch.Tensor, slope: float, padding: int) -> torch.Tensor:
    """The feature maps of a front, by torch's own convolutions one after the other."""
    first = F.conv2d(images, front.first.weight, front.first.bias, padding=padding)
    return F.conv2d(F.leaky_relu(first, slope), front.second.weight, front.second.bias, stride=2, padding=padding)


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("slope", [0.0, 0.2])
@pytest.mark.parametrize(("shape", "kernel"), [((1, 21, 19), 9), ((3, 12, 15), 5)])
def test_the_front_is_two_convolutions_one_after_the_other(padding, slope, shape, kernel):
    front = ImageCapsules(shape, 4, types=3, size=5, kernel=kernel, padding=padding, negative_slope=slope).double()
    images = torch.rand(2, *shape, dtype=torch.float64)
    maps = two_convolutions(front, images, slope, kernel // 2 if padding == "same" else 0)
    rows, columns = maps.shape[2:]
    assert front.map_shape == (rows, columns, 3)
    capsules = front(images)
    expected = squash(maps.permute(0, 2, 3, 1).reshape(2, rows * columns * 3, 5))
    torch.testing.assert_close(capsules.poses, expected)
    row, column, kind = rows - 1, 1, 2
    number = (row * columns + column) * 3 + kind
    torch.testing.assert_close(capsules.poses[:, number], squash(maps[:, 10:15, row, column]))


def test_the_gradients_of_the_front_are_those_of_the_two_convolutions():
    front = ImageCapsules((1, 19, 18), 3, types=2, size=4).double()
    images = torch.rand(2, 1, 19, 18, dtype=torch.float64)
    expected = squash(two_convolutions(front, images, 0.0, 0).permute(0, 2, 3, 1).reshape(2, -1, 4))
    upstream = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad(poses, list(front.parameters()), upstream) for poses in (front(images).poses, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_a_folded_front_gives_the_same_capsules():
    front = ImageCapsules((1, 20, 22), 4, types=2, size=4).eval()
    images = torch.rand(3, 1, 20, 22)
    with torch.no_grad():
        expected = front(images)
        front.fold()
        torch.testing.assert_close(front(images), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kernel", "padding", "smallest"), [(9, "valid", 17), (5, "valid", 9), (9, "same", 1)])
def test_the_smallest_image_is_what_the_error_says(kernel, padding, smallest):
    ImageCapsules((1, smallest, smallest), 2, 1, 2, kernel=kernel, padding=padding)
    if smallest > 1:
        with pytest.raises(UserError, match=f"smallest size is {smallest}x{smallest}"):
            ImageCapsules((1, smallest, smallest - 1), 2, 1, 2, kernel=kernel, padding=padding)


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_convolution_with_hooks_is_called(name):
    """Or pruning, weight norm and whoever watches it would do nothing."""
    front = ImageCapsules((1, 28, 28), 8, types=2, size=4, negative_slope=0.2)
    images = torch.rand(2, 1, 28, 28)
    plain = front(images).poses
    seen: list[torch.Tensor] = []
    hook = getattr(front, name).register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.testing.assert_close(front(images).poses, plain, rtol=1e-3, atol=1e-5)
    assert len(seen) == 1
    hook.remove()
    assert torch.equal(front(images).poses, plain)


def test_a_pruned_convolution_stays_pruned_while_it_is_trained():
    front = ImageCapsules((1, 28, 28), 8, types=2, size=4)
    prune.l1_unstructured(front.second, "weight", 0.5)
    optimizer = torch.optim.SGD(front.parameters(), lr=1.0)
    before = front.second.weight_orig.detach().clone()
    for _ in range(2):
        front(torch.rand(2, 1, 28, 28)).poses.square().sum().backward()
        optimizer.step()
    front(torch.rand(2, 1, 28, 28))
    assert not torch.equal(front.second.weight_orig, before)
    assert int((front.second.weight == 0).sum()) == front.second.weight.numel() // 2


def test_a_strided_convolution_with_hooks_is_called():
    primary = PrimaryCapsules(3, types=4, size=5, kernel=3)
    features = torch.randn(2, 3, 9, 7)
    plain = primary(features).poses
    primary.conv.register_forward_hook(lambda module, inputs, output: 2 * output)
    expected = squash(2 * F.conv2d(features, primary.conv.weight, primary.conv.bias, stride=2)[:, :5, 0, 0])
    torch.testing.assert_close(primary(features).poses[:, 0], expected)
    assert not torch.allclose(primary(features).poses, plain)
