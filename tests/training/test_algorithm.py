import pytest
import torch
from lightning_fabric import Fabric

from commands import config_of
from torchcaps import CapsuleNetwork, margin_loss
from torchcaps.data import Batch
from torchcaps.functional import presence
from torchcaps.routing.registry import ROUTINGS
from torchcaps.training.algorithm import STATISTICS, AlternatingTrainer


def trainer_for(routing: str = "l2", **settings: object) -> AlternatingTrainer:
    torch.manual_seed(1)
    config = config_of(
        **{"optimizer": "adam", "schedule": "constant", "warmup": 0, "gamma": 0.1, "routing": routing, **settings}
    )
    network = CapsuleNetwork(
        (1, 20, 20),
        3,
        ROUTINGS[routing](),
        conv_channels=4,
        primary_capsules=2,
        weight_std=ROUTINGS[routing].weight_std,
        reconstruction=config.model.reconstruction,
    )
    return AlternatingTrainer(Fabric(accelerator="cpu", devices=1), network, config, total_steps=10)


def some_batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    images = torch.rand(6, 1, 20, 20, generator=generator)
    return Batch(images, torch.tensor([[0], [1], [2], [0], [1], [2]]), images[:, None])


def snapshot(trainer: AlternatingTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.network.state_dict().items()}


COEFFICIENTS = "layers.0.routing.coefficients"


def test_the_weights_descend_the_loss_and_the_coefficients_only_the_objective():
    """Without coefficient steps the coefficients stay; with them, the weights go where they would have gone."""
    frozen, moving = trainer_for(routing_steps=0), trainer_for()
    start = snapshot(frozen)
    for trainer in (frozen, moving):
        trainer.step(some_batch(), 0)
    without, with_steps = snapshot(frozen), snapshot(moving)
    torch.testing.assert_close(without[COEFFICIENTS], start[COEFFICIENTS], rtol=0, atol=0)
    assert not torch.equal(with_steps[COEFFICIENTS], start[COEFFICIENTS])
    for name in start:
        if name != COEFFICIENTS:
            assert not torch.equal(without[name], start[name]), name
            torch.testing.assert_close(with_steps[name], without[name], rtol=0, atol=0)


def test_fused_coefficient_steps_see_the_old_weights_and_strict_ones_the_new():
    batch, start = some_batch(), snapshot(trainer_for())
    moved = {}
    for alternation in ("fused", "strict"):
        trainer = trainer_for(alternation=alternation)
        trainer.step(batch, 0)
        moved[alternation] = snapshot(trainer)

    def expected(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        trainer = trainer_for()
        trainer.network.load_state_dict({**weights, COEFFICIENTS: start[COEFFICIENTS]})
        assert trainer.ascent is not None
        trainer.ascent.step(trainer.network(batch.images).capsules, batch.labels)
        return snapshot(trainer)[COEFFICIENTS]

    torch.testing.assert_close(moved["fused"][COEFFICIENTS], expected(start))
    torch.testing.assert_close(moved["strict"][COEFFICIENTS], expected(moved["strict"]))
    assert not torch.allclose(moved["fused"][COEFFICIENTS], moved["strict"][COEFFICIENTS], rtol=1e-6, atol=0)


@pytest.mark.parametrize("alternation", ["fused", "strict"])
def test_a_backbone_counts_each_batch_once(alternation):
    stem = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 5, 2), torch.nn.BatchNorm2d(4))
    network = CapsuleNetwork((1, 20, 20), 3, backbone=stem, primary_capsules=2, reconstruction=False)
    config = config_of(alternation=alternation, routing_steps=2)
    AlternatingTrainer(Fabric(accelerator="cpu", devices=1), network, config, total_steps=10).step(some_batch(), 0)
    assert int(network.front.stem[1].num_batches_tracked) == 1


