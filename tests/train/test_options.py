import dataclasses

import pytest
import yaml

from torchcaps.errors import UserError
from torchcaps.train import TrainOptions, read_options


def test_options_survive_the_trip_through_yaml(tmp_path):
    options = TrainOptions(data="mnist", steps=7, learning_rate=3e-4, balanced=True, weight_std=0.02)
    path = tmp_path / "config.yaml"
    path.write_text(options.to_yaml())
    assert TrainOptions(**read_options(path)) == options


def test_every_option_is_explained():
    for option in dataclasses.fields(TrainOptions):
        assert option.metadata["help"], option.name
        assert option.metadata["group"], option.name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 1, "steps": 2}, "not both"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"gamma": -1.0}, "--gamma must be at least 0"),
        ({"learning_rate": -1.0}, "--learning-rate must be at least 0"),
        ({"schedule": "zigzag"}, "--schedule must be one of cosine"),
        ({"routing": "l3"}, "Unknown routing 'l3'"),
        ({"batch_size": 33, "devices": 2}, "shared evenly"),
        ({"layers": "32"}, "COUNTxSIZE"),
        ({"layers": "0x8"}, "COUNTxSIZE"),
        ({"average": 1.0}, "below 1"),
        ({"shrinkage": "proximal", "ascent": "adam"}, "goes with --ascent plain"),
        ({"shrinkage": "types", "average": 0.99}, "would blur"),
        ({"model": "cnn", "layers": "8x4"}, "layers of its own"),
        ({"objective": "ratio", "balanced": True}, "balanced as it is"),
        ({"routing": "clustering", "alpha": 0.0}, "alpha"),
        ({"matrix_sizes": "1,2,3"}, "four numbers"),
    ],
)
def test_nonsense_is_refused_with_the_option_named(given, message):
    with pytest.raises(UserError, match=message):
        TrainOptions(**given)


def test_layers_are_read_as_pairs():
    assert TrainOptions(layers="32x8,16x12").hidden_layers() == ((32, 8), (16, 12))
    assert TrainOptions().hidden_layers() == ()


def test_yaml_numbers_are_read_as_the_type_the_option_has(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("learning_rate: 1e-3\ngamma: 1\nsteps: null\n")
    assert read_options(path) == {"learning_rate": 0.001, "gamma": 1.0, "steps": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte: 1", "unknown option.*learning_rte"),
        ("batch_size: many", "batch_size takes int"),
        ("batch_size: 1.5", "batch_size takes int"),
        ("batch_size: true", "batch_size takes int"),
        ("balanced: 1", "balanced takes bool"),
        ("batch_size: null", "batch_size takes int"),
        ("- a\n- b", "must hold a mapping"),
        ("a: [", "not readable as YAML"),
    ],
)
def test_a_bad_file_is_told_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_options(path)


def test_a_missing_file_is_told_as_such(tmp_path):
    with pytest.raises(UserError, match="no file"):
        read_options(tmp_path / "recipe.yaml")


def test_an_empty_file_sets_nothing(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(None))
    assert read_options(path) == {}
