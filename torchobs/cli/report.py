"""``torchobs report``, ``compare`` and ``runs``: a run as one file, two runs, all runs of this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torchobs.cli import arguments
from torchobs.cli.arguments import CommandError, tolerant
from torchobs.document.blocks import Table
from torchobs.document.text import render, style_for, table
from torchobs.flight.events import plain
from torchobs.ranks.rank_view import RankView
from torchobs.ranks.runs import Chosen, RunFiles, default_directory, find, listing, load
from torchobs.support import text as text_format

_DESCRIPTION = """\
Write a report on a run as one file: how it ended and why, loss, gradients and learning rate, anomalies, where the time went,
memory, layers, ranks, and how it was started. It needs nothing but the flight files, of a run that is alive, dead or copied
from elsewhere.

The file's name chooses the format: .html is a page that opens offline, prints and needs no script; .md is for an issue; .json
is for programs (docs/report.md)."""

_EXAMPLES = """\
examples:
  torchobs report                                   the latest run on this machine, to report.html
  torchobs report 4711 -o report.html               a run by its run_id or the beginning of it, or by its job's name
  torchobs report r0-3f…9a.flight -o report.md      one rank; also from a copy (kubectl cp), or a part of one
  torchobs report --plots figures --format svg      its charts as files too, drawn by matplotlib
  torchobs runs                                     which runs there are

Exit status: 0 if the report was written, 2 if there was nothing to read."""

_DRAWN = ("png", "svg", "pdf")
RUNS_VERSION = 1
_RECORDS = 64
_WORST_FIRST = ("failed", "lost", "hung", "unresponsive", "alive", "finished")
_RUN_HEAD = ("run", "job", "ranks", "state", "ended by", "steps", "loss", "started", "last seen")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("report", "torchobs report [options] [RUN]", _DESCRIPTION, _EXAMPLES)
    made.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="A run_id or its beginning, a job's name, a flight file, or a directory of them. [default: the latest run]",
    )
    made.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="Where to write it: .html, .md or .json. [default: report.html]"
    )
    made.add_argument("--plots", metavar="DIR", type=Path, help="Also draw each chart into a file there; needs matplotlib.")
    made.add_argument("--format", choices=_DRAWN, default="png", help="Format of these files. [default: png]")
    arguments.add(made, arguments.DIRECTORY)
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs report`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    from torchobs.document import files  # slow to import

    output = options.output if options.output is not None else None if options.plots else Path("report.html")
    if output is not None:
        _check(output)
    chosen = arguments.found(lambda: find(options.run, options.flight_dir))
    lines = [_plots(chosen, options.plots, options.format)] if options.plots is not None else []
    if output is not None:
        _write(output, files.report_text(chosen, output.suffix))
        job_name, run_id = chosen.ranks[0].names
        run = f"{job_name} {run_id} ({text_format.plural(len(chosen.ranks), 'rank')})"
        lines.append(f"report of {run} in {text_format.clean(output)}")
    sys.stdout.write("".join(f"{line}\n" for line in (*lines, *map(text_format.clean, chosen.notes))))
    return 0


def _check(output: Path) -> None:
    """Raise ``CommandError`` when a file's name asks for no known format."""
    from torchobs.document import files

    try:
        files.check_format(output)
    except ValueError as problem:
        raise CommandError(str(problem), arguments.NOTHING) from None


def _write(output: Path, words: str) -> None:
    """Write the file. Raises ``CommandError`` when it cannot be written."""
    from torchobs.document import files

    try:
        files.write(output, words)
    except OSError as problem:
        raise CommandError(f"{text_format.clean(output)} cannot be written: {problem.strerror or problem}") from None


def _plots(chosen: Chosen, directory: Path, form: str) -> str:
    from torchobs.document.run import run_document

    try:
        from torchobs.document.plots import draw
    except ModuleNotFoundError as missing:
        raise CommandError(f"{missing.name} is not installed: pip install 'torchobs[report]'") from None
    try:
        drawn = draw(run_document(chosen), directory, form)
    except OSError as problem:
        raise CommandError(f"{text_format.clean(directory)} cannot be written to: {problem.strerror or problem}") from None
    return f"{text_format.plural(len(drawn), 'chart')} in {text_format.clean(directory)}"


_COMPARE = """\
Compare two runs: settings, arguments, versions and commit that differ, median and range of step times, memory, goodput, and
loss and gradient norm over the same steps. B is shown relative to A."""

_COMPARE_EXAMPLES = """\
examples:
  torchobs compare 4711 4712                  two runs by run_id or the beginning of it, or by their jobs' names
  torchobs compare good/ bad/ -o compare.html two directories of flight files, as a page with both runs' curves
  torchobs compare 4711 4712 --json | jq '.quantities[] | select(.change)'

Exit status: 0 if both runs were read, 2 if not."""


def compare_parser() -> argparse.ArgumentParser:
    """Return the parser of ``torchobs compare``."""
    made = arguments.parser("compare", "torchobs compare [options] A B", _COMPARE, _COMPARE_EXAMPLES)
    for name in ("first", "second"):
        made.add_argument(
            name, metavar="RUN", help="A run_id or its beginning, a job's name, a flight file, or a directory of them."
        )
    made.add_argument("-o", "--output", metavar="FILE", type=Path, help="Write a page (.html), Markdown (.md) or JSON (.json).")
    made.add_argument("--json", action="store_true", help="Print JSON for programs; docs/report.md describes its fields.")
    arguments.add(made, arguments.DIRECTORY)
    return made


