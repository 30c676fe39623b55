"""``torchcaps train``"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.cli.options import add_training_options, given_settings, merged, option_of
from torchcaps.cli.shared import folder, own_code
from torchcaps.errors import UserError
from torchcaps.process import say
from torchcaps.training.config import EXECUTION, TrainingConfig

if TYPE_CHECKING:
    from torchcaps.training.fit import Callback
    from torchcaps.training.folder import RunFolder

LONGER = ("run.epochs", "run.steps")
"""Settings with which a run can be made longer when it is resumed."""
OWN = ("routing.name", "model.backbone")
"""On resuming, these only say that the run's own code may be imported: they must be the run's."""


def add_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to run")
    what.add_argument("--recipe", metavar="FILE", help="settings from a YAML file, or the name of a shipped recipe")
    what.add_argument("--resume", metavar="DIR", type=folder, help="continue the run in this folder")
    add_training_options(parser)


def run(arguments: argparse.Namespace) -> None:
    from torchcaps.ops import keep_memory
    from torchcaps.training.files import find_recipe, read_mapping
    from torchcaps.training.fit import fit
    from torchcaps.training.host import is_first_process

    keep_memory()
    given = given_settings(arguments)
    own = own_code(given.get("routing", {}).get("name"), given.get("model", {}).get("backbone"))
    if arguments.resume is not None:
        folder = _resumed(arguments, given)
        if is_first_process():
            with folder.claimed():
                folder.set_aside_damage(say)
        if folder.result.exists():
            print(f"The run in {folder.path} is finished.")
            print_result(folder.path)
            return
        execution = {section: values for section, values in given.items() if section in ("run", "data")}
        config = TrainingConfig.from_mapping(merged(folder.config().to_mapping(), execution))
        path = fit(config, resume=folder.path, own=own, callbacks=_callbacks(config))
    else:
        recipe = {} if arguments.recipe is None else read_mapping(find_recipe(arguments.recipe))
        config = TrainingConfig.from_mapping(merged(recipe, given))
        path = fit(config, own=own, callbacks=_callbacks(config))
    if is_first_process():
        print_result(path)


def _resumed(arguments: argparse.Namespace, given: dict[str, dict[str, Any]]) -> RunFolder:
    """The run to continue, made longer if that is asked for."""
    from torchcaps.trained.run import PRUNING
    from torchcaps.training.folder import RunFolder
    from torchcaps.training.host import is_first_process

    changeable = [name for name in (*EXECUTION, *LONGER) if name != "run.out"]
    folder = RunFolder.open(arguments.resume)
    config = folder.config()
    kept = {name: config.determining().get(name) for name in OWN}
    named = {f"{section}.{name}": value for section, values in given.items() for name, value in values.items()}
    stray = [option_of(name) for name, value in named.items() if name not in changeable and kept.get(name) != value]
    if stray or arguments.recipe:
        allowed = ", ".join(map(option_of, changeable))
        raise UserError(
            f"A resumed run keeps its settings: leave out {', '.join(stray) or '--recipe'}. "
            f"Only {allowed} may be given with --resume."
        )
    if (folder.path / PRUNING).exists():
        raise UserError(f"{folder.path} holds a pruned network, not a run that could be resumed.")
    longer = {name: value for name, value in given.get("run", {}).items() if f"run.{name}" in LONGER}
    if longer and is_first_process():
        with folder.claimed():
            folder.extend(TrainingConfig.from_mapping(merged(config.to_mapping(), {"run": longer})))
    return folder


def _callbacks(config: TrainingConfig) -> list[Callback]:
    callbacks: list[Callback] = []
    if config.run.pictures:
        from torchcaps.plots.run import Pictures

        callbacks.append(Pictures())
    if config.run.tensorboard:
        from torchcaps.training.loggers import TensorBoard

        callbacks.append(TensorBoard())
    return callbacks


def print_result(path: Path) -> None:
    """The outcome of a finished run, as a small table."""
    from torchcaps.data.files import shown
    from torchcaps.data.report import table
    from torchcaps.training.folder import RunFolder
    from torchcaps.training.result import RunResult

    result = RunResult.read(RunFolder(path).result)
    training, evaluating = result.train_images_per_second, result.evaluate_images_per_second
    rows = [
        ("test error", f"{result.test_error_percent:.2f} % of {result.test_images} images"),
        ("trained", f"{result.steps} steps, {result.epochs:g} epochs, {result.seconds:.0f} s in all"),
        ("speed", f"{training:.0f} images/s training, {evaluating:.0f} images/s evaluating"),
        ("parameters", f"{result.parameters:,}"),
        ("peak memory", f"{result.peak_memory_mb:.0f} MB"),
        ("folder", shown(str(path))),
    ]
    print(table(rows))
