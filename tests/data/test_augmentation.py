import hashlib
import math
from typing import Any

import pytest
import torch
from data_examples import EVERYTHING, augmentation, random_images, same
from torch import Tensor

from torchcaps.data.augmentation import Augmentation, standardised, turn
from torchcaps.data.batches import Batches
from torchcaps.data.config import AugmentationConfig
from torchcaps.data.splits import Batch, ImageSplit, OverlappingDigits, Split
from torchcaps.errors import UserError
from torchcaps.settings import SettingError


def augmented(split: Split, count: int = 60, **options: Any) -> tuple[Batch, Batch]:
    batch = split.fetch(torch.arange(count) % len(split))
    change = augmentation(**options)
    return batch, change(batch, seed=0, epoch=0, positions=torch.arange(count), indices=torch.arange(count))


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
        batch, changed = augmented(split, flip="random")
        flipped = (changed.images == batch.images.flip(3)).flatten(1).all(1)
        same = (changed.images == batch.images).flatten(1).all(1)
        assert (flipped ^ same).all()
        assert 15 < flipped.sum() < 45

    def test_crop(self, split: Split) -> None:
        batch, changed = augmented(split, crop=19)
        assert changed.images.shape[1:] == augmentation(crop=19).image_shape(split.image_shape)
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
        _, changed = augmented(split, shift=3, flip="random", crop=30, cutout=7)
        total = changed.parts.int().sum(1).clamp(max=255).to(torch.uint8)
        assert torch.equal(changed.images, total)

    def test_seed_epoch_and_position_all_matter(self, split: Split) -> None:
        batch = split.fetch(torch.arange(20))

        def change(seed: int, epoch: int, start: int) -> Batch:
            return EVERYTHING(
                batch, seed=seed, epoch=epoch, positions=start + torch.arange(20), indices=torch.arange(20)
            )

        assert same(change(0, 0, 0), change(0, 0, 0))
        for other in ((1, 0, 0), (0, 1, 0), (0, 0, 20)):
            assert not torch.equal(change(0, 0, 0).images, change(*other).images)

    def test_does_not_touch_the_data(self, split: Split) -> None:
        before = split.fetch(torch.arange(20))
        augmented(split, shift=2, flip="random", cutout=9, rotate=10)
        assert same(before, split.fetch(torch.arange(20)))

    @pytest.mark.parametrize(
        "options",
        [
            *({"shift": -1}, {"crop": -3}, {"rotate": -1.0}, {"scale": 1.0}, {"cutout": -1}),
            *({"brightness": 1.5}, {"contrast": -0.1}, {"rotate": math.nan}, {"scale": math.inf}),
            *({"flip": True}, {"flip": "sometimes"}, {"standardise": "yes"}, {"shift": 10**6}),
        ],
    )
    def test_bad_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(SettingError, match=next(iter(options))):
            AugmentationConfig(**options)

    def test_crop_larger_than_the_image(self) -> None:
        with pytest.raises(UserError, match="cannot crop 29 x 29"):
            augmentation(crop=29).image_shape((1, 28, 28))

    def test_alternating_flip_shows_every_image_both_ways(self, split: Split) -> None:
        batch, positions = split.fetch(torch.arange(40)), torch.arange(40)
        change = augmentation(flip="alternate")

        def seen(epoch: int, positions: Tensor) -> Tensor:
            changed = change(batch, seed=1, epoch=epoch, positions=positions, indices=torch.arange(40))
            mirrored = (changed.images == batch.images.flip(3)).flatten(1).all(1)
            assert (mirrored ^ (changed.images == batch.images).flatten(1).all(1)).all()
            return mirrored

        first, second, third = (seen(epoch, positions) for epoch in range(3))
        assert (first ^ second).all()
        assert torch.equal(first, third)
        assert 8 < first.sum() < 32
        assert torch.equal(first, seen(0, positions.flip(0)))  # the image decides, not its place in the order

    def test_brightness_and_contrast_are_linear_in_each_image(self) -> None:
        pixels = torch.arange(100, 150).to(torch.uint8).view(1, 1, 5, 10).repeat(60, 1, 1, 1)
        batch, changed = augmented(ImageSplit(pixels, torch.zeros(60).long()), brightness=0.2)
        added = changed.images.int() - batch.images.int()
        assert (added == added[:, :, :1, :1]).all()
        assert added.min() < -40
        assert added.max() > 40
        assert added.abs().max() <= 51
        batch, changed = augmented(ImageSplit(pixels, torch.zeros(60).long()), contrast=0.8)
        slopes = (changed.images[..., -1, -1].double() - changed.images[..., 0, 0].double()) / 49
        assert slopes.min() < 0.35
        assert slopes.max() > 1.65
        assert (changed.images.double().mean((1, 2, 3)) - 124.5).abs().max() < 0.6

    def test_standardised_images(self, split: Split) -> None:
        batch, changed = augmented(split, standardise=True, shift=1)
        flat = changed.images.double().flatten(1)
        assert changed.images.dtype == torch.float32
        assert flat.mean(1).abs().max() < 1e-6
        assert (flat.std(1, correction=0) - 1).abs().max() < 1e-6
        assert changed.parts.dtype == torch.uint8  # what a decoder draws stays in [0, 1]
        moved = changed.on("cpu")
        assert torch.equal(moved.images, changed.images)
        assert moved.parts.max() <= 1
        whole = augmentation(standardise=True).centre(batch)
        alone = augmentation(standardise=True).centre(Batch(*(part[:1] for part in batch)))
        assert torch.equal(whole.images[:1], alone.images)

    def test_one_colour_is_standardised_to_zero(self) -> None:
        assert (standardised(torch.full((2, 3, 4, 4), 200, dtype=torch.uint8)) == 0).all()


