"""The page that needs no Python, and the command that writes it."""

from __future__ import annotations

import re

import pytest

from torchcaps import CapsuleNetwork
from torchcaps.errors import UserError
from torchcaps.models.cnn import ConvolutionalNetwork
from torchcaps.routing.em import EMRouting
from torchcaps.serve.model import ServedModel
from torchcaps.serve.static_page import write_static


def test_the_page_names_only_files_that_are_there(tmp_path, model, gallery):
    size = write_static(tmp_path / "page", [model], gallery=gallery, no_samples="")
    written = {path.name: path for path in (tmp_path / "page").iterdir()}
    assert size == sum(path.stat().st_size for path in written.values())
    page = written["index.html"].read_text()
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', page))
    assert named | {"index.html"} == set(written)
    assert "server.js" not in written
    assert "fetch(" not in "".join(path.read_text() for name, path in written.items() if name.endswith(".js"))


def test_eight_bits_take_half_the_room(tmp_path, model):
    sizes = [write_static(tmp_path / str(bits), [model], gallery=None, no_samples="", bits=bits) for bits in (16, 8)]
    assert sizes[1] < 0.65 * sizes[0]


@pytest.mark.parametrize(
    "network",
    [
        ConvolutionalNetwork((1, 28, 28), 3, conv_channels=4, second_channels=8),
        CapsuleNetwork((1, 28, 28), 3, EMRouting(), conv_channels=4, primary_capsules=2),
        CapsuleNetwork((1, 28, 28), 3, stem="small", primary_capsules=2),
    ],
    ids=["cnn", "em", "stem"],
)
def test_other_networks_are_refused_in_a_sentence(tmp_path, network):
    with pytest.raises(UserError, match="without --static"):
        write_static(tmp_path / "page", [ServedModel("x", network)], gallery=None, no_samples="")
    assert not (tmp_path / "page").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, model):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not an empty folder"):
        write_static(tmp_path, [model], gallery=None, no_samples="")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_command(torchcaps, trained_folder, tmp_path):
    result = torchcaps("serve", trained_folder, "--static", tmp_path / "page", "--threads", 1)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "page" / "index.html").is_file()
    assert "Open" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no run folder"),
        (["a", "b", "c"], "or two"),
        (["a", "--port", "70000"], "65535"),
        (["--host", ""], "host name"),
    ],
)
def test_wrong_commands_are_told_what_is_wrong(torchcaps, arguments, words):
    result = torchcaps("serve", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
