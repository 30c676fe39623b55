"""The allocator is changed only when asked, and then keeps its memory. Subprocesses: the change is for good."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch, torchcaps.ops

if sys.argv[1] == "keep":
    assert torchcaps.ops.keep_memory()

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
    run = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_memory_is_kept_only_on_request() -> None:
    assert page_faults("import only") > 4 * 10_000  # 64 MB are 16,384 pages, cleared again every time
    assert page_faults("keep") < 1_000


def test_does_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchcaps.ops import keep_memory

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert keep_memory() is False
