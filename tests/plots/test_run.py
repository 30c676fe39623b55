import pytest
import torch

from torchcaps import CapsuleNetwork
from torchcaps.data import Batch
from torchcaps.plots import run as plots
from torchcaps.plots.evaluation import compared_curves
from torchcaps.routing.registry import ROUTINGS
from torchcaps.training.evaluation import Evaluation

CLASSES = ("ant", "bee", "cow")


def network_for(routing: str, labels: int = 1) -> CapsuleNetwork:
    return CapsuleNetwork(
        (1, 21, 19), CLASSES, ROUTINGS[routing](), conv_channels=4, primary_capsules=2, labels_per_image=labels
    )


def sample(count: int = 1) -> Batch:
    images = torch.rand(9, 1, 21, 19)
    labels = torch.stack([torch.randperm(3)[:count] for _ in range(9)])
    return Batch(images, labels, images[:, None].expand(-1, count, -1, -1, -1))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("count", [1, 2])
def test_pictures_of_every_routing_can_be_drawn(routing, count, tmp_path):
    network, batch = network_for(routing, count), sample(count)
    plots.reconstructions(network, batch, CLASSES).savefig(tmp_path / "a.png")
    plots.coefficients(network, batch, CLASSES).savefig(tmp_path / "b.png")


def test_the_support_of_all_places_adds_up():
    """The evidence is twice the logarithm of a length, which grows as all inputs do: its shares are 2 in all."""
    network, batch = network_for("l2"), sample()
    maps = plots._support_maps(network, batch)
    for j in range(3):
        expected = 2.0 if (batch.labels[:, 0] == j).any() else 0.0
        assert maps[j].sum() == pytest.approx(expected, rel=1e-4)


def test_curves_and_confusion_can_be_drawn_with_gaps_in_the_metrics(tmp_path):
    rows = [
        {
            "step": float(step),
            "loss": 1 / step,
            "train_error": 10.0,
            "evaluation_error": 5.0 if step == 3 else None,
            "length_right": 0.5,
            "length_wrong": 0.1,
            **{f"coefficient_{name}": None for name in ("mean", "std", "min", "max")},
        }
        for step in (1, 2, 3)
    ]
    plots.curves(rows).savefig(tmp_path / "curves.png")
    counts = torch.tensor([[3.0, 1, 0], [0, 3, 0], [1, 0, 2]])
    evaluation = Evaluation(10, 2, counts, counts.sum(1), counts.sum(0), 1.0)
    plots.confusion(evaluation, CLASSES).savefig(tmp_path / "confusion.png")


def test_every_run_of_a_comparison_is_in_the_legend():
    def rows(error):
        return [{"step": step, "seconds": step, "loss": 0.5, "evaluation_error": error} for step in (1.0, 2.0)]

    figure = compared_curves({"one": rows(5.0), "stopped early": rows(None), "_three": rows(7.0)})
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["one", "stopped early", "\u200b_three"]
    colours = [[line.get_color() for line in axes.lines] for axes in figure.axes]
    assert all(column == colours[0] for column in colours)


def test_pictures_say_how_many_of_the_classes_they_show(monkeypatch):
    monkeypatch.setattr(plots, "MOST_IMAGES", 2)
    batch = sample()
    figure = plots.reconstructions(network_for("l2"), batch._replace(labels=torch.arange(9)[:, None] % 3), CLASSES)
    assert figure.get_suptitle() == "the first 2 of 3 classes"
    monkeypatch.setattr(plots, "MOST_IMAGES", 3)
    pairs = torch.tensor([[0, 1], [1, 2], [0, 2]]).repeat(3, 1)  # all classes in two images
    figure = plots.reconstructions(network_for("l2", 2), sample(2)._replace(labels=pairs), CLASSES)
    assert not figure.get_suptitle()


def test_counts_are_told_in_full():
    counts = torch.tensor([1135.0, 980.0, 155.5])
    evaluation = Evaluation(2270, 0, torch.diag(counts), counts, counts, 1.0)
    texts = {text.get_text() for text in plots.confusion(evaluation, CLASSES).axes[0].texts}
    assert {"1135", "980"} <= texts


def test_shares_are_of_the_images_that_show_a_class():
    counts = torch.tensor([[1.0, 0, 0], [0, 4, 0], [0, 0, 4]])  # nine images of the first class were given none
    evaluation = Evaluation(18, 9, counts, torch.tensor([10.0, 4, 4]), torch.tensor([1.0, 4, 4]), 1.0)
    right, _ = plots.confusion(evaluation, CLASSES).axes[0].images
    assert right.get_array().diagonal().tolist() == [10, 100, 100]
