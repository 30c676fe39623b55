import pytest
import torch
from data_examples import EVERYTHING, augmentation, random_images, same
from torch import Tensor

from torchcaps.data.augmentation import Augmentation
from torchcaps.data.batches import Batches, evaluation_batches
from torchcaps.data.splits import Batch, ImageSplit, MultiLabelSplit, OverlappingDigits, Split, padded_labels
from torchcaps.errors import UserError
from torchcaps.settings import SettingError


class TestBatch:
    def test_shapes_and_types(self, split: Split) -> None:
        batch = split.fetch(torch.tensor([3, 1, 2]))
        k = split.labels_per_image
        assert batch.images.shape == (3, *split.image_shape)
        assert batch.images.dtype == batch.parts.dtype == torch.uint8
        assert batch.labels.shape == (3, k)
        assert batch.labels.dtype == torch.int64
        assert batch.parts.shape == (3, k, *split.image_shape)

    def test_on_makes_floats_between_0_and_1(self, split: Split) -> None:
        batch = split.fetch(torch.arange(5))
        moved = batch.on("cpu")
        assert moved.images.dtype == moved.parts.dtype == torch.float32
        assert torch.equal(moved.images, batch.images.float() / 255)
        assert torch.equal(moved.parts, batch.parts.float() / 255)
        assert same(moved.on("cpu"), moved)

    def test_one_class_costs_no_second_copy(self) -> None:
        batch = ImageSplit(*random_images(9)).fetch(torch.arange(5))
        augmented = EVERYTHING(batch, seed=0, epoch=0, positions=torch.arange(5), indices=torch.arange(5))
        for changed in (batch, batch.on("cpu"), augmented, augmented.on("cpu"), EVERYTHING.centre(batch)):
            assert changed.parts.data_ptr() == changed.images.data_ptr()


class TestOverlappingDigits:
    @pytest.fixture
    def digits(self) -> OverlappingDigits:
        pixels, labels = random_images(40)
        pixels[pixels == 0] = 1  # so that the canvas can be told from the digit
        return OverlappingDigits(pixels, labels, name="test", copies=100)

    def test_is_the_sum_of_two_whole_digits_of_different_classes(self, digits: OverlappingDigits) -> None:
        batch = digits.fetch(torch.arange(len(digits)))
        assert batch.images.shape == (4000, 1, 36, 36)
        assert (batch.labels[:, 0] != batch.labels[:, 1]).all()
        assert torch.equal(batch.images, batch.parts.int().sum(1).clamp(max=255).to(torch.uint8))
        for index in range(0, 4000, 97):
            for part, label in zip(batch.parts[index, :, 0], batch.labels[index]):
                rows, columns = part.any(1).nonzero().flatten(), part.any(0).nonzero().flatten()
                assert len(rows) == len(columns) == 28
                digit = part[rows[0] : rows[0] + 28, columns[0] : columns[0] + 28]
                matches = (digits.pixels[:, 0] == digit).flatten(1).all(1)
                assert (digits.labels[matches] == label).all()
                assert matches.any()

    def test_all_shifts_and_partners_occur(self, digits: OverlappingDigits) -> None:
        batch = digits.fetch(torch.arange(len(digits)))
        for k in (0, 1):
            for axis in (2, 3):
                first = batch.parts[:, k].any(axis).flatten(1).int().argmax(1)
                counts = torch.bincount(first, minlength=9)
                assert len(counts) == 9  # the canvas allows offsets 0 to 8: a shift of -4 to 4
                assert counts.min() > 350  # 444 expected
        partners = torch.bincount(batch.labels[:, 1], minlength=10)
        assert (partners > 0).sum() == len(digits.labels.unique())

    def test_is_the_same_every_time_in_any_company(self, digits: OverlappingDigits) -> None:
        whole = digits.fetch(torch.arange(100))
        assert same(Batch(*(part[[7, 3]] for part in whole)), digits.fetch(torch.tensor([7, 3])))

    def test_splits_differ(self) -> None:
        a, b = (OverlappingDigits(*random_images(40), name=name) for name in ("train", "test"))
        assert not torch.equal(a.fetch(torch.arange(20)).labels, b.fetch(torch.arange(20)).labels)

    def test_sixty_million_cost_no_memory(self) -> None:
        big = OverlappingDigits(*random_images(60_000), name="train")
        assert len(big) == 60_000_000
        batches = Batches(big, batch_size=128, seed=0)
        assert batches.steps_per_epoch == 468_750
        assert len(batches.at(400_000).labels) == 128

    def test_one_class_is_an_error(self) -> None:
        with pytest.raises(UserError, match="two classes"):
            OverlappingDigits(torch.zeros(3, 1, 28, 28, dtype=torch.uint8), torch.ones(3).long(), name="x")


