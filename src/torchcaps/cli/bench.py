"""``torchcaps bench``"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchcaps.cli.shared import positive, threads
from torchcaps.lab.bench.networks import KINDS, NETWORKS


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--networks", nargs="+", metavar="NAME", default=["mnist"], help=f"of {', '.join(NETWORKS)} [mnist]"
    )
    parser.add_argument(
        "--routings", nargs="+", metavar="NAME", default=KINDS, help=f"routings and models, of {', '.join(KINDS)} [all]"
    )
    parser.add_argument("--batch-size", type=positive, default=128, metavar="N", help="images in a step [128]")
    parser.add_argument(
        "--threads", nargs="+", type=threads, metavar="N", help="CPU threads, one or several numbers [all cores]"
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="times each case has its turn [5]")
    parser.add_argument("--no-classes", dest="classes", action="store_false", help="leave out the number of classes")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep CSV, JSON and pictures in this folder")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> None:
    from torchcaps.lab.bench.report import run_bench

    run_bench(
        networks=arguments.networks,
        kinds=arguments.routings,
        batch_size=arguments.batch_size,
        threads=arguments.threads,
        rounds=arguments.rounds,
        classes=arguments.classes,
        out=arguments.out,
        as_json=arguments.json,
    )
