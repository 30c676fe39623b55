from importlib.metadata import PackageNotFoundError

import torchcaps
from torchcaps.training import host


def test_versions_are_told_where_torchcaps_is_not_installed_but_found(monkeypatch):
    def version(name: str) -> str:
        if name == "torchcaps":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(host, "version", version)
    assert host.versions()["torchcaps"] == torchcaps.__version__


def test_what_the_kernel_does_not_say_is_nothing():
    assert host.kernel_says("no such file", "MemAvailable") == ""