class TestBatches:
    @pytest.mark.parametrize("chosen", [None, EVERYTHING])
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_processes_share_the_same_batch(self, split: Split, world_size: int, chosen: Augmentation | None) -> None:
        def batch(step: int, rank: int, world: int) -> Batch:
            return Batches(split, batch_size=48, seed=5, augmentation=chosen, rank=rank, world_size=world).at(step)

        for step in (0, 3, 4, 11):
            alone = batch(step, 0, 1)
            shared = [batch(step, rank, world_size) for rank in range(world_size)]
            assert same(alone, Batch(*(torch.cat(part) for part in zip(*shared))))

    def test_step_is_all_the_state_there_is(self, split: Split) -> None:
        first = Batches(split, batch_size=20, seed=1, augmentation=EVERYTHING)
        history = [first.at(step) for step in range(25)]
        resumed = Batches(split, batch_size=20, seed=1, augmentation=EVERYTHING)
        assert same(resumed.at(17), history[17])

    def test_an_epoch_shows_each_image_at_most_once(self) -> None:
        numbers = torch.arange(103)
        split = ImageSplit(torch.zeros(103, 1, 2, 2, dtype=torch.uint8), numbers)
        batches = Batches(split, batch_size=10, seed=0)
        assert batches.steps_per_epoch == 10
        epochs = [torch.cat([batches.at(10 * epoch + step).labels for step in range(10)]).flatten() for epoch in (0, 1)]
        assert all(len(epoch.unique()) == 100 for epoch in epochs)
        assert not torch.equal(*epochs)
        assert not torch.equal(epochs[0], Batches(split, batch_size=100, seed=1).at(0).labels.flatten())
        assert torch.equal(epochs[0], Batches(split, batch_size=100, seed=0).at(0).labels.flatten())

    def test_bad_sizes(self) -> None:
        split = ImageSplit(*random_images(10))
        with pytest.raises(SettingError, match="1 or more"):
            Batches(split, batch_size=0, seed=0)
        with pytest.raises(UserError, match="3 processes"):
            Batches(split, batch_size=10, seed=0, world_size=3)
        with pytest.raises(UserError, match="too few for 12 processes"):
            Batches(split, batch_size=12, seed=0, world_size=12)
        with pytest.raises(SettingError, match="even, balanced"):
            Batches(split, batch_size=10, seed=0, sampling="random")
        assert Batches(split, batch_size=10, seed=0).steps_per_epoch == 1

    def test_fewer_images_than_a_batch_are_all_used(self) -> None:
        split = ImageSplit(torch.zeros(11, 1, 2, 2, dtype=torch.uint8), torch.arange(11))
        batches = Batches(split, batch_size=128, seed=0)
        assert (batches.batch_size, batches.steps_per_epoch) == (11, 1)
        for step in (0, 1):
            assert torch.equal(batches.at(step).labels.flatten().sort().values, torch.arange(11))
        shared = [Batches(split, batch_size=128, seed=0, rank=rank, world_size=4) for rank in range(4)]
        numbers = torch.cat([part.at(0).labels.flatten() for part in shared])
        assert len(numbers) == len(numbers.unique()) == 8  # equal shares


