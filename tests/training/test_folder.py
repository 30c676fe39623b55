import pytest

from commands import config_of
from torchcaps.errors import UserError
from torchcaps.training import folder
from torchcaps.training.config import TrainingConfig
from torchcaps.training.fit import fit
from torchcaps.training.folder import COLUMNS, RunFolder


def test_two_processes_do_not_train_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE", 0.1)
    run = RunFolder.create(tmp_path / "run", TrainingConfig())
    with run.claimed(), pytest.raises(UserError, match="Another process is training"), run.claimed():
        pass
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    with run.claimed():  # free again
        pass


def test_a_run_is_not_made_shorter_than_its_newest_checkpoint(tmp_path):
    run = RunFolder.create(tmp_path / "run", config_of(steps=20))
    run.append_metrics({"step": 10, "epoch": 1.0})
    for step in (12, 13):  # of which a signal made the last, after the last row
        run.checkpoints.save(step, {}, {"settings": {}})
    for shorter in ({"steps": 12}, {"epochs": 1}):
        with pytest.raises(UserError, match="already"):
            run.extend(config_of(**shorter))
    assert run.checkpoints.steps() == [12, 13]
    run.extend(config_of(steps=30))
    assert run.checkpoints.steps() == [13]


def test_evaluations_on_the_way_may_use_fewer_images_than_the_last(tmp_path):
    config = config_of(
        steps=4,
        evaluate_every=2,
        evaluation_images=7,
        conv_channels=8,
        primary_capsules=2,
        batch_size=8,
        threads=1,
        pictures=False,
        out=str(tmp_path / "run"),
    )
    run = RunFolder(fit(config))
    first, last = (row["evaluation_error"] for row in run.read_metrics())
    assert first * 7 / 100 == pytest.approx(round(first * 7 / 100))
    assert last * 360 / 100 == pytest.approx(round(last * 360 / 100))
    assert not list(run.path.glob("*.png"))


@pytest.mark.parametrize(
    "damage",
    [
        b"40,1.0,2.",
        b"40," + b"\0" * 30 + b"\n",
        b"40,\xff\xfe,1\n",
        b"nan" + b"," * (len(COLUMNS) - 1) + b"\n",
        b"\n\n",
    ],
)
def test_damaged_rows_of_the_metrics_are_dropped(tmp_path, damage):
    run = RunFolder.create(tmp_path / "run", TrainingConfig())
    for step in (10, 20, 30):
        run.append_metrics({"step": step, "loss": 0.5})
    run.metrics.write_bytes(run.metrics.read_bytes() + damage)
    run.forget_metrics_after(20)
    assert [row["step"] for row in run.read_metrics()] == [10, 20]
    run.append_metrics({"step": 30, "loss": 0.25})
    assert [row["loss"] for row in run.read_metrics()] == [0.5, 0.5, 0.25]
