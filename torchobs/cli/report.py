"""``torchobs report`` and ``compare``: a run as one file, and what differs between two."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.cli import arguments
from torchobs.cli.arguments import CommandError, tolerant
from torchobs.document.text import render, style_for
from torchobs.support import text as text_format

if TYPE_CHECKING:
    from torchobs.document.kept import Kept
    from torchobs.ranks.runs import Chosen

_DESCRIPTION = """\
Write a report on a run as one file: how it ended and why, loss, gradients and learning rate, anomalies, where the time went,
memory, layers, ranks, and how it was started. It needs nothing but the flight files, of a run that is alive, dead or copied
from elsewhere, or what was kept of a run.

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


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = arguments.parser("report", "torchobs report [options] [RUN]", _DESCRIPTION, _EXAMPLES)
    run = "A run_id or its beginning, a job's name, a flight or kept file, a directory of them. [default: the latest run]"
    parser.add_argument("run", nargs="?", metavar="RUN", help=run)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="Where to write it: .html, .md or .json. [default: report.html]"
    )
    parser.add_argument("--plots", metavar="DIR", type=Path, help="Also draw each chart into a file there; needs matplotlib.")
    parser.add_argument("--format", choices=_DRAWN, default="png", help="Format of these files. [default: png]")
    arguments.add(parser, arguments.DIRECTORY)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run ``torchobs report`` with these arguments and return its exit status."""
    options = parser().parse_args(list(argv))
    from torchobs.document import files, kept  # slow to import

    output = options.output if options.output is not None else None if options.plots else Path("report.html")
    if output is not None:
        _check(output)
    chosen = arguments.read(lambda: kept.find(options.run, options.flight_dir))
    lines = [_plots(chosen, options.plots, options.format)] if options.plots is not None else []
    if output is not None:
        _write(output, files.report_text(chosen, output.suffix))
        if isinstance(chosen, kept.Kept):
            names, ranks = chosen.side[:2], len(chosen.data["ranks"])
        else:
            names, ranks = chosen.ranks[0].names, len(chosen.ranks)
        run = f"{' '.join(names)} ({text_format.plural(ranks, 'rank')})"
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


def _plots(chosen: Chosen | Kept, directory: Path, form: str) -> str:
    from torchobs.document import kept

    try:
        from torchobs.document.plots import draw
    except ModuleNotFoundError as missing:
        raise CommandError(f"{missing.name} is not installed: pip install 'torchobs[report]'") from None
    try:
        drawn = draw(kept.report_on(chosen), directory, form)
    except OSError as problem:
        raise CommandError(f"{text_format.clean(directory)} cannot be written to: {problem.strerror or problem}") from None
    return f"{text_format.plural(len(drawn), 'chart')} in {text_format.clean(directory)}"


_COMPARE = """\
Compare two runs: settings, arguments, versions and commit that differ, median and range of step times, memory, goodput, and
loss and gradient norm over the same steps of the training: a run that was resumed is set beside the steps that it had
behind it. B is shown relative to A."""

_COMPARE_EXAMPLES = """\
examples:
  torchobs compare 4711 4712                  two runs by run_id or the beginning of it, or by their jobs' names
  torchobs compare good/ bad/ -o compare.html two directories of flight files, as a page with both runs' curves
  torchobs compare 4711 4712 --json | jq '.quantities[] | select(.change)'

Exit status: 0 if both runs were read, 2 if not."""


def compare_parser() -> argparse.ArgumentParser:
    """Return the parser of ``torchobs compare``."""
    parser = arguments.parser("compare", "torchobs compare [options] A B", _COMPARE, _COMPARE_EXAMPLES)
    for name in ("first", "second"):
        run = "A run_id or its beginning, a job's name, a flight file, a directory of them, or a kept file."
        parser.add_argument(name, metavar="RUN", help=run)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="Write a page (.html), Markdown (.md) or JSON (.json)."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON for programs; docs/report.md describes its fields.")
    arguments.add(parser, arguments.DIRECTORY)
    return parser


def compare(argv: Sequence[str]) -> int:
    """Run ``torchobs compare`` with these arguments and return its exit status."""
    options = compare_parser().parse_args(list(argv))
    from torchobs.document import compare as comparing
    from torchobs.document import files, kept

    if options.output is not None:
        _check(options.output)
    runs = (arguments.read(partial(kept.find, run, options.flight_dir)) for run in (options.first, options.second))
    comparison = comparing.compare(*map(kept.side_for, runs))
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
