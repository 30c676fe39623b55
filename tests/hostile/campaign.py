"""The campaign against torchcaps, as long as wanted.

    python tests/hostile/campaign.py --long                # 10^5 damaged inputs and 100 kills
    python tests/hostile/campaign.py --inputs 5000 --kills 0 --seed 7

Prints what was done and what broke; the exit code is 1 if anything did. The tests run the same with small numbers.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hostile.kills import kill_at_random
from hostile.mutations import attack_all
from hostile.readers import targets

LONG_INPUTS, LONG_KILLS = 100_000, 100
MEMORY = 4 << 30
"""Bytes of address space that the readers may use beyond what is there before the first input."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--long", action="store_true", help=f"{LONG_INPUTS:,} inputs and {LONG_KILLS} kills")
    parser.add_argument("--inputs", type=int, default=2000, help="damaged inputs over all readers")
    parser.add_argument("--kills", type=int, default=4, help="runs killed at random moments")
    parser.add_argument("--seconds", type=float, default=10**9, help="begin no more of either after this long")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    inputs = LONG_INPUTS if arguments.long else arguments.inputs
    kills = LONG_KILLS if arguments.long else arguments.kills
    started = time.monotonic()
    summary: dict[str, object] = {"seed": arguments.seed}
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        if kills:
            place = Path(folder) / "kills"
            place.mkdir()
            done, broken_kills = kill_at_random(place, arguments.seed, kills, seconds=arguments.seconds, say=print)
            summary |= done
            broken += broken_kills
        if inputs:
            place = Path(folder) / "inputs"
            place.mkdir()
            found = targets(place)
            _limit_memory()
            left = arguments.seconds - (time.monotonic() - started)
            counted, broken_inputs = attack_all(found, arguments.seed, inputs=inputs, seconds=left, say=print)
            summary |= {"readers": len(found), "inputs": sum(counted.values())}
            summary |= {name: counted[name] for name in ("read", "refused", "broken")}
            broken += broken_inputs
    summary |= {"seconds": round(time.monotonic() - started), "broken": len(broken)}
    print(json.dumps(summary))
    return 1 if broken else 0


def _limit_memory() -> None:
    status = Path("/proc/self/statm")
    if status.exists():
        used = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


if __name__ == "__main__":
    sys.exit(main())
