import pytest

from torchcaps.errors import UserError
from torchcaps.train import RunFolder, TrainOptions, fit, folder


def test_two_processes_do_not_train_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE", 0.1)
    run = RunFolder.create(tmp_path / "run", TrainOptions())
    with run.claimed(), pytest.raises(UserError, match="Another process is training"), run.claimed():
        pass
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    with run.claimed():  # free again
        pass


def test_evaluations_on_the_way_may_use_fewer_images_than_the_last(tmp_path):
    options = TrainOptions(
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
    run = RunFolder(fit(options))
    first, last = (row["evaluation_error"] for row in run.read_metrics())
    assert first * 7 / 100 == pytest.approx(round(first * 7 / 100))
    assert last * 360 / 100 == pytest.approx(round(last * 360 / 100))
    assert not list(run.path.glob("*.png"))
