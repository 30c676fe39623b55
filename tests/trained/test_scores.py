from functools import partial

import pytest
import torch

from torchcaps import CapsuleNetwork
from torchcaps.data import Augmentation, Batch, ImageSplit
from torchcaps.data.config import AugmentationConfig
from torchcaps.trained.robustness import TRIALS, affine, error_by_strength
from torchcaps.trained.scores import Scores, score

LENGTHS = torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.3, 0.1], [0.2, 0.6, 0.5], [0.1, 0.2, 0.7]])
SHOWN = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]])
SCORES = Scores(("ant", "bee", "cow"), LENGTHS, SHOWN)


def network_of(seed: int) -> CapsuleNetwork:
    torch.manual_seed(seed)
    return CapsuleNetwork((1, 20, 20), 3, conv_channels=4, primary_capsules=2, reconstruction=False, weight_std=0.3)


@pytest.fixture
def split() -> ImageSplit:
    return ImageSplit(torch.randint(256, (23, 1, 20, 20), dtype=torch.uint8), torch.arange(23) % 3)


def test_scores_by_hand():
    assert SCORES.right.tolist() == [True, False, True, True]
    assert SCORES.error_percent == 25
    ant, bee, cow = SCORES.by_class()
    assert (ant.images, ant.precision, ant.recall) == (1, 0.5, 1.0)
    assert (bee.images, bee.precision, bee.recall) == (2, 1.0, 0.5)
    assert (cow.precision, cow.recall, cow.f1) == (1.0, 1.0, 1.0)
    assert bee.f1 == pytest.approx(2 / 3)


def test_the_worst_mistakes_are_the_surest_ones():
    assert SCORES.worst(10) == [1]
    scores = Scores(SCORES.classes, LENGTHS[[1, 1, 0]] * torch.tensor([[0.5], [1.0], [1.0]]), SHOWN[[1, 1, 0]])
    assert scores.worst(10) == [1, 0]


def test_calibration_by_hand():
    parts = SCORES.calibration(bins=2)
    assert [part.images for part in parts] == [2, 2]
    assert [part.length for part in parts] == pytest.approx([0.65, 0.85])
    assert [part.right for part in parts] == [1.0, 0.5]
    assert SCORES.calibration_error(bins=2) == pytest.approx(0.35)


def test_any_number_of_classes_is_decided_by_length():
    scores = Scores(("ant", "bee", "cow"), torch.tensor([[0.9, 0.7, 0.2], [0.1, 0.2, 0.3]]), SHOWN[:2], 0)
    assert scores.found.tolist() == [[1, 1, 0], [0, 0, 0]]


def test_what_is_found_where_nothing_is_shown_is_a_mistake():
    lengths = torch.tensor([[0.9, 0.1], [0.1, 0.2], [0.8, 0.1]])
    scores = Scores(("ant", "bee"), lengths, torch.tensor([[1.0, 0], [0, 0], [0, 0]]), 0)
    assert scores.worst(3) == [2]


def test_of_any_number_of_classes_the_surest_mistake_is_the_worst():
    lengths = torch.tensor([[0.51, 0.05], [0.05, 0.95], [0.02, 0.02]])
    scores = Scores(("ant", "bee"), lengths, torch.tensor([[0.0, 0], [0, 0], [0, 0]]), 0)
    assert scores.worst(3) == [1, 0]


def test_lengths_of_any_number_of_classes_are_calibrated_one_by_one():
    scores = Scores(("ant", "bee"), torch.full((100, 2), 0.02), torch.zeros(100, 2), 0)
    assert scores.calibration_error() == pytest.approx(0.02)


def test_turns_keep_shapes_where_images_are_not_square():
    wide = torch.zeros(8, 1, 60, 180)
    wide[:, :, 24:36, 88:92] = 1.0  # 12 x 4 pixels
    batch = Batch(wide, torch.zeros(8, 1, dtype=torch.long), wide[:, None])
    for turned in affine(network_of(1), batch, torch.arange(len(batch.images)), strength=1.0):
        places = (turned[0] > 0.4).nonzero().double()
        away = places - places.mean(0)
        short, long = torch.linalg.eigvalsh(away.mT @ away / len(places)).sqrt().tolist()
        assert long / short == pytest.approx(3.0, rel=0.25)


def test_predictions_are_written_as_csv(tmp_path):
    SCORES.write_csv(tmp_path / "x.csv")
    header, first, second, *_ = (tmp_path / "x.csv").read_text().splitlines()
    assert header == "image,shown,found,right,length ant,length bee,length cow"
    assert first == "0,ant,ant,1,0.9,0.1,0.2"
    assert second.startswith("1,bee,ant,0,")


