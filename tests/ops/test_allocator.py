"""The allocator is changed only when asked, and then keeps its memory. Subprocesses: the change is for good."""

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import os, resource, sys
import torch, torchcaps.ops

if sys.argv[1] == "keep":
    assert torchcaps.ops.keep_memory()
assert ("THP_MEM_ALLOC_ENABLE" in os.environ) == (sys.argv[1] == "keep")  # how torch is asked for large pages

def use():
    torch.empty(16 * 2**20).fill_(1)  # 64 MB

def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(12):  # until the heap has settled
    use()
before = page_faults()
for _ in range(4):
    use()
print(page_faults() - before)
"""


def page_faults(mode: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", SCRIPT, mode]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_memory_is_kept_only_on_request() -> None:
    assert page_faults("import only") > 4 * 10_000  # 64 MB are 16,384 pages, cleared again every time
    assert page_faults("keep") < 1_000


def test_does_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchcaps.ops import keep_memory

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    assert keep_memory() is False
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ
