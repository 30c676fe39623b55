from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import config_of
from torchcaps import load
from torchcaps.data.datasets import DataSet
from torchcaps.errors import UserError
from torchcaps.models.config import CapsNetConfig, TaskConfig
from torchcaps.storage import read_tensors
from torchcaps.training import header
from torchcaps.training.config import DEFAULT_WARMUP
from torchcaps.training.defaults import default_epochs
from torchcaps.training.files import read_config
from torchcaps.training.fit import Callback, _Run, fit
from torchcaps.training.folder import RunFolder
from torchcaps.training.host import default_threads, usable_cores
from torchcaps.training.plan import Plan
from torchcaps.training.result import RunResult
from torchcaps.training.watch import REMARKS, Watch

SMALL = {
    "conv_channels": 8,
    "primary_capsules": 4,
    "threads": 1,
    "pictures": False,
    "reconstruction": False,
    "shift": 0,
}


def shapes(images: int, side: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bright squares at the left, in the middle or at the right of noise."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 60, size=(images, side, side), dtype=np.uint8)
    labels = np.arange(images) % 3
    for number, label in enumerate(labels):
        left = 1 + label * (side - 6) // 2
        pixels[number, 6:12, left : left + 5] = 220
    return pixels, labels


def data_of(images: int, *, validation: int = 0) -> DataSet:
    return DataSet.from_arrays(*shapes(images), *shapes(30, seed=1), validation=validation)


@pytest.mark.parametrize(("images", "batch", "least_steps"), [(9, 9, 1112), (60, 16, 625), (300, 16, 625)])
def test_few_images_get_small_batches_and_enough_steps(images, batch, least_steps):
    plan = Plan.of(config_of(**SMALL), data_of(images))
    assert plan.config.run.batch_size == batch
    assert plan.total_steps >= least_steps
    assert plan.config.optimiser.warmup == min(DEFAULT_WARMUP, plan.total_steps // 10)
    assert plan.config.run.keep == "last"


def test_a_batch_of_all_images_counts_as_many():
    assert default_epochs(40, 3, 128) == default_epochs(40, 3, 40) == 250


def test_data_given_in_memory_are_named_as_such(tmp_path):
    path = fit(config_of(out=str(tmp_path / "run"), steps=1, **SMALL), data=data_of(60))
    assert RunResult.read(path / "result.json").data == "arrays"
    assert read_config(path / "config.yaml").data.name == "arrays"


@pytest.mark.parametrize("setting", [{"patience": 2}, {"keep": "best"}])
def test_what_needs_validation_images_says_so(setting):
    with pytest.raises(UserError, match="needs validation images"):
        Plan.of(config_of(**setting, **SMALL), data_of(60))


def test_images_that_are_to_be_held_out_of_given_data_are_refused():
    with pytest.raises(UserError, match="have no validation images"):
        Plan.of(config_of(validation=20, **SMALL), data_of(60))


def test_the_validation_error_of_a_run_that_stops_early_is_of_all_images(tmp_path):
    config = config_of(
        out=str(tmp_path / "run"),
        steps=400,
        evaluate_every=5,
        evaluation_images=7,
        patience=1,
        keep="last",
        learning_rate=0.0,
        matrix_rate=0.0,
        **SMALL,
    )
    result = RunResult.read(RunFolder(fit(config, data=data_of(90, validation=30))).result)
    assert result.steps == 10
    assert result.validation_error_percent * 30 / 100 == pytest.approx(
        round(result.validation_error_percent * 30 / 100)
    )


def test_a_best_state_that_was_never_saved_with_a_checkpoint_is_not_used(tmp_path, monkeypatch):
    """A run is killed after a new best one, and the run that goes on for longer finds that step no better."""
    errors = {2: 20, 4: 10, 6: 5, 8: 4}
    step_now = 0
    train_step, evaluate = _Run._train_step, _Run._evaluate

    def counted(run, step):
        nonlocal step_now
        step_now = step + 1
        if step == 8 and 8 in errors:
            raise KeyboardInterrupt
        train_step(run, step)

    def scripted(run, split, limit=None, network=None):
        outcome = evaluate(run, split, limit, network)
        return replace(outcome, errors=errors.get(step_now, 15)) if split is run.plan.data.validation else outcome

    monkeypatch.setattr(_Run, "_train_step", counted)
    monkeypatch.setattr(_Run, "_evaluate", scripted)
    data, path = data_of(90, validation=30), tmp_path / "run"
    config = config_of(out=str(path), steps=10, evaluate_every=2, checkpoint_every=5, keep="best", **SMALL)
    with pytest.raises(KeyboardInterrupt):
        fit(config, data=data)
    tensors, _ = read_tensors(RunFolder(path).checkpoints.paths()[-1])
    best = {name.removeprefix("best."): tensor for name, tensor in tensors.items() if name.startswith("best.")}
    del errors[6], errors[8]
    stored = read_config(path / "config.yaml")
    RunFolder(path).extend(stored.replace(run=stored.run.replace(steps=12)))
    fit(read_config(path / "config.yaml"), data=data, resume=path)
    assert RunResult.read(path / "result.json").validation_error_percent == pytest.approx(100 * 10 / 30)
    torch.testing.assert_close(load(path).state_dict(), best, rtol=0, atol=0)


def test_what_is_chosen_is_kept():
    plan = Plan.of(config_of(batch_size=5, steps=7, warmup=3, **SMALL), data_of(60))
    assert (plan.config.run.batch_size, plan.total_steps, plan.config.optimiser.warmup) == (5, 7, 3)


def test_a_handful_of_pictures_is_learned_at_the_first_try(tmp_path):
    path = fit(config_of(out=str(tmp_path / "run"), **SMALL), data=data_of(60))
    assert RunResult.read(RunFolder(path).result).test_error_percent < 10
    assert RunFolder(path).config().run.batch_size == 16  # the resolved values are written


def test_the_best_state_on_the_validation_images_is_used(tmp_path):
    data = data_of(90, validation=30)
    seen: dict[int, float] = {}

    class Note(Callback):
        def on_row(self, row):
            if row["evaluation_error"] is not None:
                seen[row["step"]] = row["evaluation_error"]

    # The rate rises until the run ends in ruins: the best state is an early one.
    config = config_of(
        out=str(tmp_path / "run"),
        steps=40,
        evaluate_every=4,
        optimizer="sgd",
        learning_rate=2.0,
        warmup=20,
        routing="uniform",
        **SMALL,
    )
    path = fit(config, data=data, callbacks=[Note()])
    result = RunResult.read(RunFolder(path).result)
    assert result.validation_error_percent == min(seen.values())
    predicted = load(path).predict(data.validation.fetch(torch.arange(30)).on("cpu").images).labels
    wrong = (predicted != data.validation.fetch(torch.arange(30)).labels).double().mean()
    assert 100 * float(wrong) == pytest.approx(min(seen.values()))


def test_patience_stops_a_run_that_gets_no_better(tmp_path, monkeypatch):
    config = config_of(
        out=str(tmp_path / "run"), steps=400, evaluate_every=5, patience=2, learning_rate=0.0, matrix_rate=0.0, **SMALL
    )
    with monkeypatch.context() as patch:  # killed just before the end
        patch.setattr(RunResult, "write", lambda *arguments: exit())
        with pytest.raises(SystemExit):
            fit(config, data=data_of(90, validation=30))
    path = tmp_path / "run"
    fit(read_config(path / "config.yaml"), data=data_of(90, validation=30), resume=path)
    assert RunResult.read(RunFolder(path).result).steps == 15


def test_a_run_can_start_from_another_with_other_classes(tmp_path):
    first = fit(config_of(out=str(tmp_path / "a"), steps=3, **SMALL), data=data_of(60))
    images, labels = shapes(60)
    other = DataSet.from_arrays(images, labels % 2, images[:9], labels[:9] % 2)
    second = fit(
        config_of(
            out=str(tmp_path / "b"), steps=1, matrix_rate=0.0, learning_rate=0.0, **{"from": str(first)}, **SMALL
        ),
        data=other,
    )
    torch.testing.assert_close(load(second).front.first.weight, load(first).front.first.weight)
    assert len(load(second).classes) == 2


def test_a_run_that_does_not_learn_is_told():
    watch = Watch()
    rows = [
        {"loss": loss, "train_error": 50.0, "length_right": 0.95, "length_wrong": 0.95}
        for loss in (0.5, 0.9, 0.9, 0.9, 0.9)
    ]
    said = [remark for row in rows for remark in watch.remarks(row)]
    assert sorted(said) == sorted([REMARKS["rise"], REMARKS["saturated"]])


def test_a_loss_that_grows_by_itself_is_no_trouble():
    watch = Watch()
    rows = [
        {"loss": 0.5 + step, "train_error": 70.0 - step, "length_right": 0.5, "length_wrong": 0.1} for step in range(9)
    ]
    assert not [remark for row in rows for remark in watch.remarks(row)]


def test_more_memory_than_there_is_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(header, "available_memory", lambda: 10**6)
    plan = Plan.of(config_of(**SMALL), data_of(60))
    with pytest.raises(UserError, match="--batch-size"):
        header.check_memory(plan, plan.build_network())


def test_the_header_says_what_was_chosen():
    plan = Plan.of(config_of(**SMALL), data_of(60))
    text = "\n".join(line for _, line in header.header_rows(plan, plan.build_network(), Path("runs/x")))
    for words in (
        "3 classes",
        "60 train",
        "l2 routing, paper stem",
        "steps of 16 images (",
        "epochs), muon",
        "not at all",
        "GB",
        "runs/x",
    ):
        assert words in text


def test_uneven_classes_are_shown_equally_often_and_it_is_said():
    images, labels = shapes(60)
    few = np.flatnonzero((labels != 2) | (np.arange(60) < 6))
    data = DataSet.from_arrays(images[few], labels[few], *shapes(30, seed=1))
    plan = Plan.of(config_of(**SMALL), data)
    assert plan.config.data.sampling == "balanced"
    rows = header.header_rows(plan, plan.build_network(), Path("runs/x"))
    assert ("", "every class equally often") in rows
    assert Plan.of(config_of(sampling="even", **SMALL), data).config.data.sampling == "even"
    assert Plan.of(config_of(class_weights="balanced", **SMALL), data).config.data.sampling == "even"


def test_a_class_that_is_never_found_is_named(tmp_path, capsys):
    config = config_of(out=str(tmp_path / "run"), steps=2, learning_rate=0.0, matrix_rate=0.0, gamma=0.0, **SMALL)
    images, labels = shapes(60)
    fit(config, data=DataSet.from_arrays(images, labels, images[:1], labels[:1], classes=["a", "b", ":one:"]))
    said = capsys.readouterr().out
    assert "No test image was taken for" in said
    assert ":one:" in said  # which is no emoji


def test_batches_that_show_no_class_are_no_trouble(tmp_path):
    images, _ = shapes(16)
    nothing = np.zeros((16, 2), dtype=bool)
    nothing[0] = True
    data = DataSet.from_arrays(images, nothing, images, nothing)
    path = fit(config_of(out=str(tmp_path / "run"), steps=4, batch_size=4, **SMALL), data=data)
    assert np.isfinite(RunResult.read(RunFolder(path).result).test_error_percent)


@pytest.mark.parametrize(("asked", "threads"), [("1", 1), ("1,2", 1), ("9999", None), ("", None), ("many", None)])
def test_the_usual_variable_says_how_many_threads(monkeypatch, asked, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert default_threads() == (threads or usable_cores())


def test_a_start_that_does_not_fit_leaves_nothing_behind(tmp_path):
    first = fit(config_of(out=str(tmp_path / "a"), steps=1, **SMALL), data=data_of(60))
    larger = {**SMALL, "conv_channels": 6, "primary_capsules": 3, "primary_size": 5}
    with pytest.raises(UserError, match="images of 1x20x20, and this is a capsnet"):
        fit(config_of(out=str(tmp_path / "b"), steps=1, **{"from": str(first)}, **larger), data=data_of(60))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("shape", "classes", "stem", "decoder"),
    [
        ((1, 28, 28), 10, "paper", True),
        ((1, 28, 28), 100, "paper", True),
        ((1, 40, 40), 10, "paper", True),
        ((1, 40, 40), 100, "small", True),
        ((3, 64, 64), 10, "small", True),
        ((3, 96, 96), 10, "small", False),
    ],
)
def test_the_front_and_the_decoder_follow_the_images_and_the_classes(shape, classes, stem, decoder):
    task = TaskConfig(image_shape=shape, classes=tuple(map(str, range(classes))))
    config = CapsNetConfig().resolved(task)
    assert (config.stem, config.reconstruction) == (stem, decoder)
    assert CapsNetConfig(reconstruction=not decoder).resolved(task).reconstruction is not decoder


def test_a_state_chosen_by_some_images_is_judged_by_all(tmp_path):
    data = data_of(90, validation=30)
    path = fit(config_of(out=str(tmp_path / "run"), steps=6, evaluate_every=2, evaluation_images=4, **SMALL), data=data)
    held_out = data.validation.fetch(torch.arange(30))
    wrong = (load(path).predict(held_out.on("cpu").images).labels != held_out.labels).double().mean()
    assert RunResult.read(RunFolder(path).result).validation_error_percent == pytest.approx(100 * float(wrong))


def test_labels_in_a_column_are_labels():
    images, labels = shapes(30)
    data = DataSet.from_arrays(images, labels[:, None], images, labels[:, None])
    assert data.classes == ("0", "1", "2")
    assert data.train.labels_per_image == 1


def test_a_run_is_not_resumed_with_other_images(tmp_path):
    """Its checkpoints stay as they are, for when the images are there again."""
    config = config_of(out=str(tmp_path / "run"), steps=4, checkpoint_every=2, **SMALL)
    path = fit(config, data=data_of(60))
    (path / "result.json").unlink()
    (path / "checkpoints" / "step-000000004.safetensors").unlink()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    images, labels = shapes(60, side=22)
    others = [
        data_of(63),
        DataSet.from_arrays(images, labels, images, labels),
        DataSet.from_arrays(*shapes(60), *shapes(30, seed=1), classes=("left", "middle", "right")),
    ]
    for data in others:
        with pytest.raises(
            UserError, match=r"images are not those that this run was made with: they were .*, and are "
        ):
            fit(read_config(path / "config.yaml"), data=data, resume=path)
        assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    fit(read_config(path / "config.yaml"), data=data_of(60), resume=path)
    assert RunResult.read(path / "result.json").steps == 4