def test_some_images_keep_their_numbers(split, tmp_path):
    network = network_of(1).folded()
    everything, some = score([network], split), score([network], split, limit=5)
    assert some.numbers.tolist() == split.sample(5).tolist()
    torch.testing.assert_close(some.lengths, everything.lengths[some.numbers])
    some.write_csv(tmp_path / "x.csv", [f"{number}.png" for number in range(23)])
    names = [line.split(",")[0] for line in (tmp_path / "x.csv").read_text().splitlines()[1:]]
    assert names == [f"{number}.png" for number in some.numbers.tolist()]


def test_an_ensemble_averages_lengths(split):
    networks = [network_of(seed).folded() for seed in (1, 2)]
    alone = [score([network], split) for network in networks]
    together = score(networks, split)
    torch.testing.assert_close(together.lengths, (alone[0].lengths + alone[1].lengths) / 2)


def test_views_average_over_mirrored_and_shifted_images(split):
    network = network_of(1).folded()
    batch = split.fetch(torch.arange(23))
    views = [
        network(view.on("cpu").images).capsules.activations for view in Augmentation().views(batch, ["flip", "shift"])
    ]
    torch.testing.assert_close(score([network], split, views=["flip", "shift"]).lengths, torch.stack(views).mean(0))


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_of_no_strength_changes_nothing(name, standardise, split):
    network = network_of(1)
    network.task = network.task.replace(standardise=standardise)
    augmentation = Augmentation(AugmentationConfig(shift=0, standardise=standardise))
    plain = score([network], split, augmentation=augmentation)
    change = TRIALS[name].change
    changed = score([network], split, augmentation=augmentation, change=partial(change, strength=0.0))
    torch.testing.assert_close(changed.lengths, plain.lengths, rtol=1e-3, atol=1e-4)
    errors = error_by_strength([network], split, name, augmentation=Augmentation(), limit=9)
    assert list(errors) == list(TRIALS[name].strengths)


@pytest.mark.parametrize("name", ["fgsm", "pgd"])
def test_attacks_raise_the_loss_and_stay_within_their_strength(name, split):
    network = network_of(1)
    batch = split.fetch(torch.arange(23)).on("cpu")
    changed = TRIALS[name].change(network, batch, torch.arange(23), strength=0.05)
    assert (changed - batch.images).abs().max() <= 0.05 + 1e-6
    assert changed.min() >= 0
    assert changed.max() <= 1
    with torch.no_grad():
        before, after = (network.loss(network(images).capsules, batch.labels) for images in (batch.images, changed))
    assert after > before


@pytest.mark.parametrize("name", ["fgsm", "pgd"])
def test_a_sure_answer_is_attacked_too(name, split, monkeypatch):
    network = network_of(1)
    monkeypatch.setattr(
        network, "loss", lambda capsules, labels: 0 * capsules.activations.sum()
    )  # as if beyond margins
    batch = split.fetch(torch.arange(23)).on("cpu")
    changed = TRIALS[name].change(network, batch, torch.arange(23), strength=0.05)
    assert (changed != batch.images).flatten(1).any(1).all()
    with torch.no_grad():
        before, after = (
            network(images).capsules.activations.gather(1, batch.labels) for images in (batch.images, changed)
        )
    assert after.mean() < before.mean()


@pytest.mark.parametrize("name", ["affine", "noise"])
def test_what_is_random_hangs_on_the_image_alone(name, split):
    network = network_of(1)
    batch, change = split.fetch(torch.arange(23)).on("cpu"), partial(TRIALS[name].change, strength=0.4)
    together = change(network, batch, torch.arange(23))
    apart = [change(network, split.fetch(numbers).on("cpu"), numbers) for numbers in torch.split(torch.arange(23), 5)]
    torch.testing.assert_close(together, torch.cat(apart))
    alike = batch._replace(images=batch.images[:1].expand(23, -1, -1, -1))
    assert len(torch.unique(change(network, alike, torch.arange(23)), dim=0)) == 23


def test_the_noise_is_gaussian():
    batch = Batch(torch.full((50, 1, 28, 28), 0.5), torch.zeros(50, 1), torch.zeros(50, 1))
    drawn = TRIALS["noise"].change(network_of(1), batch, torch.arange(50), strength=0.1) - 0.5
    assert abs(float(drawn.mean())) < 0.002
    assert float(drawn.std()) == pytest.approx(0.1, rel=0.02)
    assert float((drawn.abs() < 0.1).double().mean()) == pytest.approx(0.683, abs=0.01)


def test_images_are_moved_by_a_fifth_of_their_side_at_most():
    images = torch.zeros(200, 1, 41, 41)
    images[:, :, 20, 20] = 1
    batch = Batch(images, torch.zeros(200, 1), images)
    moved = affine(network_of(1), batch, torch.arange(200), strength=1.0)
    places = torch.arange(41.0) - 20
    masses = moved.sum((1, 2, 3))
    for profile in (moved.sum((1, 2)), moved.sum((1, 3))):
        centre = (profile * places).sum(1) / masses
        assert 7 < float(centre.abs().max()) < 0.2 * 41 + 0.5
