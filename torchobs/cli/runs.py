"""``torchobs runs``: the runs on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from torchobs.cli import arguments
from torchobs.cli.arguments import CommandError
from torchobs.cli.table import Column, table
from torchobs.cli.terminal_style import STATE_COLOURS, TerminalStyle, style_for, tolerant
from torchobs.diagnosis import load, text_format
from torchobs.report.runs import VERSION, RunSummary, list_runs

_DESCRIPTION = """\
List the runs whose flight files are on this machine, the latest first: job, ranks, state, start, steps, the last loss, and how
they ended. A run's id, or the beginning of it, is what `inspect --run`, `report` and `compare` take."""

_EXAMPLES = """\
examples:
  torchobs runs                               this user's runs
  torchobs runs --dir /dev/shm/torchobs-1000  those in another directory
  torchobs runs --json | jq -r '.runs[] | select(.state == "failed") | .run_id'

Exit status: 0, or 2 if there was nothing to read."""

_COLUMNS = (
    Column("run", right=False), Column("job", right=False), Column("ranks", dispensable=2), Column("state", right=False),
    Column("ended by", right=False, dispensable=3), Column("started", dispensable=4), Column("last seen", dispensable=5),
    Column("steps"), Column("loss", dispensable=1),
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("runs", "torchobs runs [options]", _DESCRIPTION, _EXAMPLES)
    made.add_argument("--json", action="store_true", help="Print JSON for programs; docs/report.md describes its fields.")
    arguments.add(made, arguments.DIRECTORY)
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs runs`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    directory = arguments.found(lambda: options.flight_dir or load.default_directory())
    try:
        runs, bad, left_out, notes = arguments.found(lambda: list_runs(directory))
    except CommandError as problem:
        raise CommandError(f"{text_format.clean(directory)}: {problem}", problem.status) from None
    out = tolerant(sys.stdout)
    if options.json:
        made = {
            "version": VERSION, "directory": str(directory), "runs": [run.to_dict() for run in runs],
            "unreadable": [{"file": name, "reason": why} for name, why in bad], "left_out": left_out,
        }  # fmt: skip
        out.write(json.dumps(made, indent=1, allow_nan=False) + "\n")
        return 0 if runs else arguments.NOTHING
    style = style_for(out)
    lines = (
        _lines(runs, style)
        if runs
        else [f"no runs in {text_format.clean(directory)}: a training writes them with torchobs.init()"]
    )
    lines += notes
    lines += [text_format.cut(f"not read: {text_format.clean(name)}: {why}", style.width) for name, why in bad[:5]]
    out.write("".join(f"{line}\n" for line in lines))
    return 0 if runs else arguments.NOTHING


def _lines(runs: Sequence[RunSummary], style: TerminalStyle) -> list[str]:
    head, *rows = table(_COLUMNS, [_row(run) for run in runs], style.width)
    colours = [STATE_COLOURS.get(run.state, "") for run in runs]
    return [
        style("dim", head),
        *(style(colour if colour != "green" else "", row) for colour, row in zip(colours, rows, strict=True)),
    ]


def _row(run: RunSummary) -> list[str]:
    ranks = f"{run.ranks:,} of {run.world_size:,}" if run.world_size and run.world_size > run.ranks else f"{run.ranks:,}"
    again = f" (attempt {run.attempt})" if run.attempt > 1 else ""
    return [
        text_format.cut(run.run_id, 48), text_format.cut(run.job_name, 32), ranks, run.state,
        (run.ended_by.replace("_", " ") if run.ended_by != run.state else "") + again,
        text_format.moment(run.started, "%m-%d %H:%M:%S"), text_format.moment(run.last_seen, "%m-%d %H:%M:%S"),
        f"{run.steps:,}", text_format.number(run.loss),
    ]  # fmt: skip
