"""``torchobs compare``: what differs between two runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torchobs.cli import arguments
from torchobs.cli.document_view import document_lines
from torchobs.cli.report import checked, written
from torchobs.cli.terminal_style import style_for, tolerant
from torchobs.diagnosis import load, text_format

_DESCRIPTION = """\
Compare two runs: settings, arguments, versions and commit that differ, median and range of step times, memory, goodput, and
loss and gradient norm over the same steps. B is shown relative to A."""

_EXAMPLES = """\
examples:
  torchobs compare 4711 4712                  two runs by run_id or the beginning of it, or by their jobs' names
  torchobs compare good/ bad/ -o compare.html two directories of flight files, as a page with both runs' curves
  torchobs compare 4711 4712 --json | jq '.quantities[] | select(.change)'

Exit status: 0 if both runs were read, 2 if not."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("compare", "torchobs compare [options] A B", _DESCRIPTION, _EXAMPLES)
    for name in ("first", "second"):
        made.add_argument(
            name, metavar="RUN", help="A run_id or its beginning, a job's name, a flight file, or a directory of them."
        )
    made.add_argument("-o", "--output", metavar="FILE", type=Path, help="Write a page (.html), Markdown (.md) or JSON (.json).")
    made.add_argument("--json", action="store_true", help="Print JSON for programs; docs/report.md describes its fields.")
    arguments.add(made, arguments.DIRECTORY)
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs compare`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    from torchobs.report import compare, write

    if options.output is not None:
        checked(options.output)
    first, second = (arguments.found(partial(load.find, run, options.flight_dir)) for run in (options.first, options.second))
    found = compare.compare(first, second)
    out = tolerant(sys.stdout)
    if options.output is not None:
        is_json = options.output.suffix.lower() == ".json"
        words = (
            write.json_text(found.to_dict())
            if is_json
            else write.document_text(compare.comparison_document(found), options.output.suffix)
        )
        written(options.output, words)
        out.write(f"comparison in {text_format.clean(options.output)}\n")
    elif options.json:
        out.write(write.json_text(found.to_dict()))
    else:
        style = style_for(out)
        out.write("".join(f"{line}\n" for line in document_lines(compare.comparison_document(found), style)))
    return 0
