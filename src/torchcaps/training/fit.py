"""The one training loop."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from rich.console import Console
from torch import Tensor

from torchcaps.atomic import DamagedFile
from torchcaps.data.datasets import DataSet
from torchcaps.data.files import shown
from torchcaps.data.listing import is_listed
from torchcaps.data.report import short, table
from torchcaps.data.splits import Split
from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.models.config import Own
from torchcaps.models.files import load
from torchcaps.process import signals_to
from torchcaps.settings import SettingError
from torchcaps.training.algorithm import STATISTICS, AlternatingTrainer, within
from torchcaps.training.config import TrainingConfig
from torchcaps.training.environment import local_processes, make_fabric, peak_memory_mb, processor_name
from torchcaps.training.evaluation import Evaluation
from torchcaps.training.folder import RunFolder
from torchcaps.training.header import check_memory, header_rows
from torchcaps.training.host import commit, default_threads, is_first_process, versions
from torchcaps.training.plan import Plan
from torchcaps.training.progress import ProgressDisplay, say
from torchcaps.training.result import RunResult
from torchcaps.training.schedule import rate_factor
from torchcaps.training.watch import Watch

MOST_EVALUATIONS = 50
"""On the way, unless others are asked for: of a few images an epoch is a few steps."""


class Callback:
    """What is told about a run while it goes on; override what you need. Only the first process calls it."""

    def on_start(self, folder: RunFolder) -> None:
        """Training is about to begin, or to go on."""

    def on_row(self, row: Mapping[str, float | int | None]) -> None:
        """A row of ``metrics.csv`` has been written."""

    def on_finish(self, finished: Finished) -> None:
        """The run is done, and its result written."""


class Finished(NamedTuple):
    """A run that has just ended, with what pictures of it need."""

    folder: RunFolder
    plan: Plan
    network: Network
    test: Evaluation


def fit(
    config: TrainingConfig,
    *,
    resume: Path | None = None,
    data: DataSet | None = None,
    own: Own | None = None,
    callbacks: Sequence[Callback] = (),
    console: Console | None = None,
) -> Path:
    """Train a network and return its run folder.

    Args:
        config: the whole run.
        resume: the folder of a run to continue; ``config`` must be that run's.
        data: images to train on, instead of those that the configuration names.
        own: a routing or a backbone of your own, if the configuration names one.
        callbacks: told about every row of metrics, and about the end.
        console: where progress is shown.
    """
    fabric = make_fabric(config.run)
    processes = local_processes(config.run)
    torch.set_num_threads(config.run.threads or default_threads(processes))
    plan = Plan.of(config, data)
    plan.batches(0, fabric.world_size if fabric.world_size > 1 else config.run.devices)
    network = plan.build_network(own)
    console = console or Console(markup=False, emoji=False)
    if config.run.start_from and not (resume and RunFolder(resume).checkpoints.paths()):
        _start_from(network, Path(config.run.start_from), own, console)
    path = resume or _out(config)
    with contextlib.ExitStack() as stack:
        if is_first_process():  # before other processes start, so that a mistake is told once and ends the command
            if fabric.device.type == "cpu":
                check_memory(plan, network)
            if resume:
                folder = RunFolder.open(path)
                stack.enter_context(folder.claimed())
                folder.set_aside_damage(lambda line: say(console, line))
            else:
                _check_place(path, config.data.name)
                folder = stack.enter_context(RunFolder.created(path, plan.config))
            if folder.result.exists():
                return folder.path  # whoever had claimed it before has finished it
            say(console, table(header_rows(plan, network, path)))
        fabric.launch()
        folder = RunFolder(fabric.broadcast(path))
        return _Run(fabric, plan, network, folder, callbacks, console).to_the_end()


def _check_place(path: Path, data: str) -> None:
    """A run's pictures must not become training images of the next one."""
    kind, _, place = data.partition(":")
    if kind == "folder" and is_listed(Path(place).expanduser(), path):
        raise SettingError("out", f"must be elsewhere: {path} would be taken for images of {shown(data)}")


def _start_from(network: Network, path: Path, own: Own | None, console: Console) -> None:
    """Take over the weights of another network, as far as names and shapes agree."""
    own = own or Own()
    other = load(path, routing=own.routing, backbone=own.backbone)
    state = network.state_dict()
    fitting = {
        name: tensor
        for name, tensor in other.state_dict().items()
        if name in state and tensor.shape == state[name].shape
    }
    if not fitting:
        raise UserError(
            f"Nothing of the network in {path} fits this one: that is {_described(other)}, and this is "
            f"{_described(network)}."
        )
    network.load_state_dict({**state, **fitting})
    if is_first_process():
        new = len(state) - len(fitting)
        say(console, f"Starting from {path}" + (f"; {new} of {len(state)} parts are new." if new else "."))


