"""The command line as a user meets it: what it prints, what it refuses, and what it leaves alone."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import torchcaps
from commands import TINY_FLAGS
from torchcaps.cli.main import COMMANDS, main
from torchcaps.data import load as load_data
from torchcaps.training.folder import RunFolder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained network, not a good one."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", *TINY_FLAGS, "--steps", "120", "--no-reconstruction", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of odd images: two classes, several sizes, modes and formats."""
    folder = tmp_path / "pictures"
    random = np.random.default_rng(0)
    for name, mode, ending in [("cat", "RGB", "png"), ("dog", "L", "jpg"), ("emu", "RGBA", "png")]:
        (folder / name).mkdir(parents=True)
        for number in range(8):
            side = 20 + 7 * number
            pixels = random.integers(256, size=(side, side + 3, 4), dtype=np.uint8)
            Image.fromarray(pixels, "RGBA").convert(mode).save(folder / name / f"{number}.{ending}")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The message of a command that must end with exit code 2."""
    capsys.readouterr()
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert COMMANDS[command][1:] in " ".join(capsys.readouterr().out.split())


def test_the_help_of_train_is_grouped_and_complete(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for heading in ("data:", "augmentation:", "network:", "routing:", "optimiser:", "discriminative routing:", "run:"):
        assert heading in text
    for option in ("--gamma", "--no-reconstruction", "--resume", "--recipe", "--devices", "--threads"):
        assert option in text


def test_evaluate_repeats_the_result_of_training(run_folder, capsys):
    expected = json.loads((run_folder / "result.json").read_text())["test_error_percent"]
    capsys.readouterr()
    assert main(["evaluate", str(run_folder), "--json", "--threads", "1"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["error_percent"] == pytest.approx(expected)
    assert outcome["images"] == 360
    assert np.sum(outcome["confusion"]) == 360
    assert main(["evaluate", str(run_folder), "--limit", "50", "--threads", "1"]) == 0
    assert "of 50 images wrong" in capsys.readouterr().out


def test_predict_names_the_classes_of_image_files(run_folder, tmp_path, capsys):
    test = load_data("digits").test
    batch = test.fetch(torch.arange(40))
    paths = []
    for number, image in enumerate(batch.images[:, 0].numpy()):
        path = tmp_path / f"{number}.png"
        Image.fromarray(image).convert("RGB").resize((56, 56)).save(path)  # another size and mode than trained on
        paths.append(str(path))
    capsys.readouterr()
    assert main(["predict", str(run_folder), *paths, "--json", "--threads", "1"]) == 0
    predictions = json.loads(capsys.readouterr().out)
    found = [int(prediction["found"][0]) for prediction in predictions]
    right = np.mean(np.array(found) == batch.labels[:, 0].numpy())
    error = json.loads((run_folder / "result.json").read_text())["test_error_percent"]
    assert right > 0.9 - error / 100
    assert set(predictions[0]["lengths"]) == set("0123456789")
    assert main(["predict", str(run_folder), paths[0], "--threads", "1"]) == 0
    assert paths[0] in capsys.readouterr().out


def test_a_folder_of_odd_images_is_trained_on_and_predicted(pictures, tmp_path, capsys):
    out = str(tmp_path / "run")
    flags = ["--steps", "3", "--batch-size", "6", "--conv-channels", "8", "--primary-capsules", "2", "--threads", "1"]
    assert main(["train", "--data", f"folder:{pictures}", "--image-size", "24", *flags, "--out", out]) == 0
    capsys.readouterr()
    assert main(["predict", out, str(pictures / "cat" / "0.png"), str(pictures / "dog" / "7.jpg"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)[0]["lengths"]) == {"cat", "dog", "emu"}
    assert main(["evaluate", out, "--threads", "1"]) == 0


@pytest.mark.parametrize("model", ["matrix", "cnn"])
def test_other_models_are_trained_evaluated_and_drawn(model, tmp_path, capsys):
    out = str(tmp_path / "run")
    sizes = {"matrix": ["--matrix-sizes", "8,2,2,2"], "cnn": ["--conv-channels", "8", "--second-channels", "32"]}[model]
    flags = [*sizes, "--batch-size", "32", "--threads", "1", "--model", model, "--steps", "2", "--out", out]
    assert main(["train", *flags]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["model"] == model
    assert main(["evaluate", out, "--limit", "20", "--threads", "1"]) == 0


def test_iterations_reach_the_matrix_network_and_other_settings_of_a_routing_are_refused(tmp_path, capsys):
    flags = ["--matrix-sizes", "4,2,2,2", "--batch-size", "8", "--threads", "1", "--steps", "1", "--test-images", "8"]
    assert main(["train", "--model", "matrix", *flags, "--iterations", "2", "--out", str(tmp_path / "run")]) == 0
    network = torchcaps.load(tmp_path / "run")
    assert {module.iterations for module in network.modules() if isinstance(module, torchcaps.EMRouting)} == {2}
    assert "take away strength" in refused(capsys, "train", "--model", "matrix", "--strength", "0.1")
    assert "take away dynamic" in refused(capsys, "train", "--model", "cnn", "--routing", "dynamic")
    assert "take away iterations" in refused(capsys, "train", "--model", "cnn", "--iterations", "2")


def test_prune_makes_a_smaller_network_with_the_same_answers(run_folder, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    network = torchcaps.load(copy)
    coefficients = network.layers[0].routing.coefficients.data.view(*network.map_shape, -1)
    coefficients[:, :, 1] = 0  # a type of capsule that no class uses
    network.save(copy / "model.safetensors")
    assert main(["prune", str(copy), "--threads", "1"]) == 0
    report = json.loads((tmp_path / "run-pruned" / "pruning.json").read_text())
    assert report["types_removed"] == 1
    assert report["answers_changed"] == 0
    assert report["after"]["test_error_percent"] == report["before"]["test_error_percent"]
    assert report["after"]["parameters"] < report["before"]["parameters"]
    assert main(["evaluate", str(tmp_path / "run-pruned"), "--threads", "1"]) == 0
    assert "already has a run" in refused(capsys, "prune", copy)
    assert "pruned network" in refused(capsys, "train", "--resume", tmp_path / "run-pruned")


def test_data_list_names_every_data_set(capsys):
    assert main(["data", "list"]) == 0
    text = capsys.readouterr().out
    for name in ("digits", "mnist", "fashion-mnist", "cifar-10", "multi-mnist", "folder"):
        assert name in text


def test_info_tells_versions(capsys):
    assert main(["info"]) == 0
    assert torchcaps.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "mnits"], "did you mean 'mnist'"),
        (["--routing", "l3"], "none of torchcaps' own (l2, l1, dynamic, uniform"),
        (["--data", "folder:nowhere"], "nowhere"),
        (["--crop", "16"], "smallest size is 17x17"),
        (["--crop", "40"], "crop"),
        (["--epochs", "1", "--steps", "1"], "cannot both be given"),
        (["--schedule", "zigzag"], "invalid choice"),
        (["--steps", "many"], "invalid int value"),
        (["--recipe", "nothing"], "There is no recipe"),
        (["--resume", "nowhere"], "There is no run folder"),
        (["--validation", "5000"], "5000"),
        (["--accelerator", "abacus"], "abacus"),
    ],
)
def test_bad_options_are_refused_and_nothing_is_written(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "train", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_keeps_its_options(run_folder, capsys):
    assert "keeps its settings" in refused(capsys, "train", "--resume", run_folder, "--seed", "3")


def test_a_runs_routing_is_not_changed_afterwards(run_folder, capsys):
    assert "leave out --routing" in refused(capsys, "train", "--resume", run_folder, "--routing", "dynamic")
    assert "A run knows its routing" in refused(capsys, "evaluate", run_folder, "--routing", "dynamic")


def test_a_run_among_the_images_is_refused(tmp_path, capsys, monkeypatch):
    """The next one would take its pictures for a class."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("L", (20, 20), 50 * number).save(tmp_path / name / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    assert "would be taken for images of folder:." in refused(capsys, "train", "--data", "folder:.", *TINY_FLAGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat", "dog"]


