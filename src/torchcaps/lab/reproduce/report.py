"""The report: everything that was measured, beside what the paper says. Made from the files of a folder alone."""

from __future__ import annotations

import base64
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from torchcaps.atomic import DamagedFile, write_atomically
from torchcaps.data.report import counted
from torchcaps.errors import UserError
from torchcaps.lab.reproduce import figures
from torchcaps.lab.reproduce.budgets import ASCENDING, BOOKKEEPING, BUDGETS, differences
from torchcaps.lab.reproduce.figures import Column, Comparison
from torchcaps.lab.reproduce.paper import BENCHMARKS, METHODS, SECONDS_PER_100_STEPS, Benchmark
from torchcaps.lab.results import CURVES, RESULTS, Results, read_record
from torchcaps.plots.files import save

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
code { background: #f3f3f3; padding: 0 0.2rem; }
"""
RUNTIME = "runtime.json"
VERSIONS = {"Python": "python", "torch": "torch", "torchcaps": "torchcaps"}
MEASURED = ("seconds_per_100_steps", "spread_percent", "rounds", "batch_size", "threads", "cpu", "torch")
DRAWN = ("own_capsules", "foreign_capsules", "class_means")
VIEWS = "here, views averaged"
Table = list[list[str]]


class Report:
    """What can be said of the results in a folder; parts that have not been measured are left out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pictures = folder / "pictures"
        self.runtime = folder / RUNTIME
        self.reconstruction = folder / "reconstruction.json"
        self.reconstruction_picture = self.pictures / "reconstruction.png"
        self.results = Results.read(folder)
        columns = [(benchmark, figures.columns(self.results, benchmark)) for benchmark in BENCHMARKS.values()]
        self.columns = [(benchmark, found) for benchmark, found in columns if found]
        self.runs = [run for _, found in self.columns for column in found.values() for run in column.runs]

    @property
    def has_reconstruction(self) -> bool:
        return self.reconstruction.exists() and self.reconstruction_picture.exists()

    @property
    def budget(self) -> str:
        """The budget that the runs, or the measurements, were made at."""
        if self.runs:
            return self.runs[0].experiment
        return str(read_record(self.runtime, "budget")["budget"]) if self.runtime.exists() else ""

    def write(self) -> None:
        """``report.md`` with its pictures, and ``report.html`` with everything inside."""
        self.pictures.mkdir(parents=True, exist_ok=True)
        text = "\n\n".join(self._parts()) + "\n"
        write_atomically(self.folder / "report.md", text.encode())
        write_atomically(self.folder / "report.html", _html(text, self.folder).encode())

    def _parts(self) -> Iterator[str]:
        yield f"# The paper's table and figures, budget `{self.budget}`"
        yield (
            '"Routing Towards Discriminative Power of Class Capsules" beside what was measured here. Made by '
            f"`torchcaps reproduce` with `--budget {self.budget}`; every run is a line of [{RESULTS}]({RESULTS}), its "
            f"curve is in [{CURVES}]({CURVES}), and `torchcaps reproduce report --from DIR` makes the page anew."
        )
        if self.budget == "smoke":
            yield (
                "**The `smoke` budget shows that the machinery works. Its networks are tiny, its data are embedded "
                "stand-ins, and its numbers mean nothing.**"
            )
        if self.runs:
            yield from self._machine()
            yield from self._table()
            yield from self._conclusions()
            yield from self._convergence()
        if self.runtime.exists():
            yield from self._runtime()
        if self.has_reconstruction:
            yield from self._reconstruction()
        if self.runs:
            yield from self._settings()
            yield from self._runs()

    def _machine(self) -> Iterator[str]:
        places = {
            f"{counted(run.processes, 'process')} of {counted(run.threads, 'thread')} on {run.processor}, "
            + ", ".join(f"{name} {run.versions.get(key, '?')}" for name, key in VERSIONS.items())
            for run in self.runs
        }
        hours = sum(run.seconds for run in self.runs) / 3600
        yield f"{len(self.runs)} training runs, {hours:.1f} hours in all: {'; '.join(sorted(places))}."

    def _table(self) -> Iterator[str]:
        yield "## Classification"
        yield "Test error in percent: mean ± standard deviation over seeds where there are several."
        rows: Table = []
        methods = [method for method in METHODS if any(method in found for _, found in self.columns)]
        for benchmark, found in self.columns:
            rows.append([benchmark.title, "paper", *(_number(benchmark.published.get(method)) for method in methods)])
            told: dict[str, Callable[[Column], str]] = {"here": _error}
            if any(column.mean_of_views is not None for column in found.values()):
                told[VIEWS] = lambda column: _number(column.mean_of_views)
            told["training images"] = lambda column: f"{column.images_seen:,}"
            for heading, tell in told.items():
                rows.append(["", heading, *(tell(found[method]) if method in found else "–" for method in methods)])
        yield _markdown(["", "", *(METHODS[method].title for method in methods)], rows)
        yield (
            "DR: dynamic routing. x/FC: without reconstruction network. uniform: all coefficients fixed at their start "
            "value, our own baseline. The overlapping digits' test error counts an image as wrong unless both digits "
            "are found; the paper gives one figure for its two methods there."
        )
        if any(heading == VIEWS for _, heading, *_ in rows):
            yield "Views averaged: each test image, also shifted by a pixel, and mirrored where training mirrored."
        if self.budget != "smoke":
            yield from self._goals()

    def _goals(self) -> Iterator[str]:
        lines = []
        for benchmark, found in self.columns:
            best = min(found.values(), key=lambda column: column.mean)
            gap = best.mean - benchmark.goal
            met = "reached" if gap <= 0 else f"{gap:.2f} points above it"
            lowest = f", the lowest of {len(found)} means" if len(found) > 1 else ""
            paper = BUDGETS["paper"].config(benchmark, best.method, 0).run
            lines.append(
                f"- {benchmark.title}: {benchmark.goal:g} % aimed at, {best.mean:.2f} % by {best.title}{lowest}: "
                f"{met}, after {best.runs[0].images_seen:,} training images of the "
                f"{(paper.steps or 0) * (paper.batch_size or 0):,} that the paper's settings have."
            )
        yield "How far that is from what the budget aims at, about the best of the paper:"
        yield "\n".join(lines)

    def _conclusions(self) -> Iterator[str]:
        comparisons = [pair for benchmark, found in self.columns for pair in _comparisons(benchmark, found)]
        yield "## What the numbers allow to say"
        if not comparisons:
            yield "Nothing yet: no method has run beside dynamic routing or uniform coefficients on the same data."
            return
        if self.budget == "smoke":
            yield "Nothing, at this budget. What is said of real runs looks as follows."
        yield (
            "Differences in points of test error, over the seeds that both methods have, with their 95 % interval; "
            "below zero is better. With several seeds the interval is Student's over the seeds, and never less than "
            "that of counting mistakes, as if every network had test images of its own. With one seed it is the "
            "latter alone, which does not know what another seed would have given. One in twenty would lie outside by "
            "chance."
        )
        rows = [
            [
                pair.method.benchmark.title,
                f"{pair.method.title} against {pair.reference.title}",
                f"{pair.mean:+.2f} ± {pair.interval:.2f}",
                str(len(pair.seeds)),
                "–" if pair.published is None else f"{pair.published:+.2f}",
                pair.verdict,
            ]
            for pair in comparisons
        ]
        yield _markdown(["", "", "difference", "n", "paper", ""], rows)
        if self.budget != "smoke":
            yield _summary(comparisons)

    def _convergence(self) -> Iterator[str]:
        yield "## Convergence"
        yield (
            "Error on held-out training images (`validation` of the recipe), or on test images if there are none; mean "
            "over seeds, the band is their range. A diamond is the final error on all of these images, where the curve "
            "was taken on some of them (`evaluation_images`). Seconds leave out evaluations. They are those of the "
            "runs by the same code on the same processor, of which there are most; in the tables, their median for an "
            "iteration times the iterations of all seeds. Other work ran beside them, so they cannot be compared "
            "closely."
        )
        for benchmark, found in self.columns:
            figure = figures.convergence(benchmark, found)
            yield self._picture(figure, f"convergence-{benchmark.data}", f"Convergence on {benchmark.title}")
            timed = figures.timed(found)
            yield _markdown(
                [
                    f"iterations (seconds) to reach on {benchmark.title}",
                    *(f"{error:g} %" for error in benchmark.milestones),
                ],
                [
                    [column.title, *(_reached(column, timed.get(method), error) for error in benchmark.milestones)]
                    for method, column in found.items()
                ],
            )

    def _runtime(self) -> Iterator[str]:
        measured = read_record(self.runtime, *MEASURED)
        seconds: dict[str, float] = measured["seconds_per_100_steps"]
        spread = measured["spread_percent"]
        whole = isinstance(seconds, dict) and isinstance(spread, dict) and bool(seconds.get("dr"))
        if not (whole and seconds.keys() <= METHODS.keys() & spread.keys()):
            raise DamagedFile(f"{self.runtime} is damaged. Remove it, and it is measured anew.")
        published = SECONDS_PER_100_STEPS
        yield "## Time per 100 steps"
        yield (
            f"All methods in turns in one measurement, median of {measured['rounds']} round(s), MNIST network, batch "
            f"{measured['batch_size']}, {measured['threads']} thread(s) of {measured['cpu']}, "
            f"torch {measured['torch']}. The paper does not name its hardware: ratios to DR are what can be compared."
        )
        figure = figures.bars(seconds, published)
        yield self._picture(figure, "runtime", "Time per 100 steps by method")
        yield _markdown(
            ["", *(METHODS[method].title for method in seconds)],
            [
                ["seconds here", *(f"{value:.2f}" for value in seconds.values())],
                ["± %", *(f"{spread[method]:g}" for method in seconds)],
                ["of DR's time, here", *(f"{value / seconds['dr']:.2f}" for value in seconds.values())],
                [
                    "of DR's time, paper",
                    *(
                        f"{published[method] / published['dr']:.2f}" if method in published else "–"
                        for method in seconds
                    ),
                ],
            ],
        )

    def _reconstruction(self) -> Iterator[str]:
        numbers = read_record(self.reconstruction, *(f"squared_error_{name}" for name in DRAWN))
        yield "## Reconstruction"
        yield (
            "The first 100 Fashion-MNIST test images that the L2/FC network, trained without reconstruction, "
            "classifies correctly; what the DR network's decoder draws of them from its own class capsules; and what "
            "the same decoder draws from the capsules of the L2/FC network."
        )
        yield "![Reconstructions by one decoder from the capsules of two networks](pictures/reconstruction.png)"
        own, foreign, means = (numbers[f"squared_error_{name}"] for name in DRAWN)
        outcome = (
            "That is no better than drawing the mean of the class: what gets across is the class, which the decoder is "
            "told anyway, and not how the thing looks."
            if foreign >= means
            else "That is better than drawing the mean of the class: something of how the thing looks gets across."
        )
        yield (
            f"Squared error, summed over pixels, mean over images: {own:.1f} from its own capsules, {foreign:.1f} from "
            f"the other network's, {means:.1f} if the mean training image of the right class is drawn. {outcome} "
            "Nothing ties the components of one network's capsules to those of another that was trained apart from it."
        )

    def _settings(self) -> Iterator[str]:
        yield "## Settings"
        yield (
            "What is not as in the recipe of the paper's row, the paper's → ours. Of runs from before version 0.2, "
            "whose settings had other names: what was not at its default."
        )
        lines = []
        for benchmark, found in self.columns:
            alike: dict[str, list[str]] = {}
            for column in found.values():
                alike.setdefault(_changes(column), []).append(column.title)
            lines += [f"- {benchmark.title}, {', '.join(titles)}: {changes}" for changes, titles in alike.items()]
        yield "\n".join(lines)
        yield "What the paper does not give, and what was chosen: `docs/choices.md` and `docs/hyperparameters.md`."

    def _runs(self) -> Iterator[str]:
        yield "## Runs"
        heading = ["run", "test error, %", "steps", "epochs", "training images", "training s", "commit"]
        rows = [
            [
                run.run,
                f"{run.test_error_percent:.2f}",
                str(run.steps),
                f"{run.epochs:g}",
                f"{run.images_seen:,}",
                f"{run.train_seconds:.0f}",
                _short(run.commit),
            ]
            for run in self.runs
        ]
        yield _markdown(heading, rows)

    def _picture(self, figure: Any, name: str, title: str) -> str:
        save(figure, self.pictures / f"{name}.png")
        return f"![{title}](pictures/{name}.png)"


def _comparisons(benchmark: Benchmark, found: figures.Columns) -> Iterator[Comparison]:
    """Every method against dynamic routing, as in the paper, and against uniform coefficients if all else is equal."""
    uniform = next((method for method in found if method.startswith("uniform")), "")
    for method, column in found.items():
        references = [] if method == "dr" else ["dr"]
        if method not in ("dr", uniform) and benchmark.reconstructs(method) == benchmark.reconstructs(uniform):
            references.append(uniform)
        for reference in references:
            if reference in found and column.errors.keys() & found[reference].errors.keys():
                yield Comparison(column, found[reference])


def _summary(comparisons: Sequence[Comparison]) -> str:
    """The comparisons in words, as far as counting goes."""
    lines = []
    for name, title in (("dr", "dynamic routing"), ("uniform", "uniform coefficients")):
        against = [comparison for comparison in comparisons if comparison.reference.method.startswith(name)]
        if name == "dr":
            against = [comparison for comparison in against if not comparison.method.method.startswith("uniform")]
        several = [comparison.verdict for comparison in against if len(comparison.seeds) > 1]
        outcome = f"it is better {several.count('better')} and worse {several.count('worse')} times"
        told = (
            f"{outcome} (comparisons over several seeds: {len(several)})" if several else "nothing over several seeds"
        )
        lines.append(f"- Discriminative routing against {title}: {told}; single runs decide nothing.")
    known = [(comparison, published) for comparison in comparisons if (published := comparison.published) is not None]
    inside = sum(abs(published - comparison.mean) <= comparison.interval for comparison, published in known)
    if known:
        lines.append(
            "- The difference that the paper reports lies within the interval measured here in "
            f"{inside} of {len(known)} cases. Where it does, the runs neither confirm nor contradict it."
        )
    return "\n".join(lines)


def _changes(column: Column) -> str:
    """In what the settings of a method differ from the paper's; as they were recorded if their names are older."""
    settings = column.runs[0].settings
    if not all("." in name for name in settings):
        told = ("data", "routing", "reconstruction")  # by the row and the column
        kept = {
            name: value for name, value in settings.items() if name not in told and f"run.{name}" not in BOOKKEEPING
        }
        return ", ".join(f"`{name}` {_value(value)}" for name, value in kept.items())
    changes = differences(settings, column.benchmark, column.method)
    if METHODS[column.method].routing not in ASCENDING:
        changes = {name: change for name, change in changes.items() if not name.startswith("ascent.")}
    return ", ".join(f"`{name}` {_value(old)} → {_value(new)}" for name, (old, new) in changes.items()) or "none"


def _error(column: Column) -> str:
    spread = f" ± {column.deviation:.2f}" if column.deviation is not None else ""
    return f"{column.mean:.2f}{spread} (n = {len(column.runs)})"


def _short(commit: str | None) -> str:
    """An abbreviated commit that still says if the source was changed."""
    if commit is None:
        return "–"
    return commit[:10] + ("-dirty" if commit.endswith("-dirty") else "")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _value(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _reached(column: Column, timed: Column | None, error: float) -> str:
    """The mean number of steps over seeds, if all of them got there, and their time at the pace of the timed runs."""
    found = [figures.first_reached(curve, error) for curve in column.curves]
    reached = [place for place in found if place is not None]
    if len(reached) < len(found):
        return "–" if not reached else f"{len(reached)} of {len(found)} seeds"
    steps = statistics.fmean(step for step, _ in reached)
    if timed is None:
        return f"{steps:.0f}"
    pace = statistics.median(run.train_seconds / run.steps for run in timed.runs)
    return f"{steps:.0f} ({steps * pace:.0f} s)"


def _markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _html(text: str, folder: Path) -> str:
    """The same as a page of its own, with the pictures inside; links lead to the files beside it."""
    body: str = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)

    def embedded(match: re.Match[str]) -> str:
        data = base64.b64encode((folder / match.group(1)).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    body = re.sub(r'src="(pictures/[\w-]+\.png)"', embedded, body)
    title = "Routing towards discriminative power: reproduction"
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n{body}</html>\n"
    )


def rebuild(folder: Path) -> Path:
    """Make the report of a folder anew from its results, and nothing else; returns the page."""
    if not (folder / RESULTS).is_file():
        raise UserError(f"There is no {folder / RESULTS}: give a folder that 'torchcaps reproduce' has written to.")
    report = Report(folder)
    if len({run.experiment for run in report.runs}) > 1:
        raise UserError(f"{folder / RESULTS} has runs of several budgets: keep those of one.")
    if report.budget not in BUDGETS:
        raise UserError(f"{folder / RESULTS} has no runs of the paper's table.")
    report.write()
    return folder / "report.md"
