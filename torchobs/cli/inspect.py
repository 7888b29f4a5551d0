"""``torchobs inspect``: report on a run, from its flight files alone: the diagnosis first, then the data behind it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from torchobs.cli import arguments
from torchobs.cli.arguments import tolerant
from torchobs.config.options import Option, integer
from torchobs.document import kept
from torchobs.document.kept import Kept
from torchobs.document.run import Options, document
from torchobs.document.text import render, style_for
from torchobs.ranks.runs import choose

_MOST = integer(0, 1_000_000)  # beyond any file's capacity
_STEPS_OPTION = Option("steps", _MOST, "Number of last steps to list.", "10", flag="--steps", metavar="N")
_EVENTS_OPTION = Option("events", _MOST, "Number of last events to list.", "20", flag="--events", metavar="N")

_DESCRIPTION = """\
Report what happened to a run: how each rank ended, what went wrong first, the last steps, where the time went, memory, events.
It reads the flight files, in which the ranks record themselves and which stay however they end; nothing has to run. Without a
path it reads the directory that this user's trainings write to. Of several runs there the latest is reported; --run selects
another."""

_EXAMPLES = """\
examples:
  torchobs inspect                                  the latest run on this machine
  torchobs inspect /dev/shm/torchobs-1000 --run 4711
                                                    another run, by its run_id or the beginning of it, or by its job's name
  torchobs inspect r0-3f…9a.flight --steps 50       one rank; also from a copy (kubectl cp), or a part of one
  torchobs inspect --json | jq '.ranks[] | {rank, state, exit}'
  torchobs inspect --json | jq -r .action           restart, do_not_restart, exclude_node or unknown

Exit status: 0 if every rank is alive or finished, 1 if one failed, was lost or hangs, 2 if there was nothing to read."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = arguments.parser("inspect", "torchobs inspect [options] [FILE|DIR …]", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("paths", nargs="*", metavar="FILE|DIR", type=Path, help="Flight files, or directories of them.")
    parser.add_argument(
        "--run", metavar="RUN", help="The run to report: its run_id or its beginning, or a job's name. [default: the latest]"
    )
    arguments.add(parser, _STEPS_OPTION, default=10)
    arguments.add(parser, _EVENTS_OPTION, default=20)
    parser.add_argument("--json", action="store_true", help="Print JSON for programs; docs/terminal.md describes its fields.")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run ``torchobs inspect`` with these arguments and return its exit status."""
    options = parser().parse_args(list(argv))
    out, wanted = tolerant(sys.stdout), Options(options.steps, options.events)
    name = str(options.paths[0]) if len(options.paths) == 1 and not options.run else options.run
    chosen = arguments.read(lambda: choose(options.paths, name) if options.paths and name is options.run else kept.find(name))
    if options.json:
        if isinstance(chosen, Kept):
            data = chosen.data
        else:
            data = document(chosen.ranks, chosen.launchers, chosen.bad, wanted, chosen.before)
        out.write(json.dumps(data, indent=2, allow_nan=False) + "\n")
    else:
        lines = [*render(kept.report_on(chosen, wanted), style_for(out)), *chosen.notes]
        out.write("".join(f"{line}\n" for line in lines))
    if isinstance(chosen, Kept):
        states = [process["state"] for process in (*chosen.data["ranks"], *chosen.data["launchers"])]
    else:
        states = [report.state for report in (*chosen.ranks, *chosen.launchers)]
    return int(any(state not in {"alive", "finished"} for state in states))
