"""``torchcaps reproduce``"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchcaps.cli.shared import add_data_folder, positive, threads, whole
from torchcaps.errors import UserError
from torchcaps.lab.reproduce.budgets import BUDGETS
from torchcaps.lab.reproduce.paper import FIGURES


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "figure", choices=(*FIGURES, "report"), help="what to reproduce, or report: write the page of --from anew"
    )
    parser.add_argument(
        "--budget",
        choices=tuple(BUDGETS),
        default="cpu",
        help="; ".join(f"{name}: {budget.summary}" for name, budget in BUDGETS.items()) + " [cpu]",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="WORD",
        help="these cells only: a data set, a method, a seed, or several joined as in mnist/l2-fc",
    )
    parser.add_argument("--seeds", type=positive, metavar="N", help="runs of each cell [1; cpu: 3 of some]")
    parser.add_argument("--first-seed", type=whole(0), default=0, metavar="N", help="the first of the seeds [0]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for cells and report [runs/reproduce-BUDGET]")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="report: a folder with results.csv")
    parser.add_argument(
        "--list", action="store_true", help="tell the state and the command of every cell, and run none"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="spread the cells over a Ray cluster, or over this machine's cores with 'local'",
    )
    parser.add_argument("--devices", type=positive, metavar="N", help="processes of each cell, one for each device [1]")
    parser.add_argument("--accelerator", help="auto, cpu, cuda, mps [auto]")
    parser.add_argument(
        "--threads", type=threads, metavar="N", help="CPU threads of a process [all cores; with --ray 1]"
    )
    add_data_folder(parser)


def run(arguments: argparse.Namespace) -> None:
    if (arguments.figure == "report") != (arguments.source is not None):
        raise UserError("'reproduce report' and --from DIR go together: the one needs the other.")
    if arguments.figure == "report":
        from torchcaps.lab.reproduce.report import rebuild

        print(f"The report is {rebuild(arguments.source)}")
        return
    from rich.console import Console

    from torchcaps.lab.reproduce.reproduction import Reproduction
    from torchcaps.lab.reproduce.worker import Execution

    reproduction = Reproduction(
        figure=arguments.figure,
        budget=arguments.budget,
        out=arguments.out or Path("runs") / f"reproduce-{arguments.budget}",
        only=arguments.only,
        seeds=arguments.seeds,
        first_seed=arguments.first_seed,
        ray_address=arguments.ray,
        execution=Execution(
            threads=arguments.threads,
            devices=arguments.devices,
            accelerator=arguments.accelerator,
            data_folder=arguments.data_dir,
        ),
    )
    (reproduction.list_cells if arguments.list else reproduction.run)(Console(markup=False, emoji=False))
