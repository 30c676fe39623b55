import subprocess
import sys

import pytest

from torchcaps import data
from torchcaps.data.config import AugmentationConfig, DataConfig
from torchcaps.settings import SettingError

WITHOUT = """
import sys
import torchcaps.data.config
from torchcaps.data import config
config.DataConfig(name="mnist"), config.AugmentationConfig(flip="random")
print(*(module for module in ("torch", "numpy", "PIL", "sklearn", "requests") if module in sys.modules))
"""


def test_settings_need_no_heavy_imports() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == ""


def test_public_names_are_there() -> None:
    for name in data.__all__:
        assert getattr(data, name).__name__ if name != "DATASETS" else data.DATASETS
    assert data.load("digits").image_shape == (1, 28, 28)
    with pytest.raises(AttributeError, match="nonsense"):
        data.nonsense  # noqa: B018


def test_settings_survive_being_written_and_read() -> None:
    for settings in (
        DataConfig(name="folder:x", validation=7, image_size=48, channels=1, fit="pad", sampling="balanced"),
        AugmentationConfig(shift=1, flip="alternate", brightness=63 / 255, contrast=0.8, standardise=True),
    ):
        assert type(settings).from_mapping(settings.to_mapping()) == settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("validation", -1), ("validation", 1.5), ("image_size", 0), ("image_size", 10**9), ("channels", 2)),
        *(("fit", "tight"), ("skip_unreadable", 1), ("class_weights", "even"), ("sampling", "none"), ("name", 3)),
    ],
)
def test_bad_values(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=name):
        DataConfig(**{name: value})


def test_configuration_loads() -> None:
    loaded = DataConfig(name="digits", validation=100).load()
    assert loaded.validation is not None
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (1337, 100, 360)
