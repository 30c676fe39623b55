import pytest
import yaml

from commands import config_of
from torchcaps.cli.options import options
from torchcaps.errors import UserError
from torchcaps.settings import SettingError, fields, kind
from torchcaps.training.config import EXECUTION, TrainingConfig
from torchcaps.training.files import read_config, read_mapping, to_yaml


def test_settings_survive_the_trip_through_yaml(tmp_path):
    config = config_of(
        data="mnist",
        steps=7,
        learning_rate=3e-4,
        objective="balanced",
        weight_std=0.02,
        layers=((32, 8),),
        flip="random",
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert read_config(path) == config


def test_every_option_is_explained():
    for option in options():
        assert option.field.metadata["help"], option.flag
        assert option.group, option.flag


def test_what_may_change_on_resuming_are_settings():
    known = {
        f"{section.name}.{field.name}"
        for section in fields(TrainingConfig)
        if section.name != "model"
        for field in fields(kind(TrainingConfig, section.name))
    }
    assert set(EXECUTION) <= known
    assert set(TrainingConfig().determining()) >= known - set(EXECUTION)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 1, "steps": 2}, "epochs and steps cannot both be given"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"gamma": -1.0}, "gamma must be at least 0"),
        ({"gamma": float("nan")}, "gamma must be a finite number"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0"),
        ({"learning_rate": float("inf")}, "learning_rate must be a finite number"),
        ({"learning_rate": 1e6}, "learning_rate must be at most 10"),
        ({"schedule": "zigzag"}, "schedule must be one of cosine"),
        ({"batch_size": 33, "devices": 2}, "shared evenly"),
        ({"layers": ((32,),)}, "must be a list of 2 values"),
        ({"layers": ((0, 8),)}, "layers must be at least 1"),
        ({"average": 1.0}, "average must be below 1"),
        ({"average": float("nan")}, "average must be a finite number"),
        ({"rotate": float("nan")}, "rotate must be a finite number"),
        ({"scale": -0.5}, "scale must be at least 0"),
        ({"weight_std": float("inf")}, "weight_std must be a finite number"),
        ({"shrinkage": "proximal", "ascent": "adam"}, "goes with plain steps only"),
        ({"shrinkage": "types", "average": 0.99}, "would blur"),
        ({"matrix_sizes": (1, 2, 3)}, "not a setting"),
        ({"threads": 100000}, "threads must be at most"),
    ],
)
def test_nonsense_is_refused_with_the_setting_named(given, message):
    with pytest.raises(SettingError, match=message):
        config_of(**given)


def test_settings_of_another_model_are_refused():
    with pytest.raises(SettingError, match=r"model\.layers is not a setting"):
        TrainingConfig.from_mapping({"model": {"name": "cnn", "layers": [[8, 4]]}})


def test_settings_of_another_routing_are_refused_and_the_valid_ones_listed():
    config = TrainingConfig.from_mapping({"routing": {"name": "dynamic", "settings": {"alpha": 1.0}}})
    with pytest.raises(SettingError, match=r"alpha is not a setting.*iterations"):
        config.routing.build()


def test_yaml_numbers_are_read_as_numbers(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("optimiser:\n  learning_rate: 1e-3\nascent:\n  gamma: 1\nrun:\n  steps: null\n")
    config = read_config(path)
    assert config.optimiser.learning_rate == 0.001
    assert config.ascent.gamma == 1.0
    assert config.run.steps is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimiser: {learning_rte: 1}", r"optimiser\.learning_rte is not a setting \(did you mean learning_rate"),
        ("optimizer: {learning_rate: 1}", r"optimizer is not a setting \(did you mean optimiser"),
        ("run: {batch_size: many}", r"run\.batch_size must be a whole number"),
        ("run: {batch_size: 1.5}", r"run\.batch_size must be a whole number"),
        ("run: {batch_size: true}", r"run\.batch_size must be a whole number"),
        ("run: {pictures: 1}", r"run\.pictures must be true or false"),
        ("run: {seed: null}", r"run\.seed must be a whole number"),
        ("run: [1]", "run must be names with values"),
        ("ascent: {gamma: .inf}", "finite"),
        ("run: {seed: " + "9" * 5000 + "}", "not readable as YAML|too large"),
        ("a: &a [x]\nb: [*a, *a]", "aliases are not allowed"),
        ("[" * 20_000, "not readable as YAML"),
        ("- a\n- b", "must hold names"),
        ("a: [", "not readable as YAML"),
        ("a: \x00", "not readable as YAML"),
    ],
)
def test_a_bad_file_is_told_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(path)


def test_bytes_that_are_no_text_are_told_as_such(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"run: {seed: \xff\xfe}")
    with pytest.raises(UserError, match="not readable as YAML"):
        read_config(path)


def test_a_missing_file_is_told_as_such(tmp_path):
    with pytest.raises(UserError, match="no file"):
        read_config(tmp_path / "recipe.yaml")


def test_an_empty_file_sets_nothing(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(None))
    assert read_mapping(path) == {}
    assert read_config(path) == TrainingConfig()