def compare(given: Sequence[str]) -> int:
    """Run ``torchobs compare`` with these arguments and return its exit status."""
    options = compare_parser().parse_args(list(given))
    from torchobs.document import compare as comparing
    from torchobs.document import files

    if options.output is not None:
        _check(options.output)
    first, second = (arguments.found(partial(find, run, options.flight_dir)) for run in (options.first, options.second))
    comparison = comparing.compare(first, second)
    out, suffix = tolerant(sys.stdout), options.output.suffix.lower() if options.output is not None else ""
    if options.json or suffix == ".json":
        words = files.json_text(comparison.to_dict())
    elif suffix:
        words = files.document_text(comparing.comparison_document(comparison), suffix)
    else:
        words = "".join(f"{line}\n" for line in render(comparing.comparison_document(comparison), style_for(out)))
    if suffix:
        _write(options.output, words)
        words = f"comparison in {text_format.clean(options.output)}\n"
    out.write(words)
    return 0


class RunSummary(NamedTuple):
    """One run. Times in Unix seconds; ``state`` is the worst of its ranks', ``ended_by`` that rank's reason."""

    job_name: str
    run_id: str
    ranks: int
    world_size: int | None
    attempt: int
    state: str
    ended_by: str
    started: float
    last_seen: float
    steps: int
    loss: float | None


def _summary(run: RunFiles, reports: Sequence[RankView]) -> RunSummary:
    worst = min(reports, key=lambda report: _WORST_FIRST.index(report.state) if report.state in _WORST_FIRST else 0)
    world = worst.header.resource.get("world_size")
    first = min(run.files, key=lambda item: item.header.wall_ns)
    return RunSummary(
        job_name=worst.names[0], run_id=worst.names[1], ranks=len(reports),
        world_size=world if isinstance(world, int) else None,
        attempt=max(report.restart for report in reports) + 1, state=worst.state, ended_by=worst.reason,
        started=first.header.begun_s, last_seen=max(report.last_s for report in reports),
        steps=max(report.last_step for report in reports),
        loss=next(reversed([*reports[0].losses.values()]), None),
    )  # fmt: skip


_RUNS = """\
List the runs whose flight files are on this machine, the latest first: job, ranks, state, start, steps, the last loss, and how
they ended. A run's id, or the beginning of it, is what `inspect --run`, `report` and `compare` take."""

_RUNS_EXAMPLES = """\
examples:
  torchobs runs                               this user's runs
  torchobs runs --dir /dev/shm/torchobs-1000  those in another directory
  torchobs runs --json | jq -r '.runs[] | select(.state == "failed") | .run_id'

Exit status: 0, or 2 if there was nothing to read."""


def runs_parser() -> argparse.ArgumentParser:
    """Return the parser of ``torchobs runs``."""
    made = arguments.parser("runs", "torchobs runs [options]", _RUNS, _RUNS_EXAMPLES)
    made.add_argument("--json", action="store_true", help="Print JSON for programs; docs/report.md describes its fields.")
    arguments.add(made, arguments.DIRECTORY)
    return made


def runs(given: Sequence[str]) -> int:
    """Run ``torchobs runs`` with these arguments and return its exit status."""
    options = runs_parser().parse_args(list(given))
    directory = arguments.found(lambda: options.flight_dir or default_directory())
    try:
        listed = arguments.found(lambda: listing(directory))
    except CommandError as problem:
        raise CommandError(f"{text_format.clean(directory)}: {problem}", problem.status) from None
    bad, runs = list(listed.bad), list[RunSummary]()
    for run in listed.runs:
        reports, unreadable = load(run.newest()[0], _RECORDS, evidence=False)
        bad += unreadable
        runs += [_summary(run, reports)] if reports else []
    out = tolerant(sys.stdout)
    if options.json:
        made = {
            "version": RUNS_VERSION, "directory": str(directory), "runs": [plain(run._asdict()) for run in runs],
            "unreadable": [{"file": name, "reason": why} for name, why in bad], "left_out": listed.left_out,
        }  # fmt: skip
        out.write(json.dumps(made, indent=1, allow_nan=False) + "\n")
        return 0 if runs else arguments.NOTHING
    style = style_for(out)
    shown = Table("", _RUN_HEAD, tuple(map(_run_row, runs)), frozenset({0, 1, 3, 4}))
    missing = f"no runs in {text_format.clean(directory)}: a training writes them with torchobs.init()"
    unread = [text_format.cut(f"not read: {text_format.clean(name)}: {why}", style.width) for name, why in bad[:5]]
    out.write("".join(f"{line}\n" for line in (*(table(shown, style) if runs else [missing]), *listed.notes, *unread)))
    return 0 if runs else arguments.NOTHING


def _run_row(run: RunSummary) -> tuple[str, ...]:
    ranks = f"{run.ranks:,} of {run.world_size:,}" if run.world_size and run.world_size > run.ranks else f"{run.ranks:,}"
    again = f" (attempt {run.attempt})" if run.attempt > 1 else ""
    return (
        text_format.cut(run.run_id, 48), text_format.cut(run.job_name, 32), ranks, run.state,
        (run.ended_by.replace("_", " ") if run.ended_by != run.state else "") + again, f"{run.steps:,}",
        text_format.number(run.loss),
        text_format.moment(run.started, "%m-%d %H:%M:%S"), text_format.moment(run.last_seen, "%m-%d %H:%M:%S"),
    )  # fmt: skip