def test_a_run_that_is_not_finished_says_how_to_finish_it(run_folder, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    shutil.copy(run_folder / "config.yaml", tmp_path / "run")
    assert f"--resume {tmp_path / 'run'}" in refused(capsys, "evaluate", tmp_path / "run")


def test_a_run_that_is_made_longer_says_how_to_finish_it(run_folder, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    folder = RunFolder.open(run)
    config = folder.config()
    folder.extend(config.replace(run=config.run.replace(steps=200, epochs=None)))
    assert f"To finish that: torchcaps train --resume {run}" in refused(capsys, "evaluate", run)


def test_a_finished_run_is_not_made_shorter(run_folder, capsys):
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    assert "has taken 120 steps already" in refused(capsys, "train", "--resume", run_folder, "--steps", "60")
    assert "epochs already" in refused(capsys, "train", "--resume", run_folder, "--epochs", "1")
    assert {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()} == before


def test_a_run_that_kept_its_best_state_is_made_longer(tmp_path, capsys):
    run = tmp_path / "run"
    flags = [*TINY_FLAGS, "--no-reconstruction", "--validation", "100", "--evaluate-every", "1", "--keep", "best"]
    flags += ["--optimizer", "adam", "--learning-rate", "1e-12", "--gamma", "0"]
    assert main(["train", *flags, "--steps", "3", "--out", str(run)]) == 0
    assert main(["train", "--resume", str(run), "--steps", "5"]) == 0
    assert json.loads((run / "result.json").read_text())["steps"] == 5


@pytest.mark.parametrize("flags", [[], ["--patience", "1", "--keep", "last"]], ids=["best", "patience"])
def test_a_run_with_validation_images_is_evaluated_pruned_and_exported(flags, tmp_path, capsys):
    run = tmp_path / "run"
    flags = [*TINY_FLAGS, "--no-reconstruction", "--validation", "100", "--steps", "2", *flags]
    assert main(["train", *flags, "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    error = json.loads(capsys.readouterr().out)["error_percent"]
    assert error == pytest.approx(json.loads((run / "result.json").read_text())["test_error_percent"])
    assert main(["prune", str(run)]) == 0
    assert main(["export", str(run), "--to", "safetensors"]) == 0
    assert "test images" in capsys.readouterr().out


def test_a_run_on_arrays_is_evaluated_and_exported(tmp_path, capsys):
    random = np.random.default_rng(0)
    images, labels = random.integers(256, size=(60, 20, 20), dtype=np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, x_test=images[:30], y_test=labels[:30])
    run = tmp_path / "run"
    flags = [*TINY_FLAGS, "--no-reconstruction", "--steps", "2"]
    assert main(["train", *flags, "--data", f"npz:{tmp_path / 'a.npz'}", "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", "--limit", "12", "--out", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 12
    assert main(["export", str(run), "--to", "safetensors"]) == 0
    assert "test images" in (run / "export" / "README.md").read_text()
    assert str(tmp_path) not in (run / "export" / "README.md").read_text()
    assert "model.safetensors" in refused(capsys, "export", run, "--to", "safetensors", "--out", tmp_path / "model.bin")
    assert not (tmp_path / "model.bin").exists()


def test_a_card_describes_the_file_beside_it_only(run_folder, tmp_path):
    (tmp_path / "other.onnx").symlink_to(tmp_path / "nowhere")
    (tmp_path / "another.safetensors").write_bytes(b"?")
    assert main(["export", str(run_folder), "--to", "safetensors", "--out", str(tmp_path / "mine.safetensors")]) == 0
    card = (tmp_path / "README.md").read_text()
    assert "mine.safetensors" in card
    assert "another.safetensors" not in card


def test_the_card_keeps_what_it_said_of_another_export(run_folder, capsys):
    assert main(["export", str(run_folder), "--to", "safetensors", "--precision", "int8"]) == 0
    assert main(["export", str(run_folder), "--to", "safetensors"]) == 0
    card = (run_folder / "export" / "README.md").read_text()
    assert "weights in int8" in card
    assert "weights in float32" in card
    assert main(["export", str(run_folder), "--to", "safetensors", "--out", str(run_folder / ".x.safetensors")]) == 0
    assert "leave out --views" in refused(capsys, "evaluate", run_folder, "--views", "shift", "--noise")


def test_a_comparison_is_whole_in_a_pipe(run_folder, tmp_path, monkeypatch, capsys):
    long = tmp_path / ("long-" * 15)
    shutil.copytree(run_folder, long)
    monkeypatch.chdir(long)
    assert main(["compare", ".", str(run_folder)]) == 0
    table = capsys.readouterr().out
    assert long.name in table
    assert table.count(" % ") >= 2
    assert "…" not in table


def test_an_ensemble_of_networks_for_other_images_is_refused(run_folder, tmp_path, capsys):
    other = tmp_path / "other"
    flags = [*TINY_FLAGS, "--no-reconstruction", "--steps", "1", "--standardise"]
    assert main(["train", *flags, "--out", str(other)]) == 0
    assert "same standardise" in refused(capsys, "evaluate", run_folder, other)
    assert "one network" in refused(capsys, "evaluate", run_folder, run_folder, "--attack", "fgsm")


def test_an_output_folder_with_a_run_is_left_alone(run_folder, capsys):
    before = {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")}
    assert "already has a run" in refused(capsys, "train", *TINY_FLAGS, "--out", run_folder)
    assert {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")} == before


def test_an_output_folder_with_other_files_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "not empty" in refused(capsys, "train", *TINY_FLAGS, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert "is a file" in refused(capsys, "train", *TINY_FLAGS, "--out", tmp_path / "thesis.txt")


def test_bad_folders_of_images_are_refused(pictures, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, "train", "--data", f"folder:{tmp_path / 'empty'}")
    (pictures / "cat" / "0.png").write_text("not a picture")
    assert "0.png" in refused(capsys, "train", "--data", f"folder:{pictures}")
    (pictures / "cat" / "0.png").unlink()
    (pictures / "fox").mkdir()
    assert "fox" in refused(capsys, "train", "--data", f"folder:{pictures}")


def test_what_is_not_an_image_cannot_be_predicted(run_folder, tmp_path, capsys):
    (tmp_path / "note.png").write_text("not a picture")
    assert "note.png" in refused(capsys, "predict", run_folder, tmp_path / "note.png")
    assert "missing.png" in refused(capsys, "predict", run_folder, tmp_path / "missing.png")
    assert "missing[1].png" in refused(capsys, "predict", run_folder, tmp_path / "missing[1].png")
    assert "aaa" in refused(capsys, "predict", run_folder, tmp_path / ("a" * 300))
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, "predict", run_folder, tmp_path / "empty")


def test_a_run_folder_with_missing_or_damaged_files_is_told_which(run_folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run_folder, copy)
    (copy / "model.safetensors").write_bytes(b"rubbish")
    assert "model.safetensors is damaged" in refused(capsys, "evaluate", copy)
    (copy / "model.safetensors").unlink()
    assert "model.safetensors" in refused(capsys, "evaluate", copy)
    (copy / "config.yaml").unlink()
    assert "config.yaml" in refused(capsys, "predict", copy, "x.png")
    assert "config.yaml" in refused(capsys, "train", "--resume", copy)


def test_evaluating_on_other_data_needs_the_same_shape_and_classes(run_folder, pictures, capsys):
    message = refused(capsys, "evaluate", run_folder, "--data", f"folder:{pictures}")
    assert "10 classes" in message


def test_unknown_data_cannot_be_fetched_or_verified(capsys):
    assert "mnits" in refused(capsys, "data", "fetch", "mnits")
    assert "mnits" in refused(capsys, "data", "verify", "mnits")


def test_missing_files_fail_verification(tmp_path, capsys):
    message = refused(capsys, "data", "verify", "mnist", "--data-dir", tmp_path)
    assert "torchcaps data fetch mnist" in message


def test_an_image_on_standard_input_is_no_list_of_files(run_folder, monkeypatch, capsys):
    picture = io.BytesIO()
    Image.new("L", (28, 28)).save(picture, "PNG")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(picture.getvalue())))
    assert "list of image files" in refused(capsys, "predict", run_folder, "-")


def test_arrays_can_be_checked(tmp_path, capsys):
    pixels = np.zeros((8, 20, 20), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=[0, 1] * 4, x_test=pixels, y_test=[0, 1] * 4)
    assert main(["data", "check", f"npz:{tmp_path / 'a.npz'}"]) == 0
    assert "2 classes" in capsys.readouterr().out
