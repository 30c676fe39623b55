import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchcaps.data.batches import (
    Augmentation,
    Batch,
    Batches,
    ImageSplit,
    OverlappingDigits,
    Split,
    evaluation_batches,
    turn,
)
from torchcaps.errors import UserError


def random_images(count: int, shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    return pixels, torch.randint(0, classes, (count,), generator=generator)


@pytest.fixture(params=["images", "colour", "overlapping"])
def split(request: pytest.FixtureRequest) -> Split:
    if request.param == "overlapping":
        return OverlappingDigits(*random_images(50), name="test", copies=4)
    return ImageSplit(*random_images(203, (1, 28, 28) if request.param == "images" else (3, 20, 32)))


EVERYTHING = Augmentation(shift=2, flip=True, crop=16, cutout=5, rotate=15, scale=0.1)


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


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
        augmented = EVERYTHING(batch, seed=0, epoch=0, positions=torch.arange(5))
        for each in (batch, batch.on("cpu"), augmented, augmented.on("cpu"), EVERYTHING.centre(batch)):
            assert each.parts.data_ptr() == each.images.data_ptr()


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
        assert same(Batch(*(x[[7, 3]] for x in whole)), digits.fetch(torch.tensor([7, 3])))

    def test_splits_differ(self) -> None:
        a, b = (OverlappingDigits(*random_images(40), name=name) for name in ("train", "test"))
        assert not torch.equal(a.fetch(torch.arange(20)).labels, b.fetch(torch.arange(20)).labels)

    def test_sixty_million_cost_no_memory_and_little_time(self) -> None:
        big = OverlappingDigits(*random_images(60_000), name="train")
        assert len(big) == 60_000_000
        batches = Batches(big, batch_size=128, seed=0)
        assert batches.steps_per_epoch == 468_750
        assert best_seconds(lambda: batches.at(400_000)) < 0.005

    def test_one_class_is_an_error(self) -> None:
        with pytest.raises(UserError, match="two classes"):
            OverlappingDigits(torch.zeros(3, 1, 28, 28, dtype=torch.uint8), torch.ones(3).long(), name="x")


def best_seconds(action: Callable[[], object]) -> float:
    """Of this thread's own time, so that a busy machine does not matter."""
    times = []
    for _ in range(10):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return min(times)


class TestBatches:
    @pytest.mark.parametrize("augmentation", [None, EVERYTHING])
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_processes_share_the_same_batch(
        self, split: Split, world_size: int, augmentation: Augmentation | None
    ) -> None:
        def batch(step: int, rank: int, world: int) -> Batch:
            return Batches(split, batch_size=48, seed=5, augmentation=augmentation, rank=rank, world_size=world).at(
                step
            )

        for step in (0, 3, 4, 11):
            alone = batch(step, 0, 1)
            shared = [batch(step, rank, world_size) for rank in range(world_size)]
            assert same(alone, Batch(*(torch.cat(x) for x in zip(*shared))))

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
        epochs = [torch.cat([batches.at(10 * e + s).labels for s in range(10)]).flatten() for e in (0, 1)]
        assert all(len(epoch.unique()) == 100 for epoch in epochs)
        assert not torch.equal(*epochs)
        assert not torch.equal(epochs[0], Batches(split, batch_size=100, seed=1).at(0).labels.flatten())
        assert torch.equal(epochs[0], Batches(split, batch_size=100, seed=0).at(0).labels.flatten())

    def test_bad_sizes(self) -> None:
        split = ImageSplit(*random_images(10))
        with pytest.raises(UserError, match="10 training images"):
            Batches(split, batch_size=11, seed=0)
        with pytest.raises(UserError, match="1 or more"):
            Batches(split, batch_size=0, seed=0)
        with pytest.raises(UserError, match="3 processes"):
            Batches(split, batch_size=10, seed=0, world_size=3)
        assert Batches(split, batch_size=10, seed=0).steps_per_epoch == 1


class TestEvaluationBatches:
    def test_every_image_once_in_order(self) -> None:
        split = ImageSplit(torch.zeros(103, 1, 2, 2, dtype=torch.uint8), torch.arange(103))
        batches = list(evaluation_batches(split, batch_size=25))
        assert [len(batch.images) for batch in batches] == [25, 25, 25, 25, 3]
        assert torch.equal(torch.cat([b.labels for b in batches]).flatten(), torch.arange(103))
        assert sum(len(b.images) for b in evaluation_batches(split, batch_size=25, limit=30)) == 30
        assert sum(len(b.images) for b in evaluation_batches(split, batch_size=25, limit=500)) == 103
        shares = [list(evaluation_batches(split, batch_size=25, rank=r, world_size=2)) for r in (0, 1)]
        numbers = torch.cat([b.labels for share in shares for b in share]).flatten()
        assert torch.equal(numbers.sort().values, torch.arange(103))

    def test_crops_the_centre(self, split: Split) -> None:
        batch = next(evaluation_batches(split, batch_size=4, augmentation=Augmentation(crop=12, shift=3)))
        _, height, width = split.image_shape
        top, left = (height - 12) // 2, (width - 12) // 2
        whole = split.fetch(torch.arange(4))
        assert torch.equal(batch.images, whole.images[..., top : top + 12, left : left + 12])
        assert torch.equal(batch.parts, whole.parts[..., top : top + 12, left : left + 12])


def augmented(split: Split, count: int = 60, **options: object) -> tuple[Batch, Batch]:
    batch = split.fetch(torch.arange(count) % len(split))
    changed = Augmentation(**options)(batch, seed=0, epoch=0, positions=torch.arange(count))  # type: ignore[arg-type]
    return batch, changed


class TestAugmentation:
    def test_nothing_asked_nothing_changed(self, split: Split) -> None:
        assert same(*augmented(split))

    def test_shift_is_one_of_all_shifts_filled_with_zeros(self, split: Split) -> None:
        batch, changed = augmented(split, shift=1)
        _, height, width = split.image_shape
        used = set()
        for before, after in zip(batch.images, changed.images):
            padded = torch.nn.functional.pad(before, [1] * 4)
            for top in range(3):
                for left in range(3):
                    if torch.equal(after, padded[:, top : top + height, left : left + width]):
                        used.add((top, left))
                        break
        assert len(used) == 9

    def test_flip_mirrors_about_half(self, split: Split) -> None:
        batch, changed = augmented(split, flip=True)
        flipped = (changed.images == batch.images.flip(3)).flatten(1).all(1)
        same = (changed.images == batch.images).flatten(1).all(1)
        assert (flipped ^ same).all()
        assert 15 < flipped.sum() < 45

    def test_crop(self, split: Split) -> None:
        batch, changed = augmented(split, crop=19)
        assert changed.images.shape[1:] == Augmentation(crop=19).image_shape(split.image_shape)
        windows = batch.images.unfold(2, 19, 1).unfold(3, 19, 1)
        found = (windows == changed.images[:, :, None, None]).all(-1).all(-1).all(1)  # (B, tops, lefts)
        assert found.flatten(1).any(1).all()
        assert found.any(0).sum() > 3

    def test_cutout_blanks_a_square(self) -> None:
        split = ImageSplit(torch.full((60, 1, 28, 28), 9, dtype=torch.uint8), torch.zeros(60).long())
        for side in (5, 6):
            _, changed = augmented(split, cutout=side)
            blanked = (changed.images == 0).flatten(1).sum(1)
            assert blanked.max() == side * side
            assert blanked.min() > 0

    def test_parts_change_as_their_image_does(self) -> None:
        split = OverlappingDigits(*random_images(50), name="test")
        _, changed = augmented(split, shift=3, flip=True, crop=30, cutout=7)
        total = changed.parts.int().sum(1).clamp(max=255).to(torch.uint8)
        assert torch.equal(changed.images, total)

    def test_seed_epoch_and_position_all_matter(self, split: Split) -> None:
        batch = split.fetch(torch.arange(20))

        def change(seed: int, epoch: int, start: int) -> Batch:
            return EVERYTHING(batch, seed=seed, epoch=epoch, positions=start + torch.arange(20))

        assert same(change(0, 0, 0), change(0, 0, 0))
        for other in ((1, 0, 0), (0, 1, 0), (0, 0, 20)):
            assert not torch.equal(change(0, 0, 0).images, change(*other).images)

    def test_does_not_touch_the_data(self, split: Split) -> None:
        before = split.fetch(torch.arange(20))
        augmented(split, shift=2, flip=True, cutout=9, rotate=10)
        assert same(before, split.fetch(torch.arange(20)))

    def test_is_fast(self) -> None:
        batch = ImageSplit(*random_images(128)).fetch(torch.arange(128))
        augmentation = Augmentation(shift=2, flip=True, cutout=8)
        seconds = best_seconds(lambda: augmentation(batch, seed=0, epoch=0, positions=torch.arange(128)))
        assert seconds < 0.0015

    @pytest.mark.parametrize("options", [{"shift": -1}, {"crop": -3}, {"rotate": -1.0}, {"scale": 1.0}])
    def test_bad_options(self, options: dict[str, int]) -> None:
        with pytest.raises(UserError, match=next(iter(options))):
            Augmentation(**options)

    def test_crop_larger_than_the_image(self) -> None:
        with pytest.raises(UserError, match="cannot crop 29 x 29"):
            Augmentation(crop=29).image_shape((1, 28, 28))


class TestTurn:
    def naive(self, image: Tensor, degrees: float, scale: float) -> Tensor:
        """Each pixel by itself, in float64."""
        height, width = image.shape
        angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
        cosine, sine = float(torch.cos(angle)) / scale, float(torch.sin(angle)) / scale
        result = torch.zeros(height, width, dtype=torch.float64)
        for row in range(height):
            for column in range(width):
                down, across = row - (height - 1) / 2, column - (width - 1) / 2
                y = cosine * down + sine * across + (height - 1) / 2
                x = cosine * across - sine * down + (width - 1) / 2
                for r in (int(y // 1), int(y // 1) + 1):
                    for c in (int(x // 1), int(x // 1) + 1):
                        if 0 <= r < height and 0 <= c < width:
                            result[row, column] += (1 - abs(y - r)) * (1 - abs(x - c)) * float(image[r, c])
        return result

    @pytest.mark.parametrize(("degrees", "scale"), [(0, 1), (10, 1), (-33, 1.2), (90, 1), (180, 0.7), (5, 3)])
    def test_equals_the_naive_computation(self, degrees: float, scale: float) -> None:
        image = random_images(1, (1, 9, 12))[0]
        turned = turn(image, torch.tensor([float(degrees)]), torch.tensor([float(scale)]))
        difference = turned[0, 0].double() - self.naive(image[0, 0], degrees, scale)
        assert difference.abs().max() < 2.5  # of 255: the weights have 8 bits

    def test_quarter_turn_is_exact_and_counterclockwise(self) -> None:
        image = random_images(3, (2, 8, 8))[0]
        turned = turn(image, torch.full((3,), 90.0), torch.ones(3))
        assert torch.equal(turned, torch.rot90(image, 1, (2, 3)))
