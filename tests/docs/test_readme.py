"""What the README and the pages say can be done as they say it."""

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pages import PAGES, ROOT, blocks, commands, links

import torchcaps
from torchcaps.cli.main import COMMANDS as KNOWN

README = ROOT / "README.md"
MARKDOWN = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
COMMANDS = [(path, words) for path in MARKDOWN for words in commands(path)]


def _name(value):
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else " ".join(value)


@pytest.fixture
def tiny_run(tmp_path, monkeypatch):
    """A folder with a network in runs/mnist, as if it had been trained there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/mnist").mkdir(parents=True)
    sizes = {"conv_channels": 8, "primary_capsules": 2, "reconstruction": False}
    torchcaps.CapsuleNetwork((1, 20, 20), 10, **sizes).save("runs/mnist/model.safetensors")


def test_the_training_loop_of_the_readme_learns(tmp_path):
    """Exactly that text, at most 25 lines of it, in a process of its own."""
    text = README.read_text(encoding="utf-8")
    loop = re.search(r"<!-- loop -->\n```python\n(.*?)```\n<!-- end loop -->", text, re.DOTALL)
    assert loop
    assert len(loop[1].splitlines()) <= 25
    file = tmp_path / "loop.py"
    file.write_text(loop[1], encoding="utf-8")
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    error = re.fullmatch(r"test error: ([\d.]+) %\n", done.stdout)
    assert error, done.stdout
    assert float(error[1]) < 8


def test_the_other_code_of_the_readme_runs(tiny_run, capsys):
    _, layer, loading = blocks(README, "python")
    exec(layer, {})
    assert capsys.readouterr().out == "torch.Size([4, 10])\n"
    exec(loading, {"pixels": np.zeros((50, 40, 3), dtype=np.uint8)})


@pytest.mark.parametrize("page", ["own-loop.md", "own-images.md"])
def test_the_code_of_a_page_runs_from_top_to_bottom(page):
    names: dict[str, object] = {}
    for block in blocks(ROOT / "docs" / page, "python"):
        exec(block, names)


def test_the_code_of_the_first_page_runs(tiny_run):
    names: dict[str, object] = {}
    for block in blocks(ROOT / "docs/start.md", "python"):
        smaller = block.replace("steps=100", "steps=1, batch_size=8, test_images=8, pictures=False, threads=1")
        exec(smaller.replace('data=DataConfig(name="digits"),', 'data=DataConfig(name="digits"), model=small,'), names)
        names["small"] = _small_model()
    assert (names["folder"] / "model.safetensors").exists()


def _small_model():
    from torchcaps.models.config import CapsNetConfig

    return CapsNetConfig(conv_channels=8, primary_capsules=2, reconstruction=False)


def test_the_own_routing_of_its_page_is_saved_and_loaded(tmp_path, monkeypatch):
    """The rest of that page is followed by ``tests/test_testing.py``."""
    routing, use, _ = blocks(ROOT / "docs/adding-a-routing.md", "python")
    (tmp_path / "half_routing.py").write_text(routing, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    exec(use, names)
    assert names["network"].layers[-1].routing.share == 0.25


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=_name)
def test_every_command_is_understood(page, words):
    name, *options = words
    assert name in KNOWN
    parser = argparse.ArgumentParser()
    importlib.import_module(f"torchcaps.cli.{name}").add_options(parser)
    parser.parse_args(options)  # exits if it is not


@pytest.mark.parametrize("page", MARKDOWN, ids=_name)
def test_every_link_leads_somewhere(page):
    missing = [target for target in links(page) if not (page.parent / target).exists()]
    assert not missing


def test_every_name_in_the_equations_exists():
    """Code can be imported, and tests are defined somewhere below ``tests``."""
    page = (ROOT / "docs/equations.md").read_text(encoding="utf-8")
    tables = [line for line in page.splitlines() if line.startswith("|")]
    words = set(re.findall(r"`([A-Za-z_][\w.]*)`", " ".join(tables)))
    defined = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    labels = {"p2d", "dcap", "squash", "rsftmx", "gaobj2", "gaobj3", "ml"}
    for word in words - labels:
        if word.startswith("test_"):
            assert f"def {word}(" in defined, word
        else:
            _resolve(word)


def _resolve(name):
    """What ``torchcaps.NAME`` is."""
    found = torchcaps
    for part in name.split("."):
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found