class TestViews:
    def test_mirrored_and_moved(self, split: Split) -> None:
        batch = split.fetch(torch.arange(4))
        plain, mirrored, up, down, left, right = Augmentation().views(batch, ("flip", "shift"))
        assert same(plain, batch)
        assert torch.equal(mirrored.images, batch.images.flip(3))
        assert torch.equal(mirrored.parts, batch.parts.flip(4))
        for moved, axis, amount in ((up, 2, -1), (down, 2, 1), (left, 3, -1), (right, 3, 1)):
            expected = batch.images.roll(amount, axis)
            expected.select(axis, 0 if amount == 1 else -1).zero_()
            assert torch.equal(moved.images, expected)

    def test_of_a_crop_move_the_window(self, split: Split) -> None:
        batch = split.fetch(torch.arange(4))
        plain, up, *_ = augmentation(crop=12).views(batch, ["shift"])
        assert same(plain, augmentation(crop=12).centre(batch))
        top, left = (batch.images.shape[2] - 12) // 2, (batch.images.shape[3] - 12) // 2
        assert torch.equal(up.images, batch.images[..., top + 1 : top + 13, left : left + 12])

    def test_are_standardised_like_the_rest(self, split: Split) -> None:
        for view in augmentation(standardise=True).views(split.fetch(torch.arange(4)), ("flip", "shift")):
            assert view.images.double().flatten(1).mean(1).abs().max() < 1e-6

    def test_unknown(self, split: Split) -> None:
        with pytest.raises(SettingError, match="flip, shift"):
            next(Augmentation().views(split.fetch(torch.arange(4)), ("rotate",)))


def test_results_are_those_of_every_version_before() -> None:
    """Runs are resumed and compared across versions: the same settings give the same bytes for ever."""
    pixels = (torch.arange(40 * 3 * 20 * 32) * 7919 % 251).to(torch.uint8).view(40, 3, 20, 32)
    split = ImageSplit(pixels, torch.arange(40) % 10)
    change = augmentation(shift=2, flip="random", crop=16, cutout=5, rotate=15, scale=0.1)
    batch = Batches(split, batch_size=16, seed=5, augmentation=change).at(7)
    assert (
        hashlib.sha256(batch.images.numpy().tobytes()).hexdigest()
        == "518162eb079e1f6254789e815b72df710f1c53adaf08fc979e173490bec0195e"
    )


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
