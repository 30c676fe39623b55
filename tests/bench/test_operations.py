from torchcaps.bench.operations import _bilinear_multiplications, training_gflop

from torchcaps.ops.plan import Shape


def test_the_count_for_mnist_is_what_it_is_by_hand():
    """6x6 outputs, one 6x6 tile: phases of 5 and 4 taps have 10 and 9 points, 19² products in all."""
    B, C = 128, 256
    products = 3 * 19 * 19 * B * C * C
    only_products = _bilinear_multiplications(Shape(B, C, C, (6, 6), kernel=9, stride=2))
    assert products < only_products < 1.25 * products
    first = 2 * B * 400 * C * 82
    capsules, decoder = 4 * B * 1_474_560, 3 * B * 1_411_344
    assert abs(training_gflop("mnist", B) - 2 * (first + only_products + capsules + decoder) / 1e9) < 1e-6


def test_the_work_grows_with_the_batch_but_not_the_kernel_transforms():
    assert 1.9 < training_gflop("cifar-10-24", 256) / training_gflop("cifar-10-24", 128) < 2
