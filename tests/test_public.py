"""What a user sees: names at the root, what importing them costs, and that everything is documented."""

import importlib
import inspect
import os
import subprocess
import sys

import pytest

import torchcaps

ASKED_FOR = [
    "CapsuleNetwork",
    "CapsuleLayer",
    "PrimaryCapsules",
    "Decoder",
    "L2Routing",
    "L1Routing",
    "DynamicRouting",
    "EMRouting",
    "ClusteringRouting",
    "UniformRouting",
    "LearnedRouting",
    "RoutingAscent",
    "margin_loss",
    "spread_loss",
    "squash",
    "load",
    "pretrained",
    "create_model",
    "list_models",
    "Muon",
]
HOMES = {name: f"torchcaps.{module}" for module, names in torchcaps._MODULES.items() for name in names}


def run(program: str, *arguments: str) -> str:
    """What a Python program prints, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=600, env=environment
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_public_names_are_these():
    assert sorted(torchcaps.__all__) == sorted(ASKED_FOR)
    assert dir(torchcaps) == sorted(ASKED_FOR)


@pytest.mark.parametrize("name", ASKED_FOR)
def test_every_name_is_where_it_is_said_to_be(name):
    found = getattr(torchcaps, name)
    assert found.__name__ == name
    assert found is getattr(importlib.import_module(HOMES[name]), name)
    namespace: dict[str, object] = {}
    exec(f"from torchcaps import {name}", namespace)
    assert namespace[name] is found


def test_a_name_that_there_is_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'torchcaps' has no attribute 'CapsulNetwork'"):
        _ = torchcaps.CapsulNetwork
    assert not hasattr(torchcaps, "TrainOptions")


def test_type_checkers_see_the_same_names():
    """They read the imports under TYPE_CHECKING, and not the table that is used at run time."""
    source = inspect.getsource(torchcaps)
    for name, home in HOMES.items():
        assert f"from {home} import {name} as {name}\n" in source


@pytest.mark.parametrize("package", ["torchcaps.routing"])
def test_lazy_packages_have_what_they_list(package):
    module = importlib.import_module(package)
    for name in dir(module):
        assert getattr(module, name) is not None
        assert f"import {name} as {name}\n" in inspect.getsource(module)


@pytest.mark.parametrize("name", ASKED_FOR)
def test_every_public_object_is_documented_with_an_example(name):
    documentation = getattr(torchcaps, name).__doc__
    assert documentation
    assert ">>>" in documentation
    signature = inspect.signature(getattr(torchcaps, name))
    named = [parameter for parameter in signature.parameters if parameter != "self"]
    if named:
        assert "Args:" in documentation or inspect.getdoc(getattr(torchcaps, name).__mro__[1]).count("Args:")


BLOCKER = """
import sys
import torch, numpy, safetensors  # and what importing these alone imports
import torch.optim, torch._dynamo  # which torch imports by itself as soon as there is an optimiser

ALLOWED = {name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
ALLOWED |= {"torch", "numpy", "safetensors", "torchcaps"}
assert "torchcaps" not in sys.modules


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"torchcaps must not import {name}", name=name)


sys.meta_path.insert(0, Refuse())
for unwanted in ("yaml", "rich", "lightning_fabric", "matplotlib", "sklearn", "PIL", "pooch", "scipy"):
    assert unwanted not in sys.modules, unwanted
    try:
        __import__(unwanted)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{unwanted} is not blocked")

import torchcaps
"""

USE_EVERYTHING = """
import tempfile
from pathlib import Path

for name in torchcaps.__all__:
    getattr(torchcaps, name)
network = torchcaps.CapsuleNetwork((1, 20, 20), ["cat", "dog"], conv_channels=4, primary_capsules=2)
ascent = torchcaps.RoutingAscent(network)
optimizer = torchcaps.Muon(network.parameters())
images, labels = torch.rand(4, 1, 20, 20), torch.tensor([0, 1, 1, 0])
capsules = network(images, labels).capsules
torchcaps.margin_loss(capsules.activations, labels).backward(retain_graph=True)
ascent.step(capsules, labels)
optimizer.step()
with tempfile.TemporaryDirectory() as folder:
    network.save(Path(folder) / "network")
    loaded = torchcaps.load(Path(folder) / "network")
print(loaded.classes, loaded.predict(loaded.prepare(numpy.zeros((30, 40, 3), numpy.uint8))).labels.shape)
"""


def test_importing_it_needs_torch_numpy_and_safetensors_only():
    assert run(BLOCKER + "print(torchcaps.__version__)").strip() == torchcaps.__version__


def test_the_whole_library_needs_torch_numpy_and_safetensors_only():
    assert run(BLOCKER + USE_EVERYTHING).strip() == "('cat', 'dog') torch.Size([1, 1])"


IMPORTED = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""
HEAVY = ("torch", "numpy", "safetensors", "lightning_fabric", "matplotlib", "sklearn", "scipy", "PIL", "rich", "ray")


@pytest.mark.parametrize(
    "module",
    [
        "torchcaps",
        "torchcaps.routing",
        "torchcaps.settings",
        "torchcaps.atomic",
        "torchcaps.models.config",
        "torchcaps.routing.config",
        "torchcaps.training.config",
        "torchcaps.cli.main",
        "torchcaps.cli.options",
    ],
)
def test_nothing_heavy_is_imported_to_answer_at_once(module):
    assert run(IMPORTED, module, *HEAVY).split() == []


def test_listing_the_names_imports_nothing():
    program = "import sys, torchcaps; dir(torchcaps); torchcaps.__all__; print('torch' in sys.modules)"
    assert run(program).strip() == "False"
