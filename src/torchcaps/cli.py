"""The command line: one small table of commands."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from rich.console import Console
from rich.table import Table

import torchcaps
from torchcaps import data
from torchcaps.bench import run_bench
from torchcaps.bench.cases import ARCHITECTURES
from torchcaps.bench.report import KINDS
from torchcaps.data.fetch import cache_root, fetch, verify
from torchcaps.errors import UserError
from torchcaps.evaluate import Evaluation, disagreements, evaluate
from torchcaps.models import Network, load_network, save_network
from torchcaps.ops import keep_memory
from torchcaps.predict import Predictor
from torchcaps.prune import prune
from torchcaps.recipes import find_recipe, recipe_names
from torchcaps.reproduce import FIGURES, Request, list_cells, reproduce
from torchcaps.reproduce.budgets import BUDGETS
from torchcaps.reproduce.engine import Stopped
from torchcaps.routing import ROUTINGS
from torchcaps.train import Interrupted, RunFolder, TrainOptions, fit, read_options
from torchcaps.train.environment import follow_parent, is_first_process, make_fabric, usable_cores, versions
from torchcaps.train.options import EXECUTION, flag
from torchcaps.train.plan import Plan

Arguments = argparse.Namespace

PRUNING = "pruning.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 2 for bad input."""
    arguments = _parser().parse_args(argv)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a routing of the user's own is looked for
    try:
        follow_parent()
        keep_memory()
        arguments.run(arguments)
        return 0
    except UserError as error:
        return _fail(str(error), 2)
    except (Interrupted, Stopped) as stopped:
        return _fail(str(stopped), stopped.exit_code)
    except KeyboardInterrupt:
        return _fail("Stopped.", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None:
            raise
        return _fail(f"{error.strerror}: {error.filename or 'the output folder'}. Nothing that was there is lost.", 2)


def _fail(message: str, code: int) -> int:
    """Say what is wrong, once: of several processes the first one speaks and has the exit code.

    A launcher that sees another process fail might kill the first before it has spoken.
    """
    if not is_first_process():
        return 0
    print(f"torchcaps: {message}", file=sys.stderr)
    return code


def train(arguments: Arguments) -> None:
    given = _given_options(arguments)
    if arguments.resume is not None:
        stray = [flag(name) for name in given if name not in EXECUTION]
        if stray or arguments.recipe:
            raise UserError(
                f"A resumed run keeps its options: leave out {', '.join(stray) or '--recipe'}. "
                f"Only {', '.join(map(flag, EXECUTION))} may be given with --resume."
            )
        folder = RunFolder.open(arguments.resume)
        if (folder.path / PRUNING).exists():
            raise UserError(f"{folder.path} holds a pruned network, not a run that could be resumed.")
        if folder.result.exists():
            print(f"The run in {folder.path} is finished.")
            _print_result(folder)
            return
        fit(dataclasses.replace(folder.options(), **given), resume=folder.path)
    else:
        recipe = read_options(find_recipe(arguments.recipe)) if arguments.recipe else {}
        if "epochs" in given or "steps" in given:  # one replaces whichever of the two the recipe has
            recipe = {name: value for name, value in recipe.items() if name not in ("epochs", "steps")}
        folder = RunFolder(fit(TrainOptions(**{**recipe, **given})))
    if is_first_process():
        _print_result(folder)


def _print_result(folder: RunFolder) -> None:
    result = json.loads(folder.result.read_text())
    table = Table(show_header=False, box=None)
    table.add_row("test error", f"{result['test_error_percent']:.2f} % of {result['test_images']} images")
    table.add_row("trained", f"{result['steps']} steps, {result['epochs']:g} epochs, {result['seconds']:.0f} s in all")
    table.add_row(
        "speed",
        f"{result['train_images_per_second']:.0f} images/s training, "
        f"{result['evaluate_images_per_second']:.0f} images/s evaluating",
    )
    table.add_row("parameters", f"{result['parameters']:,}")
    table.add_row("peak memory", f"{result['peak_memory_mb']:.0f} MB")
    table.add_row("everything is in", str(folder.path))
    Console().print(table)


def evaluate_run(arguments: Arguments) -> None:
    folder = RunFolder.open(arguments.run_folder)
    network, spec = load_network(folder.network)
    changed = {
        name: value for name in ("data", "data_dir", "threads", "accelerator") if (value := getattr(arguments, name))
    }
    options = dataclasses.replace(folder.options(), devices=1, validation=0, **changed)
    if options.data.startswith("folder:"):
        channels, side, _ = spec.source_shape
        options = dataclasses.replace(options, image_size=side, channels=channels)
    plan = Plan.of(options)
    if plan.spec.image_shape != spec.image_shape or plan.spec.present != spec.present:
        raise UserError(
            f"The network takes images of {_by(spec.image_shape)} that show {spec.present} class(es); "
            f"those of {options.data} are {_by(plan.spec.image_shape)} and show {plan.spec.present}."
        )
    if len(plan.data.classes) != len(spec.classes):
        raise UserError(f"The network knows {len(spec.classes)} classes, {options.data} has {len(plan.data.classes)}.")
    if options.data.startswith("folder:") and plan.data.classes != spec.classes:
        raise UserError(
            f"The network knows the classes {', '.join(spec.classes)}; "
            f"{options.data} has {', '.join(plan.data.classes)}."
        )
    _use_threads(options.threads)
    fabric = make_fabric(options)
    outcome = evaluate_test(network, plan, fabric, arguments.limit)
    if arguments.json:
        summary = {
            "data": options.data,
            "images": outcome.images,
            "error_percent": outcome.error_percent,
            "length_right": outcome.length_right,
            "length_wrong": outcome.length_wrong,
            "images_per_second": outcome.images_per_second,
            "confusion": outcome.confusion.tolist(),
        }
        print(json.dumps(summary))
        return
    print(f"{options.data}: {outcome.error_percent:.2f} % of {outcome.images} images wrong")
    print(f"capsule length: {outcome.length_right:.3f} right class, {outcome.length_wrong:.3f} wrong classes")
    print(f"{outcome.images_per_second:.0f} images/s")


def prune_run(arguments: Arguments) -> None:
    folder = RunFolder.open(arguments.run_folder)
    network, spec = load_network(folder.network)
    pruned = prune(network, spec)
    out = arguments.out or Path(f"{folder.path.resolve()}-pruned")
    RunFolder.check_free(out)
    changed = {"accelerator": arguments.accelerator, "data_dir": arguments.data_dir and str(arguments.data_dir)}
    options = dataclasses.replace(folder.options(), devices=1, validation=0, **changed)
    _use_threads(arguments.threads)
    plan, fabric = Plan.of(options), make_fabric(options)
    report: dict[str, Any] = {
        "capsules_removed": pruned.capsules_removed,
        "types_removed": pruned.types_removed,
        "answers_changed": disagreements(
            network.folded().to(fabric.device),
            pruned.network.folded().to(fabric.device),
            plan.data.test,
            fabric=fabric,
            augmentation=plan.augmentation,
            limit=plan.evaluation_limit(plan.data.test),
        ),
    }
    for name, each in (("before", network), ("after", pruned.network)):
        outcome = evaluate_test(each, plan, fabric)
        report[name] = {
            "test_error_percent": outcome.error_percent,
            "test_images": outcome.images,
            "parameters": sum(parameter.numel() for parameter in each.parameters()),
            "evaluate_images_per_second": round(outcome.images_per_second, 1),
        }
    smaller = RunFolder.create(out, options)
    (smaller.path / PRUNING).write_text(json.dumps(report, indent=2) + "\n")
    save_network(smaller.network, pruned.network, pruned.spec)
    print(f"removed {pruned.capsules_removed} primary capsules, and {pruned.types_removed} types of them altogether")
    table = Table(box=None)
    for heading in ("", "test error, %", "parameters", "images/s"):
        table.add_column(heading, justify="right")
    for name in ("before", "after"):
        row = report[name]
        table.add_row(
            name,
            f"{row['test_error_percent']:.2f}",
            f"{row['parameters']:,}",
            f"{row['evaluate_images_per_second']:.0f}",
        )
    Console().print(table)
    print(
        f"{report['answers_changed']} of {report['after']['test_images']} test images have another answer than before"
    )
    print(f"The smaller network is in {smaller.path}")


def evaluate_test(network: Network, plan: Plan, fabric: Fabric, limit: int | None = None) -> Evaluation:
    """Evaluate on the test split of a plan."""
    return evaluate(
        network.folded().to(fabric.device),
        plan.data.test,
        fabric=fabric,
        augmentation=plan.augmentation,
        limit=limit or plan.evaluation_limit(plan.data.test),
    )


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _use_threads(threads: int | None) -> None:
    torch.set_num_threads(threads or usable_cores())


def predict(arguments: Arguments) -> None:
    folder = RunFolder.open(arguments.run_folder)
    _use_threads(arguments.threads)
    predictor = Predictor(folder.network, device=make_fabric(TrainOptions(accelerator=arguments.accelerator)).device)
    predictions = list(predictor(arguments.images))
    top = max(arguments.top, predictor.spec.present)
    if arguments.json:
        rows = [
            {"image": each.image, "found": each.found, "lengths": dict(zip(each.classes, each.lengths))}
            for each in predictions
        ]
        print(json.dumps(rows, indent=2))
        return
    for each in predictions:
        ranking = "  ".join(f"{name} {length:.3f}" for name, length in zip(each.classes[:top], each.lengths))
        print(f"{each.image}: {' and '.join(each.found)}   [{ranking}]")


def data_list(arguments: Arguments) -> None:
    table = Table(box=None)
    for heading in ("name", "images", "size", "classes", "MB", "fetched", ""):
        table.add_column(heading, no_wrap=bool(heading))
    for row in data.describe(arguments.data_dir):
        table.add_row(
            row.name,
            row.images,
            row.image_shape,
            row.classes,
            str(row.megabytes or ""),
            row.cached,
            row.summary,
        )
    console = Console()
    console.width = max(console.width, 130)  # longer lines read better than broken ones
    console.print(table)


def data_fetch(arguments: Arguments) -> None:
    for name in arguments.names:
        folder = fetch(name, cache=arguments.data_dir, source=arguments.source, report=print)
        print(f"{name} is ready in {folder}")


def data_verify(arguments: Arguments) -> None:
    damaged = False
    for name in arguments.names:
        for file in verify(name, arguments.data_dir):
            print(f"{name}/{file.file}: {'intact' if file.ok else file.problem}")
            damaged |= not file.ok
    if damaged:
        raise UserError(f"Some files are not intact: 'torchcaps data fetch {' '.join(arguments.names)}' mends that.")


def bench(arguments: Arguments) -> None:
    run_bench(
        architectures=arguments.networks,
        routings=arguments.routings,
        batch_size=arguments.batch_size,
        threads=arguments.threads,
        rounds=arguments.rounds,
        classes=arguments.classes,
        out=arguments.out,
        as_json=arguments.json,
    )


def reproduce_figures(arguments: Arguments) -> None:
    request = Request(
        figure=arguments.figure,
        budget=arguments.budget,
        out=arguments.out or Path("runs") / f"reproduce-{arguments.budget}",
        only=arguments.only,
        seeds=arguments.seeds,
        first_seed=arguments.first_seed,
        ray_address=arguments.ray,
        execution={name: getattr(arguments, name) for name in EXECUTION},
    )
    (list_cells if arguments.list else reproduce)(request, Console())


def info(arguments: Arguments) -> None:
    """What somebody needs to know to help with a problem."""
    lines = {
        **versions(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "CUDA devices": str(torch.cuda.device_count()),
        "data folder": str(cache_root()),
        "routings": ", ".join(ROUTINGS),
        "data sets": ", ".join(data.DATASETS),
        "recipes": ", ".join(recipe_names()),
    }
    table = Table(show_header=False, box=None)
    for name, value in lines.items():
        table.add_row(name, value)
    Console().print(table)


def _train_options(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("what to run")
    run.add_argument("--recipe", metavar="FILE", help="options from a YAML file, or the name of a shipped recipe")
    run.add_argument("--resume", metavar="DIR", type=Path, help="continue the run in this folder")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in dataclasses.fields(TrainOptions):
        title = option.metadata["group"]
        group = groups.setdefault(title, parser.add_argument_group(title))
        text = option.metadata["help"].replace("%", "%%")
        if option.default is not None and option.default != "":
            text += f" [{option.default}]" if not isinstance(option.default, bool) else ""
        kind = str(option.type).partition(" | ")[0]
        if kind == "bool":
            action = argparse.BooleanOptionalAction
            group.add_argument(flag(option.name), action=action, default=argparse.SUPPRESS, help=text)
            continue
        group.add_argument(
            flag(option.name),
            type={"int": int, "float": float, "str": str}[kind],
            choices=option.metadata["choices"],
            metavar=None
            if option.metadata["choices"]
            else {"int": "N", "float": "X", "str": option.name.upper()}[kind],
            default=argparse.SUPPRESS,
            help=text,
        )


def _given_options(arguments: Arguments) -> dict[str, Any]:
    names = {option.name for option in dataclasses.fields(TrainOptions)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    _run_folder(parser)
    parser.add_argument("--data", help="another data set of the same shape and classes [the run's own]")
    parser.add_argument("--limit", type=_positive, metavar="N", help="evaluate on the first N test images only")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    _data_dir(parser)


def _prune_options(parser: argparse.ArgumentParser) -> None:
    _run_folder(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the smaller network [DIR-pruned]")
    _data_dir(parser)


def _predict_options(parser: argparse.ArgumentParser) -> None:
    _run_folder(parser)
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="PNG, JPEG or other image files")
    parser.add_argument("--top", type=_positive, default=3, metavar="N", help="classes to show for each image [3]")
    parser.add_argument("--json", action="store_true", help="print all classes with their lengths as JSON")


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--networks", nargs="+", metavar="NAME", default=["mnist"], help=f"of {', '.join(ARCHITECTURES)} [mnist]"
    )
    parser.add_argument(
        "--routings", nargs="+", metavar="NAME", default=KINDS, help=f"routings and models, of {', '.join(KINDS)} [all]"
    )
    parser.add_argument("--batch-size", type=_positive, default=128, metavar="N", help="images in a step [128]")
    parser.add_argument("--threads", type=_positive, metavar="N", help="CPU threads [all cores]")
    parser.add_argument("--rounds", type=_positive, default=5, metavar="N", help="times each case has its turn [5]")
    parser.add_argument("--no-classes", dest="classes", action="store_false", help="leave out the number of classes")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep CSV, JSON and pictures in this folder")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="DIR", help="the folder of a finished run")
    parser.add_argument("--threads", type=_positive, metavar="N", help="CPU threads [all cores]")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu, cuda, mps")


def _data_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where data sets are kept [the user's cache]")


def _data_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="see 'torchcaps data list'")
    _data_dir(parser)


def _reproduce_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("figure", choices=FIGURES, help="what to reproduce")
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
    parser.add_argument("--seeds", type=_positive, metavar="N", help="runs of each cell [1; cpu: 3 of fashion-mnist]")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first of the seeds [0]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for cells and report [runs/reproduce-BUDGET]")
    parser.add_argument(
        "--list", action="store_true", help="tell the state and the command of every cell, and run none"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="spread the cells over a Ray cluster, or over this machine's cores with 'local'",
    )
    parser.add_argument(
        "--devices", type=_positive, metavar="N", help="processes of each cell, one for each device [1]"
    )
    parser.add_argument("--accelerator", help="auto, cpu, cuda, mps [auto]")
    parser.add_argument(
        "--threads", type=_positive, metavar="N", help="CPU threads of a process [all cores; with --ray 1]"
    )
    _data_dir(parser)


def _fetch_options(parser: argparse.ArgumentParser) -> None:
    _data_names(parser)
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="a folder to look for the files in before downloading",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


@dataclass(frozen=True)
class Command:
    run: Callable[[Arguments], None]
    options: Callable[[argparse.ArgumentParser], None]
    help: str


COMMANDS: dict[str, Command] = {
    "train": Command(train, _train_options, "train a network, or continue a run"),
    "evaluate": Command(evaluate_run, _evaluate_options, "test error of a trained network"),
    "predict": Command(predict, _predict_options, "classify image files with a trained network"),
    "prune": Command(prune_run, _prune_options, "a smaller network without the capsules that no class uses"),
    "data list": Command(data_list, _data_dir, "the data sets, and which are fetched"),
    "data fetch": Command(data_fetch, _fetch_options, "download data sets"),
    "data verify": Command(data_verify, _data_names, "check fetched data sets against their checksums"),
    "bench": Command(bench, _bench_options, "speed and memory of every routing, side by side"),
    "reproduce": Command(reproduce_figures, _reproduce_options, "the paper's table and figures, from real runs"),
    "info": Command(info, lambda parser: None, "versions, devices and what is available"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchcaps", description="Capsule networks for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torchcaps {torchcaps.__version__}")
    top = parser.add_subparsers(metavar="COMMAND", required=True)
    nested: dict[str, Any] = {}
    for name, command in COMMANDS.items():
        first, _, second = name.partition(" ")
        branch = top
        if second:
            if first not in nested:
                group = top.add_parser(first, help="list, fetch and verify data sets")
                nested[first] = group.add_subparsers(metavar="ACTION", required=True)
            branch = nested[first]
        leaf = branch.add_parser(second or first, help=command.help, description=command.help)
        command.options(leaf)
        leaf.set_defaults(run=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
