import torch
from lightning_fabric import Fabric

from torchcaps import CapsuleNetwork
from torchcaps.data import ImageSplit, OverlappingDigits
from torchcaps.functional import presence
from torchcaps.training.evaluation import confusion_matrix, evaluate

FABRIC = Fabric(accelerator="cpu", devices=1)


def network_for(shape: tuple[int, int, int], labels: int = 1) -> CapsuleNetwork:
    return CapsuleNetwork(
        shape, 4, conv_channels=4, primary_capsules=2, reconstruction=False, labels_per_image=labels
    ).folded()


def test_counts_errors_over_ragged_batches():
    split = ImageSplit(torch.randint(256, (23, 1, 20, 20), dtype=torch.uint8), torch.arange(23) % 4)
    network = network_for((1, 20, 20))
    network.evaluation_batch = 10
    outcome = evaluate(network, split, fabric=FABRIC)
    predicted = network(split.pixels.float() / 255).capsules.activations.argmax(1)
    assert outcome.images == 23
    assert outcome.errors == int((predicted != split.labels).sum())
    for true in range(4):
        for guess in range(4):
            assert outcome.confusion[true, guess] == ((split.labels == true) & (predicted == guess)).sum()


def test_a_limit_evaluates_the_first_images():
    split = ImageSplit(torch.zeros(23, 1, 20, 20, dtype=torch.uint8), torch.arange(23) % 4)
    assert evaluate(network_for((1, 20, 20)), split, fabric=FABRIC, limit=7).images == 7


def test_an_overlapping_image_is_right_only_if_both_classes_are_found():
    pixels = torch.randint(256, (12, 1, 20, 20), dtype=torch.uint8)
    split = OverlappingDigits(pixels, torch.arange(12) % 4, name="test", copies=3)
    network = network_for((1, 28, 28), labels=2)
    outcome = evaluate(network, split, fabric=FABRIC)
    batch = split.fetch(torch.arange(36)).on("cpu")
    found = network(batch.images).capsules.activations.topk(2).indices
    wrong = sum(set(a) != set(b) for a, b in zip(found.tolist(), batch.labels.tolist()))
    assert outcome.images == 36
    assert outcome.errors == wrong
    assert outcome.confusion.sum() == outcome.shown.sum() == outcome.found.sum() == 72


def test_confusion_of_several_classes_keeps_the_row_sums():
    shown = presence(torch.tensor([[0, 1], [0, 1], [2, 3]]), 4)
    found = presence(torch.tensor([[0, 1], [1, 2], [0, 1]]), 4)
    matrix = confusion_matrix(shown, found)
    torch.testing.assert_close(matrix.sum(1), shown.sum(0))
    assert matrix[0, 0] == 1
    assert matrix[0, 2] == 1
    assert matrix[2, 0] == 0.5


def test_a_class_that_is_missed_with_nothing_in_its_place_is_in_no_column():
    shown, found = torch.tensor([[1.0, 0], [1, 0]]), torch.tensor([[1.0, 0], [0, 0]])
    assert confusion_matrix(shown, found).tolist() == [[1, 0], [0, 0]]
