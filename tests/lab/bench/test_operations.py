from torchcaps.lab.bench.operations import bilinear_multiplications, training_gflop
from torchcaps.ops.plan import ConvolutionShape


def test_the_count_for_mnist_is_what_it_is_by_hand():
    """6x6 outputs, one 6x6 tile: phases of 5 and 4 taps have 10 and 9 points, 19² products in all."""
    B, C = 128, 256
    products = 3 * 19 * 19 * B * C * C
    with_transforms = bilinear_multiplications(ConvolutionShape(B, C, C, (6, 6), kernel=9, stride=2))
    assert products < with_transforms < 1.25 * products
    first = 2 * B * 19 * 19 * C * 82  # no output depends on the last row and column of 20 x 20
    capsules, decoder = 4 * B * 1_474_560, 3 * B * 1_411_344
    assert abs(training_gflop("mnist", B) - 2 * (first + with_transforms + capsules + decoder) / 1e9) < 1e-6


def test_the_work_grows_with_the_batch_but_not_the_kernel_transforms():
    assert 1.9 < training_gflop("cifar-10-24", 256) / training_gflop("cifar-10-24", 128) < 2


def test_a_padded_network_has_its_padded_size_but_its_zeros_are_not_transformed():
    """12x12 outputs from 24x24 images: 24x24 places in between, and 9,216 primary capsules."""
    sizes = {"batch": 128, "channels": 256, "outputs": 512, "size": (12, 12), "kernel": 9, "stride": 2}
    padded = bilinear_multiplications(ConvolutionShape(**sizes, padding=4, extent=(24, 24)))
    assert padded < bilinear_multiplications(ConvolutionShape(**sizes))  # as if the padding had been data
    first = 2 * 128 * 24 * 24 * 256 * (3 * 81 + 1)
    capsules = 4 * 128 * 9216 * 8 * 160
    assert abs(training_gflop("cifar-10-24-same", 128) - 2 * (first + padded + capsules) / 1e9) < 1e-6
