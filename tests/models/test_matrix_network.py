import pytest
import torch

from torchcaps.errors import UserError
from torchcaps.functional import spread_loss, spread_margin
from torchcaps.models.matrix import MatrixCapsuleNetwork
from torchcaps.models.registry import create_model

TINY = (6, 2, 3, 4)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_papers_small_network_has_as_many_numbers_to_learn_as_it_says():
    # smallNORB: pairs of images, five classes. The paper says 68K.
    network = MatrixCapsuleNetwork((2, 32, 32), 5, reconstruction=False)
    assert count(network.conv) == 5 * 5 * 2 * 64 + 64
    assert count(network.primary) == (64 + 1) * 8 * 17
    assert [layer.weight.numel() for layer in network.layers] == [9 * 8 * 16 * 16, 9 * 16 * 16 * 16, 16 * 5 * 16]
    assert count(network) == 68_754
    # From one image of the pair it would be 67,154. The betas are 74 of them.
    assert count(MatrixCapsuleNetwork((1, 32, 32), 5, reconstruction=False)) == 67_154


def test_the_papers_large_network():
    # The paper says 310K; weights without biases and betas are 315,680 for one image, 316,480 for the pair.
    network = create_model("matrix-large", image_shape=(2, 32, 32), classes=5, reconstruction=False)
    assert count(network) == network.numbers() == 317_194


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 17, 30), (2, 32, 32)])
@pytest.mark.parametrize("decoder", [False, True])
def test_any_image_shape_and_number_of_classes(shape, decoder):
    network = MatrixCapsuleNetwork(shape, 7, matrix_sizes=TINY, reconstruction=decoder, labels_per_image=2)
    images = torch.rand(2, *shape)
    primary = network.primary_capsules(images)
    rows, columns, types = network.map_shape
    assert primary.poses.shape == (2, rows * columns * types, 16)
    assert primary.activations.shape == (2, rows * columns * types)
    output = network(images, torch.tensor([[0, 1], [6, 5]]))
    assert output.capsules.poses.shape == (2, 7, 16)
    assert network.found(output.capsules).shape == network.predict(images).labels.shape == (2, 2)
    if decoder:
        assert output.reconstructions is not None
        assert output.reconstructions.shape == network.reconstruct(output.capsules).shape == (2, 2, *shape)
    else:
        assert output.reconstructions is None


def test_an_image_too_small_is_told_the_smallest_size():
    with pytest.raises(UserError, match="smallest size is 17x17"):
        MatrixCapsuleNetwork((1, 28, 16), 10)
    MatrixCapsuleNetwork((1, 17, 17), 10, matrix_sizes=TINY)


def test_capsules_are_numbered_by_row_column_and_type():
    network = MatrixCapsuleNetwork((1, 20, 24), 5, matrix_sizes=TINY)
    images = torch.rand(1, 1, 20, 24)
    at_places = network.primary(network.conv(images).relu())
    rows, columns, types = network.map_shape
    assert at_places.poses.shape == (1, rows, columns, types, 16)
    number = (3 * columns + 7) * types + 1
    torch.testing.assert_close(network.primary_capsules(images).poses[0, number], at_places.poses[0, 3, 7, 1])


def test_the_coordinates_are_the_centres_of_the_receptive_fields():
    network = MatrixCapsuleNetwork((1, 25, 33), 5, matrix_sizes=TINY)
    rows, columns = 3, 5
    offsets = network.layers[2].offsets.view(rows, columns, 4, 4)
    for row, column in [(0, 0), (rows - 1, columns - 1)]:
        # The pixels that a place depends on, found by differentiation, are centred where the offsets say.
        images = torch.rand(1, 1, 25, 33, requires_grad=True)
        capsules = network.primary_capsules(images)
        poses, activations = (tensor.view(1, *network.map_shape, *tensor.shape[2:]) for tensor in capsules[:2])
        for layer in network.layers[:2]:
            # A plain sum over the windows, as competition lets every place depend on its neighbours.
            poses, activations = layer._windows(poses).sum((-1, -2)), layer._windows(activations).sum((-1, -2))
        (gradient,) = torch.autograd.grad(poses[0, row, column].sum(), images)
        used = gradient[0, 0].nonzero().double()
        centre = (used.amin(0) + used.amax(0) + 1) / 2
        expected = [float(offsets[row, column, 0, 3]) * 25, float(offsets[row, column, 1, 3]) * 33]
        assert centre.tolist() == pytest.approx(expected, abs=1e-3)


def test_an_image_does_not_depend_on_its_neighbours():
    network = MatrixCapsuleNetwork((1, 21, 21), 5, matrix_sizes=TINY).eval()
    images = torch.rand(4, 1, 21, 21)
    together, alone = network(images).capsules, network(images[2:3]).capsules
    torch.testing.assert_close(together.poses[2:3], alone.poses, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together.activations[2:3], alone.activations, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("images", [torch.zeros(2, 1, 20, 20), torch.ones(2, 1, 20, 20)])
@pytest.mark.parametrize("autocast", [False, True])
def test_blank_images_have_finite_gradients(images, autocast):
    network = MatrixCapsuleNetwork((1, 20, 20), 5, matrix_sizes=TINY, reconstruction=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        activations = network(images).capsules.activations
    spread_loss(activations, torch.tensor([[0], [1]]), margin=0.9).backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in network.parameters())


def test_the_weights_make_a_round_trip():
    network, other = (MatrixCapsuleNetwork((1, 20, 20), 5, matrix_sizes=TINY) for _ in range(2))
    other.load_state_dict(network.state_dict())
    images = torch.rand(2, 1, 20, 20)
    torch.testing.assert_close(other(images).capsules, network(images).capsules)
    torch.testing.assert_close(network.folded()(images).capsules.poses, network(images).capsules.poses)


def test_its_loss_is_the_spread_loss_with_a_growing_margin():
    network = MatrixCapsuleNetwork((1, 20, 20), 5, matrix_sizes=TINY)
    capsules, labels = network(torch.rand(3, 1, 20, 20)).capsules, torch.tensor([0, 4, 2])
    for progress in (0.0, 0.5, 1.0):
        expected = spread_loss(capsules.activations, labels, margin=spread_margin(progress))
        torch.testing.assert_close(network.loss(capsules, labels, progress), expected)


def test_learns_to_tell_two_patterns_apart():
    network = MatrixCapsuleNetwork((1, 17, 17), 2, matrix_sizes=TINY)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        labels = torch.randint(2, (16, 1), generator=generator)
        images = torch.rand(16, 1, 17, 17, generator=generator) * 0.2
        images[:, 0, 4:13, 8] += labels.float()  # one class is a vertical bar, the other a horizontal one
        images[:, 0, 8, 4:13] += 1 - labels.float()
        output = network(images)
        loss = network.loss(output.capsules, labels, step / 40)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (network.found(output.capsules) == labels).float().mean() > 0.9
