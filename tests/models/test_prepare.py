"""Images of any layout, type and size, as a network wants them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from torchcaps.models.base import Network, standardised
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.models.config import CapsNetConfig, TaskConfig

GREY = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)


def network(channels: int = 1, **task: object) -> Network:
    settings = {"image_shape": (channels, 20, 24), "classes": ("a", "b"), **task}
    config = CapsNetConfig(conv_channels=2, primary_capsules=1, reconstruction=False)
    return CapsuleNetwork.from_config(config, TaskConfig(**settings))


def layouts(image: Tensor) -> dict[str, Tensor]:
    """One image (C, H, W) in all layouts there are."""
    made = {
        "(C, H, W)": image,
        "(H, W, C)": image.permute(1, 2, 0),
        "(B, C, H, W)": image[None],
        "(B, H, W, C)": image.permute(1, 2, 0)[None],
    }
    if len(image) == 1:
        made |= {"(H, W)": image[0], "(B, H, W)": image}
    return made


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("given", [1, 3])
@pytest.mark.parametrize("array", [False, True])
def test_any_layout_grey_or_colour(channels, given, array):
    image = torch.rand(given, 20, 24)
    expected = image
    if (channels, given) == (1, 3):
        expected = (GREY * image).sum(0, keepdim=True)
    if (channels, given) == (3, 1):
        expected = image.expand(3, -1, -1)
    model = network(channels)
    for layout, tensor in layouts(image).items():
        prepared = model.prepare(tensor.numpy() if array else tensor)
        torch.testing.assert_close(prepared, expected[None], msg=lambda text, layout=layout: f"{layout}: {text}")
        assert prepared.is_contiguous()
        model(prepared)


@pytest.mark.parametrize("shape", [(5, 20, 24), (5, 1, 20, 24), (5, 20, 24, 1), (5, 3, 20, 24), (5, 20, 24, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_batches(shape, channels):
    images = torch.rand(shape)
    together = network(channels).prepare(images)
    assert together.shape == (5, channels, 20, 24)
    torch.testing.assert_close(together[3:4], network(channels).prepare(images[3]))


@pytest.mark.parametrize("shape", [(2, 20, 24), (20, 24, 2), (5, 2, 20, 24), (5, 20, 24, 2)])
def test_a_network_of_other_channels_takes_these(shape):
    batch = 5 if len(shape) == 4 else 1
    assert network(2).prepare(torch.rand(shape)).shape == (batch, 2, 20, 24)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_of_any_precision(dtype):
    image = (torch.arange(480).view(20, 24) % 16 / 16).to(dtype)
    prepared = network().prepare(image)
    assert prepared.dtype == torch.float32
    torch.testing.assert_close(prepared[0, 0], image.float())


def test_bytes_are_divided_by_255():
    image = np.arange(480, dtype=np.uint8).reshape(20, 24)
    torch.testing.assert_close(network().prepare(image)[0, 0], torch.from_numpy(image) / 255)


def test_arrays_that_are_read_backwards_or_must_not_be_written():
    image = np.random.default_rng(0).random((20, 24, 3), dtype=np.float32)
    backwards = image[:, :, ::-1]
    expected = network(3).prepare(np.ascontiguousarray(backwards))
    torch.testing.assert_close(network(3).prepare(backwards), expected)
    image.flags.writeable = False
    torch.testing.assert_close(network(3).prepare(image).flip(1), expected)


def test_what_is_given_is_not_changed():
    image = np.ones((20, 24), dtype=np.float32)
    network().prepare(image).zero_()
    assert (image == 1).all()
    tensor = torch.ones(1, 1, 20, 24)
    network(standardise=True).prepare(tensor)
    assert tensor.eq(1).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, bool, np.uint16])
def test_numbers_that_are_neither_bytes_nor_fractions_are_refused(dtype):
    with pytest.raises(ValueError, match="must be bytes, or floating-point numbers"):
        network().prepare(np.zeros((20, 24), dtype))


@pytest.mark.parametrize(
    ("channels", "shape"),
    [(1, (20,)), (1, (20, 24, 4)), (1, (5, 20, 24, 4)), (1, (1, 5, 1, 20, 24)), (2, (20, 24)), (2, (3, 20, 24))],
)
def test_shapes_that_are_no_images_are_refused(channels, shape):
    with pytest.raises(ValueError, match="images of shape"):
        network(channels).prepare(torch.rand(shape))


@pytest.mark.parametrize("size", [(40, 48), (10, 12), (33, 70), (1, 1), (200, 20)])
@pytest.mark.parametrize("fit", ["stretch", "pad", "crop"])
def test_any_size(size, fit):
    prepared = network(3, fit=fit).prepare(torch.rand(2, 3, *size))
    assert prepared.shape == (2, 3, 20, 24)
    assert prepared.min() >= 0
    assert prepared.max() <= 1


def test_the_three_ways_to_fit():
    image = torch.ones(1, 40, 24)  # twice as tall as the network's
    assert network(fit="stretch").prepare(image).eq(1).all()
    padded = network(fit="pad").prepare(image)[0, 0]
    assert padded[:, :6].eq(0).all()
    assert padded[:, 6:18].eq(1).all()
    assert padded[:, 18:].eq(0).all()
    marked = image.clone()
    marked[:, :10] = 0
    marked[:, -10:] = 0
    torch.testing.assert_close(network(fit="crop").prepare(marked), torch.ones(1, 1, 20, 24))


def test_the_centre_of_the_source_is_used():
    image = torch.rand(1, 26, 30)
    prepared = network(source_shape=(1, 26, 30)).prepare(image)
    torch.testing.assert_close(prepared[0], image[:, 3:23, 3:27])


def test_each_image_may_be_standardised():
    images = torch.rand(4, 3, 20, 24)
    images[3] = 0.5
    prepared = network(3, standardise=True).prepare(images)
    torch.testing.assert_close(prepared.mean((1, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(prepared[:3].std((1, 2, 3), correction=0), torch.ones(3))
    assert prepared[3].abs().max() < 1e-3
    torch.testing.assert_close(prepared, standardised(images))