class TestBalancedSampling:
    @pytest.fixture
    def uneven(self) -> ImageSplit:
        """600 images of class 0, 40 of class 1, none of class 2, 3 of class 3; the first pixels hold their numbers."""
        labels = torch.tensor([0] * 600 + [1] * 40 + [3] * 3)
        numbers = torch.stack([torch.arange(643) // 256, torch.arange(643) % 256], dim=1).to(torch.uint8)
        return ImageSplit(numbers.view(643, 1, 1, 2), labels)

    @staticmethod
    def numbers(batch: Batch) -> Tensor:
        return batch.images.flatten(1).long() @ torch.tensor([256, 1])

    def test_classes_are_equally_often_shown(self, uneven: ImageSplit) -> None:
        batches = Batches(uneven, batch_size=64, seed=3, sampling="balanced")
        assert batches.steps_per_epoch == 10
        labels = torch.cat([batches.at(step).labels.flatten() for step in range(40)])
        counts = torch.bincount(labels)
        assert counts[2] == 0
        assert (counts[[0, 1, 3]] - 2560 / 3).abs().max() < 8
        assert torch.bincount(batches.at(5).labels.flatten())[[0, 1, 3]].min() > 8  # mixed, not one after the other

    def test_images_of_a_class_are_equally_often_shown(self, uneven: ImageSplit) -> None:
        batches = Batches(uneven, batch_size=643, seed=3, sampling="balanced")
        counts = torch.bincount(torch.cat([self.numbers(batches.at(step)) for step in range(30)]), minlength=643)
        for first, last in ((0, 600), (600, 640), (640, 643)):
            assert counts[first:last].max() - counts[first:last].min() <= 1

    def test_step_is_all_the_state_and_processes_share(self, uneven: ImageSplit) -> None:
        def batch(step: int, rank: int = 0, world_size: int = 1) -> Batch:
            return Batches(uneven, batch_size=48, seed=5, sampling="balanced", rank=rank, world_size=world_size).at(
                step
            )

        assert same(batch(17), batch(17))
        assert not torch.equal(self.numbers(batch(17)), self.numbers(batch(18)))
        shared = [batch(17, rank, 3) for rank in range(3)]
        assert same(batch(17), Batch(*(torch.cat(part) for part in zip(*shared))))

    def test_needs_images_of_one_class(self) -> None:
        with pytest.raises(SettingError, match="sampling"):
            Batches(OverlappingDigits(*random_images(20), name="x"), batch_size=4, seed=0, sampling="balanced")


class TestMultiLabelSplit:
    def test_labels_are_padded(self) -> None:
        presence = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [1, 1, 0, 1]]).bool()
        split = MultiLabelSplit(random_images(3)[0], presence)
        batch = split.fetch(torch.tensor([2, 0, 1]))
        assert split.labels_per_image is None
        assert batch.labels.tolist() == [[0, 1, 3], [1, 3, -1], [0, -1, -1]]
        assert batch.parts.shape == (3, 1, 1, 28, 28)
        assert split.class_counts(4).tolist() == [2, 2, 0, 2]
        moved = EVERYTHING(batch, seed=0, epoch=0, positions=torch.arange(3), indices=torch.arange(3)).on("cpu")
        assert moved.parts.data_ptr() == moved.images.data_ptr()
        assert torch.equal(moved.labels, batch.labels)

    def test_no_class_at_all(self) -> None:
        assert padded_labels(torch.zeros(2, 3).bool()).tolist() == [[-1], [-1]]
        assert padded_labels(torch.zeros(0, 3).bool()).shape == (0, 1)


def test_class_counts() -> None:
    assert ImageSplit(*random_images(50)).class_counts(12).sum() == 50
    assert ImageSplit(*random_images(50)).class_counts(12).shape == (12,)
    overlapping = OverlappingDigits(*random_images(50), name="test", copies=200)
    shown = torch.bincount(overlapping.fetch(torch.arange(len(overlapping))).labels.flatten(), minlength=10)
    expected = overlapping.class_counts(10)
    assert (expected.sum() - 2 * len(overlapping)).abs() <= 5  # rounding
    assert ((shown - expected).abs() < 0.1 * expected + 1).all()


class TestEvaluationBatches:
    def test_every_image_once_in_order(self) -> None:
        split = ImageSplit(torch.zeros(103, 1, 2, 2, dtype=torch.uint8), torch.arange(103))
        batches = list(evaluation_batches(split, batch_size=25))
        assert [len(batch.images) for batch in batches] == [25, 25, 25, 25, 3]
        assert torch.equal(torch.cat([batch.labels for batch in batches]).flatten(), torch.arange(103))
        assert sum(len(batch.images) for batch in evaluation_batches(split, batch_size=25, limit=30)) == 30
        assert sum(len(batch.images) for batch in evaluation_batches(split, batch_size=25, limit=500)) == 103
        shares = [list(evaluation_batches(split, batch_size=25, rank=rank, world_size=2)) for rank in (0, 1)]
        numbers = torch.cat([batch.labels for share in shares for batch in share]).flatten()
        assert torch.equal(numbers.sort().values, torch.arange(103))

    def test_some_images_are_of_all_classes(self) -> None:
        labels = torch.arange(10).repeat_interleave(100)  # one class after another, as folders are read
        split = ImageSplit(torch.zeros(1000, 1, 2, 2, dtype=torch.uint8), labels)
        seen = torch.cat([batch.labels for batch in evaluation_batches(split, batch_size=64, limit=200)]).flatten()
        assert len(seen) == 200
        assert torch.bincount(seen, minlength=10).min() > 5
        assert torch.equal(seen, seen.sort().values)

    def test_some_overlapping_digits_are_the_first(self) -> None:
        split = OverlappingDigits(*random_images(50), name="test", copies=200)
        assert torch.equal(split.sample(50), torch.arange(50))  # each base image once

    def test_crops_the_centre(self, split: Split) -> None:
        batch = next(evaluation_batches(split, batch_size=4, augmentation=augmentation(crop=12, shift=3)))
        _, height, width = split.image_shape
        top, left = (height - 12) // 2, (width - 12) // 2
        whole = split.fetch(torch.arange(4))
        assert torch.equal(batch.images, whole.images[..., top : top + 12, left : left + 12])
        assert torch.equal(batch.parts, whole.parts[..., top : top + 12, left : left + 12])
