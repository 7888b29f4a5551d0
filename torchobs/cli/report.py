"""``torchobs report``: a report on a run as one file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchobs.cli import arguments
from torchobs.cli.arguments import CommandError
from torchobs.diagnosis import load, text_format
from torchobs.diagnosis.load import Chosen

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
    from torchobs.report import write  # slow to import

    output = options.output if options.output is not None else None if options.plots else Path("report.html")
    if output is not None:
        checked(output)
    chosen = arguments.found(lambda: load.find(options.run, options.flight_dir))
    told = [text_format.clean(note) for note in chosen.notes]
    if output is not None:
        written(output, write.report_text(chosen, output.suffix))
        told.insert(0, f"report of {_run(chosen)} in {text_format.clean(output)}")
    if options.plots is not None:
        told.insert(0, _plots(chosen, options.plots, options.format))
    sys.stdout.write("".join(f"{line}\n" for line in told))
    return 0


def checked(output: Path) -> None:
    """Raise ``CommandError`` when a file's name asks for no known format."""
    from torchobs.report import write

    try:
        write.check_format(output)
    except ValueError as problem:
        raise CommandError(str(problem), arguments.NOTHING) from None


def written(output: Path, words: str) -> None:
    """Write the file. Raises ``CommandError`` when it cannot be written."""
    from torchobs.report import write

    try:
        write.write(output, words)
    except OSError as problem:
        raise CommandError(f"{text_format.clean(output)} cannot be written: {problem.strerror or problem}") from None


def _run(chosen: Chosen) -> str:
    job_name, run_id, _ = chosen.ranks[0].identity
    return f"{job_name} {run_id} ({text_format.plural(len(chosen.ranks), 'rank')})"


def _plots(chosen: Chosen, directory: Path, form: str) -> str:
    from torchobs.report.run import run_document

    try:
        from torchobs.report.plots import draw
    except ModuleNotFoundError as missing:
        raise CommandError(f"{missing.name} is not installed: pip install 'torchobs[report]'") from None
    try:
        files = draw(run_document(chosen), directory, form)
    except OSError as problem:
        raise CommandError(f"{text_format.clean(directory)} cannot be written to: {problem.strerror or problem}") from None
    return f"{text_format.plural(len(files), 'chart')} in {text_format.clean(directory)}"