def _described(network: Network) -> str:
    """What has to be the same for weights to fit."""
    stem = getattr(network.config, "stem", None)
    front = f" with the {stem} stem" if stem else ""
    return f"a {network.config.name}{front} for images of {'x'.join(map(str, network.image_shape))}"


def _out(config: TrainingConfig) -> Path:
    if config.run.out:
        return Path(config.run.out)
    kind, _, place = config.data.name.partition(":")
    data = re.sub(r"[^\w.-]", "_", Path(place).stem)[:40] or kind
    what = config.routing.name.replace(":", ".") if config.model.name == "capsnet" else config.model.name
    return Path("runs") / f"{data}-{what}-{datetime.now():%Y%m%d-%H%M%S}"


class _Run:
    """A run from its first or next step to its result."""

    def __init__(
        self,
        fabric: Fabric,
        plan: Plan,
        network: Network,
        folder: RunFolder,
        callbacks: Sequence[Callback],
        console: Console,
    ) -> None:
        self.fabric = fabric
        self.plan = plan
        self.config = plan.config
        self.folder = folder
        self.callbacks = callbacks
        self.batches = plan.batches(fabric.global_rank, fabric.world_size)
        self.total_steps = plan.total_steps
        usual = min(max(self.batches.steps_per_epoch, self.total_steps // MOST_EVALUATIONS), 2000)
        self.evaluate_every = self.config.run.evaluate_every or usual
        balanced = self.config.data.class_weights == "balanced"
        weights = plan.data.balanced_weights() if balanced else None
        self.trainer = AlternatingTrainer(fabric, network, self.config, self.total_steps, weights)
        silent = Console(quiet=True, force_terminal=False)  # for processes other than the first
        self.display = ProgressDisplay(console if fabric.is_global_zero else silent, total_steps=self.total_steps)
        self.sums = torch.zeros(len(STATISTICS) + 1, device=fabric.device)  # since the last row; last: steps
        self.first_bad_step = torch.full((), -1, device=fabric.device)
        self.started = time.perf_counter()
        self.train_seconds = 0.0
        self.timed_steps = 0
        self.warm = False  # in a process's first step memory is mapped and kernels are chosen: start-up, not speed
        self.last_evaluation: Evaluation | None = None
        self.best: dict[str, float] = {}  # error and step of the best state, and evaluations since
        self.best_state: dict[str, Tensor] = {}  # if it will be used
        self.watch = Watch()
        report = plan.data.report
        counts = {name: list(numbers) for name, numbers in report.class_counts.items()}
        self.images = {"classes": list(report.classes), "shape": list(report.image_shape), "numbers": counts}
        self.signal = 0  # that asks to stop

    def to_the_end(self) -> Path:
        with self.display, signals_to(self._note):
            step = self._restore()
            if self.fabric.is_global_zero:
                for callback in self.callbacks:
                    callback.on_start(self.folder)
            while step < self.total_steps and not self._out_of_patience():
                self._train_step(step)
                step += 1
                self._log(step)
                stopped_by = self._largest(self.signal)  # all of them stop after the same step
                if step % self.config.run.checkpoint_every == 0 or step == self.total_steps or stopped_by:
                    self._checkpoint(step)
                if stopped_by:
                    resume = f"Stopped. Continue with: torchcaps train --resume {self.folder.path}"
                    raise UserError(resume, exit_code=128 + stopped_by)
            if step < self.total_steps:
                self.display.say(f"No better evaluation since step {self.best['step']:.0f}: stopping early.")
                self._checkpoint(step)
            self._finish(step)
        return self.folder.path

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: the step itself hangs
        self.signal = number

    def _train_step(self, step: int) -> None:
        started = time.perf_counter()
        statistics = self.trainer.step(self.batches.at(step).on(self.fabric.device), step)
        self.sums += torch.cat([statistics, statistics.new_ones(1)])
        fresh_trouble = (self.first_bad_step < 0) & ~statistics.isfinite().all()
        self.first_bad_step = torch.where(fresh_trouble, step + 1, self.first_bad_step)
        self.display.advance(step + 1)
        if self.fabric.device.type != "cpu":
            torch.accelerator.synchronize()  # or the clock would stop before the step is done
        if self.warm:
            self.train_seconds += time.perf_counter() - started
            self.timed_steps += 1
        self.warm = True

    def _log(self, step: int) -> None:
        evaluating = step % self.evaluate_every == 0 or step == self.total_steps
        if not evaluating and step % self.config.run.log_every:
            return
        self._check_finite(step)
        if evaluating:
            split = self._judging_split()
            run = self.config.run
            alike = step < self.total_steps or run.keep == "best"  # states are compared on the same images
            on_the_way = run.evaluation_images if alike else None
            self.last_evaluation = self._evaluate(split, on_the_way)
            self._remember(step, self.last_evaluation)
        row: dict[str, float | int | None] = {
            "step": step,
            "epoch": round(step / self.batches.steps_per_epoch, 4),
            "seconds": round(self.train_seconds, 3),
            "images_per_second": round(self._images_per_second(), 1),
            "learning_rate": self.config.optimiser.learning_rate
            * rate_factor(step - 1, self.total_steps, self.config.optimiser),
            "evaluation_error": self.last_evaluation.error_percent if evaluating and self.last_evaluation else None,
        }
        self._gather_sums()
        if not self.fabric.is_global_zero:
            return
        row |= dict(zip(STATISTICS, (self.sums[:-1] / self.sums[-1]).tolist()))
        row |= self.trainer.coefficient_statistics()
        self.sums.zero_()
        self.folder.append_metrics(row)
        self.display.report(row, epochs=-(-self.total_steps // self.batches.steps_per_epoch))
        for remark in self.watch.remarks(row):
            self.display.say(remark)
        for callback in self.callbacks:
            callback.on_row(row)

    def _remember(self, step: int, evaluation: Evaluation) -> None:
        """Keep the state that is best on the validation images, if that is what will be used."""
        if self.plan.data.validation is None or (self.config.run.keep != "best" and not self.config.run.patience):
            return
        if self.best and evaluation.error_percent >= self.best["error"]:
            self.best["since"] += 1
            return
        self.best = {"error": evaluation.error_percent, "step": step, "since": 0}
        if self.config.run.keep == "best":
            self.best_state = {name: part.clone() for name, part in self.trainer.trained_network().state_dict().items()}

    def _out_of_patience(self) -> bool:
        patience = self.config.run.patience
        return patience is not None and self.best.get("since", 0) >= patience

    def _kept_network(self) -> Network:
        """The network to use: the best one, if it is kept and was not the last."""
        network = self.trainer.trained_network()
        if not self.best_state or not self.best["since"]:
            return network
        self.display.say(f"The best state, of step {self.best['step']:.0f}, is used.")
        return network.copy_with(self.best_state)

    def _gather_sums(self) -> None:
        """Add the statistics of all processes up in the first, and start afresh in the others."""
        self.sums = self.fabric.all_reduce(self.sums, reduce_op="sum")  # type: ignore[assignment]
        if not self.fabric.is_global_zero:
            self.sums.zero_()

    def _images_per_second(self) -> float:
        return self.timed_steps * self.batches.batch_size / self.train_seconds if self.timed_steps else 0.0

    def _check_finite(self, step: int) -> None:
        bad = int(self.fabric.all_reduce(self.first_bad_step, reduce_op="max"))  # type: ignore[arg-type]
        if bad < 0 and self.trainer.is_finite():
            return
        checkpoints = self.folder.checkpoints.paths()
        kept = f"The last good checkpoint is {checkpoints[-1]}." if checkpoints else "No checkpoint had been made yet."
        where = f"at step {bad}" if bad >= 0 else f"in the weights by step {step}"
        smaller = "learning rate, or a smaller gamma" if self.trainer.ascent else "learning rate"
        raise UserError(
            f"Training produced numbers that are not finite {where}: the steps are too large. Choose a smaller "
            f"{smaller}. {kept}"
        )

    def _judging_split(self) -> Split:
        """The images that curves are made of: held out, or else the test images."""
        data = self.plan.data
        return data.test if data.validation is None else data.validation

    def _evaluate(self, split: Split, limit: int | None = None, network: Network | None = None) -> Evaluation:
        network = network or self.trainer.trained_network()
        if self.fabric.world_size > 1:  # running means are each process's own until its next step
            for buffer in network.buffers():
                buffer.detach().copy_(self.fabric.broadcast(buffer.detach()))
        return self.plan.evaluate(network, split, self.fabric, limit)

    def _checkpoint(self, step: int) -> None:
        self._check_finite(step)
        self._gather_sums()
        if self.fabric.is_global_zero:
            best = {f"best.{name}": tensor for name, tensor in self.best_state.items()}
            tensors = self.trainer.tensors() | best | {"sums": self.sums}
            seconds = time.perf_counter() - self.started
            state = {
                "seconds": seconds,
                "train_seconds": self.train_seconds,
                "timed_steps": self.timed_steps,
                "threads": torch.get_num_threads(),
                "processes": self.fabric.world_size,
                "images": self.images,
                "best": self.best,
                "precision": self.fabric._precision.state_dict(),  # the scale of 16-mixed
                "settings": self.config.determining(),
            }
            self.folder.checkpoints.save(step, tensors, state)
        self.fabric.barrier()

    def _restore(self) -> int:
        """Continue where the newest checkpoint left off; returns the number of steps already taken."""
        found = self.folder.checkpoints.load_newest(
            self.config.determining(), self.display.say, self._continue_from, images=self.images
        )
        step = 0
        if found is not None:
            _, state = found
            step = int(state["step"])
            self.started -= state["seconds"]
            self.display.say(f"Continuing after step {step} of {self.total_steps}.")
            threads, processes = torch.get_num_threads(), self.fabric.world_size
            before, among = state.get("threads"), state.get("processes", processes)
            if (before, among) != (threads, processes):
                self.display.say(
                    f"The run had {before} thread(s) in each of {among} process(es), and now has {threads} in "
                    f"{processes}: it will differ in the last bits from one that was never stopped. "
                    f"--threads {before} --devices {among} avoids that."
                )
        if self._largest(step) != -self._largest(-step):
            raise UserError(
                f"The processes found different checkpoints, one of step {step}: give a folder that all of them see."
            )
        if not self.fabric.is_global_zero:
            return step
        if damaged := self.folder.forget_metrics_after(step):
            self.display.say(f"{damaged} damaged row(s) of metrics.csv were dropped.")
        return step

    def _continue_from(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Take over what a checkpoint holds; :class:`DamagedFile` if it is not what this run would have saved."""
        try:
            self.trainer.load_tensors(tensors)
            self.best_state = {name: part.to(self.fabric.device) for name, part in within(tensors, "best").items()}
            if self.fabric.is_global_zero:
                self.sums.copy_(tensors["sums"])
            self.fabric._precision.load_state_dict(state.get("precision", {}))
            self.train_seconds, self.timed_steps = float(state["train_seconds"]), int(state["timed_steps"])
            self.best = {name: float(state["best"][name]) for name in state["best"]}
            numbers = [state["seconds"], self.train_seconds, *self.best.values(), *self.sums.tolist()]
            intact = all(map(math.isfinite, numbers)) and set(self.best) in (set(), {"error", "step", "since"})
            intact = intact and 0 < state["step"] <= self.total_steps and self.trainer.is_finite()
            if self.best and self.config.run.keep == "best":
                self.trainer.trained_network().copy_with(self.best_state)  # or it is none of this network
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise DamagedFile(f"The checkpoint is not one of this run ({str(error).splitlines()[0][:200]}).") from error
        if not intact:
            raise DamagedFile("The checkpoint holds numbers that no run has.")

    def _largest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        if self.fabric.world_size == 1:
            return number
        return int(self.fabric.all_reduce(torch.tensor(number), reduce_op="max"))  # type: ignore[arg-type]

    def _finish(self, step: int) -> None:
        data = self.plan.data
        network = self._kept_network()
        last = self.last_evaluation if step == self.total_steps else None  # on the way it is of fewer images
        last = last or self._evaluate(self._judging_split())
        test = last if data.validation is None else self._evaluate(data.test, network=network)
        validation_error = None
        if data.validation is not None:
            chosen = self.best and self.config.run.keep == "best"
            if chosen and self.config.run.evaluation_images:  # chosen by some of them
                validation_error = self._evaluate(data.validation, network=network).error_percent
            else:
                validation_error = self.best["error"] if chosen else last.error_percent
        if not self.fabric.is_global_zero:
            return
        if never := [short(name) for name, found in zip(data.classes, test.found) if not found]:
            self.display.say(f"No test image was taken for {', '.join(never[:20])}.")
        network.save(self.folder.network, settings=self.config.determining())
        config = self.config
        RunResult(
            data=config.data.name,
            model=config.model.name,
            routing=config.routing.name if config.model.name == "capsnet" else None,
            reconstruction=network.decoder is not None,
            seed=config.run.seed,
            steps=step,
            epochs=round(step / self.batches.steps_per_epoch, 3),
            batch_size=self.batches.batch_size,
            images_seen=step * self.batches.batch_size,
            test_error_percent=test.error_percent,
            test_images=test.images,
            validation_error_percent=validation_error,
            train_images_per_second=round(self._images_per_second(), 1),
            evaluate_images_per_second=round(test.images_per_second, 1),
            parameters=network.numbers(),
            peak_memory_mb=round(peak_memory_mb(self.fabric.device), 1),
            train_seconds=round(self.train_seconds, 2),
            seconds=round(time.perf_counter() - self.started, 2),
            threads=torch.get_num_threads(),
            processes=self.fabric.world_size,
            device=str(self.fabric.device),
            processor=processor_name(self.fabric.device),
            versions=versions(),
            commit=commit(),
        ).write(self.folder.result)
        for callback in self.callbacks:
            callback.on_finish(Finished(self.folder, self.plan, network, test))