@pytest.mark.parametrize("alternation", ["fused", "strict"])
def test_several_steps_of_both_kinds_on_one_batch(alternation):
    once, often = (
        trainer_for(alternation=alternation),
        trainer_for(alternation=alternation, weight_steps=2, routing_steps=3),
    )
    for trainer in (once, often):
        trainer.step(some_batch(), 0)
    steps = next(iter(often.optimiser.optimizer.state.values()))["step"]
    assert steps == 2
    moved = [(snapshot(trainer)[COEFFICIENTS] - 1).abs().mean() for trainer in (once, often)]
    assert moved[1] > 2 * moved[0]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_batch_is_learned_by_heart(routing):
    trainer = trainer_for(routing, learning_rate=3e-3, gamma=1e-3)
    losses = [float(trainer.step(some_batch(), step)[0]) for step in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_statistics_describe_the_batch():
    trainer, batch = trainer_for(reconstruction=False), some_batch()
    lengths = trainer.network(batch.images).capsules.activations.detach()
    shown = presence(batch.labels, 3)
    named = dict(zip(STATISTICS, trainer.step(batch, 0).tolist()))
    assert named["loss"] == pytest.approx(float(margin_loss(lengths, shown)), rel=1e-5)
    assert named["reconstruction_loss"] == 0
    assert named["train_error"] == pytest.approx(100 * float((lengths.argmax(1) != batch.labels[:, 0]).float().mean()))
    assert named["length_right"] == pytest.approx(float(lengths[shown > 0].mean()), rel=1e-5)
    assert named["length_wrong"] == pytest.approx(float(lengths[shown == 0].mean()), rel=1e-5)


def test_the_average_follows_the_weights_and_is_what_is_used():
    trainer = trainer_for(average=0.5)
    start = snapshot(trainer)
    trainer.step(some_batch(), 0)
    now, used = snapshot(trainer), trainer.trained_network().state_dict()
    decay = 1 / 10  # the first step of a young average
    for name in start:
        torch.testing.assert_close(used[name], decay * start[name] + (1 - decay) * now[name])


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_state_is_whole_a_restored_trainer_continues_bit_by_bit(optimizer):
    settings = {"ascent": "adam", "average": 0.9, "optimizer": optimizer}
    original = trainer_for(**settings)
    for step in range(3):
        original.step(some_batch(), step)
    restored = trainer_for(**settings)
    restored.load_tensors({name: tensor.clone() for name, tensor in original.tensors().items()})
    for trainer in (original, restored):
        trainer.step(some_batch(), 3)
    torch.testing.assert_close(restored.tensors(), original.tensors(), rtol=0, atol=0)


def test_no_ascent_without_discriminative_routing():
    assert trainer_for("dynamic").ascent is None
    assert trainer_for("learned").ascent is None
    assert trainer_for("l2").ascent is not None


def test_learned_coefficients_descend_the_loss_and_uniform_ones_stay():
    batch = some_batch()
    learned = trainer_for("learned", reconstruction=False)
    before = snapshot(learned)[COEFFICIENTS]
    loss = margin_loss(learned.network(batch.images).capsules.activations, batch.labels)
    (slope,) = torch.autograd.grad(loss, learned.network.layers[0].routing.coefficients)
    learned.step(batch, 0)
    moved = snapshot(learned)[COEFFICIENTS] - before
    assert (moved[slope != 0].sign() == -slope[slope != 0].sign()).all()  # Adam's first step is against the sign
    uniform = trainer_for("uniform", reconstruction=False)
    uniform.step(batch, 0)
    assert uniform.network.layers[0].routing.coefficients == 1.0


def test_images_that_show_nothing_are_learned_with_class_weights_too():
    trainer = trainer_for(reconstruction=False)
    batch = some_batch()
    batch = batch._replace(labels=torch.full_like(batch.labels, -1))
    output = trainer.network(batch.images)
    plain, _ = trainer._losses(output, batch, 0)
    trainer._class_weights = torch.tensor([1.0, 2.0, 3.0])
    weighted, _ = trainer._losses(output, batch, 0)
    torch.testing.assert_close(weighted, plain)
