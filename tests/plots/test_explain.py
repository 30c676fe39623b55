"""Pictures of explanations, and the numbers in them."""

from __future__ import annotations

import pytest
import torch
from matplotlib.figure import Figure

from torchcaps import CapsuleNetwork
from torchcaps.errors import UserError
from torchcaps.models.cnn import ConvolutionalNetwork
from torchcaps.models.matrix import MatrixCapsuleNetwork
from torchcaps.plots import explain as plots
from torchcaps.routing.registry import ROUTINGS

CLASSES = ("ant", "bee", r"$\frac\mu", "a very long name of a class indeed\n")


def network_of(routing="l2", shape=(1, 22, 20), **settings) -> CapsuleNetwork:
    return CapsuleNetwork(shape, CLASSES, ROUTINGS[routing](), conv_channels=4, primary_capsules=3, **settings).eval()


def drawn(figure: Figure, tmp_path) -> None:
    figure.savefig(tmp_path / "figure.png", dpi=40)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_is_drawn(routing, tmp_path):
    network = network_of(routing)
    image = torch.rand(1, 22, 20)
    drawn(plots.explanation(network, image, [0, 2], title="pic$ture.png"), tmp_path)
    drawn(plots.capsule_types(network, image, 3, plots.most_exciting(network, torch.rand(4, 1, 22, 20))), tmp_path)
    drawn(plots.sweep(network, image, 2, steps=3), tmp_path)


@pytest.mark.parametrize(
    "network",
    [
        network_of(shape=(3, 22, 20), mean=(0.1, 0.2, 0.3), labels_per_image=2),
        network_of(labels_per_image=0),
        network_of(padding="same"),
        network_of(layers=((4, 5),)),
        MatrixCapsuleNetwork((1, 22, 22), 12, matrix_sizes=(4, 2, 2, 2)),
        ConvolutionalNetwork((1, 22, 20), 30, conv_channels=4, second_channels=6),
    ],
    ids=["colour", "any number", "padding", "layers", "matrix", "cnn"],
)
def test_other_networks_are_drawn_as_far_as_they_can_be(network, tmp_path):
    image = torch.randn(network.image_shape)  # as if standardised
    drawn(plots.explanation(network, image), tmp_path)
    images = torch.rand(6, *network.image_shape)
    reach = plots.usual_reach(network, images, 1)
    if network.decoder is not None:
        drawn(plots.sweep(network, image, 1, steps=3, reach=torch.rand(16) if reach is None else reach), tmp_path)
    with_maps = isinstance(network, CapsuleNetwork) and len(network.layers) == 1
    if with_maps:
        drawn(plots.capsule_types(network, image, 1, plots.most_exciting(network, images)), tmp_path)
        drawn(plots.capsule_types(network, image, 1, None), tmp_path)
    else:
        with pytest.raises(UserError, match=r"no map|Only a capsnet"):
            plots.capsule_types(network, image, 1, None)


def test_a_sweep_is_the_decoder_of_moved_components():
    network = network_of()
    image = torch.rand(1, 22, 20)
    pictures, offsets = plots.swept(network, image, 1)
    assert pictures.shape == (16, 11, 1, 22, 20)
    torch.testing.assert_close(offsets[0], torch.linspace(-0.25, 0.25, 11))
    poses = network(image[None]).capsules.poses.detach()
    as_it_is = network.decoder(poses, torch.tensor([1]))[0, 0].detach()
    for row in pictures[:, 5]:
        torch.testing.assert_close(row, as_it_is)
    poses[0, 1, 7] += 0.1
    moved = network.decoder(poses, torch.tensor([1]))[0, 0].detach()
    torch.testing.assert_close(pictures[7, 7], moved)


def test_without_a_decoder_a_sentence_says_so():
    with pytest.raises(UserError, match="no decoder"):
        plots.sweep(network_of(reconstruction=False), torch.rand(1, 22, 20), 0)


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_a_patch_is_what_the_capsule_sees(padding):
    """Whatever is outside the patch can change without any effect on the capsule; what is inside cannot."""
    network = network_of(padding=padding).double()
    images = torch.rand(5, 1, 22, 20, dtype=torch.float64)
    exciting = plots.most_exciting(network, images)
    rows, columns, types = network.map_shape
    capsules = network.primary_capsules(images).activations.view(5, rows * columns, types)
    torch.testing.assert_close(exciting.lengths, capsules.amax(1).detach())
    best = int(exciting.lengths[:, 1].argmax())
    (patch,) = plots.patches(network, exciting, 1, 1)
    assert patch.shape == (1, 17, 17)
    place = int(exciting.places[best, 1])
    image = images[best : best + 1].clone().requires_grad_()
    network.primary_capsules(image).activations.view(rows * columns, types)[place, 1].backward()
    seen = image.grad[0, 0] != 0
    margin = 2 * network.front.padding
    row, column = divmod(place, columns)
    field = torch.zeros(22 + 2 * margin + 17, 20 + 2 * margin + 17, dtype=torch.bool)
    field[2 * row : 2 * row + 17, 2 * column : 2 * column + 17] = True
    inside = field[margin : margin + 22, margin : margin + 20]
    assert not (seen & ~inside).any()
    torch.testing.assert_close(patch[0][patch[0] != 0], images[best, 0][inside])


def test_capsules_that_were_pruned_do_not_excite():
    network = CapsuleNetwork((1, 22, 20), CLASSES, conv_channels=4, primary_capsules=3, kept_capsules=[4, 5])
    exciting = plots.most_exciting(network, torch.rand(3, 1, 22, 20))
    assert (exciting.lengths[:, 0] == -1).all()
    assert (exciting.places[:, 1] == 1).all()


def test_the_strongest_types_end_with_the_one_most_against():
    assert plots.strongest_types(torch.tensor([0.1, 0.5, -0.2, 0.3, -0.1]), 3) == [1, 3, 2]
    assert plots.strongest_types(torch.tensor([0.1, 0.5, 0.2]), 2) == [1, 2]
    assert plots.strongest_types(torch.tensor([0.1, -0.5]), 6) == [0, 1]


def test_a_picture_of_nothing_is_drawn(tmp_path):
    network = network_of()
    for tensor in network.state_dict().values():
        tensor.data.zero_()
    drawn(plots.explanation(network, torch.zeros(1, 22, 20)), tmp_path)
    drawn(plots.capsule_types(network, torch.zeros(1, 22, 20), 0, None), tmp_path)
