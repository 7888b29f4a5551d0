"""``torchobs inspect``: report on a run, from its flight files alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torchobs.cli import arguments
from torchobs.cli.arguments import CommandError
from torchobs.cli.inspect_view import report_lines
from torchobs.cli.terminal_style import style_for, tolerant
from torchobs.config import option_types, settings
from torchobs.config.options import Option
from torchobs.diagnosis import load, text_format
from torchobs.diagnosis.json_report import Options, document
from torchobs.diagnosis.load import LoadedFlight
from torchobs.diagnosis.rank_report import RankReport
from torchobs.flight.files.location import find_existing
from torchobs.runtime.spawned_ranks import LAUNCHED_BY

_DESCRIPTION = """\
Report what happened to a run: how each rank ended, what went wrong first, the last steps, where the time went, memory, events.
It reads the flight files, in which the ranks record themselves and which stay however they end; nothing has to run. Without a
path it reads the directory that this user's trainings write to. Of several runs there the latest is reported; --run selects
another."""

_EXAMPLES = """\
examples:
  torchobs inspect                                  the latest run on this machine
  torchobs inspect /dev/shm/torchobs-1000 --run 4711
                                                    another run, by its run_id or the beginning of it
  torchobs inspect r0-3f…9a.flight --steps 50       one rank; also from a copy (kubectl cp), or a part of one
  torchobs inspect --json | jq '.ranks[] | {rank, state, exit}'

Exit status: 0 if every rank is alive or finished, 1 if one failed, was lost or hangs, 2 if there was nothing to read."""

_MOST = option_types.integer(0, 1_000_000)  # beyond any file's capacity
_STEPS = Option("steps", _MOST, "Number of last steps to list.", "10", flag="--steps", metavar="N")
_EVENTS = Option("events", _MOST, "Number of last events to list.", "20", flag="--events", metavar="N")
_NOTHING = 2
"""Exit status if there was nothing to read."""


class Chosen(NamedTuple):
    """Input of the report: a run's ranks, unreadable files, launchers, and notes on other runs."""

    ranks: list[RankReport]
    bad: list[tuple[str, str]]
    notes: list[str]
    launchers: list[RankReport]
    """processes that only started the ranks"""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("inspect", "torchobs inspect [options] [FILE|DIR …]", _DESCRIPTION, _EXAMPLES)
    made.add_argument("paths", nargs="*", metavar="FILE|DIR", type=Path, help="Flight files, or directories of them.")
    made.add_argument(
        "--run", metavar="ID", help="The run to report: its run_id, or the beginning of it. [default: the latest]"
    )
    arguments.add(made, _STEPS, default=10)
    arguments.add(made, _EVENTS, default=20)
    made.add_argument("--json", action="store_true", help="Print JSON for programs; docs/terminal.md describes its fields.")
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs inspect`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    out, wanted = tolerant(sys.stdout), Options(options.steps, options.events)
    try:
        chosen = choose(options.paths or [_default()], options.run)
    except OSError as problem:
        raise CommandError(load.reason(problem), _NOTHING) from None
    if options.json:
        out.write(json.dumps(document(chosen.ranks, chosen.launchers, chosen.bad, wanted), indent=2, allow_nan=False) + "\n")
    else:
        style = style_for(out)
        unread = [text_format.cut(f"not read: {text_format.clean(name)}: {why}", style.width) for name, why in chosen.bad[:5]]
        lines = report_lines(chosen.ranks, chosen.launchers, wanted, style)
        if unread or chosen.notes:
            lines += ["", *unread, *chosen.notes]
        out.write("".join(f"{line}\n" for line in lines))
    return int(any(report.state not in {"alive", "finished"} for report in (*chosen.ranks, *chosen.launchers)))


def choose(paths: Sequence[Path], run: str | None) -> Chosen:
    """Read the files and directories. Raises ``CommandError``, or ``OSError`` for a directory that cannot be read."""
    given = [path for path in paths if not path.is_dir()]
    ranks, bad = load.load_reports(given)
    notes: list[str] = []
    launchers: list[RankReport] = []
    for path in paths:
        if path.is_dir():
            listed = load.listing(path)
            bad += listed.bad
            found, others = _run(listed.found, run)
            started = _launchers(found)
            launchers += started
            apart = {report.header.incarnation for report in started}
            chosen, earlier = load.newest(item for item in found if item.header.incarnation not in apart)
            more, worse = load.load_reports([item.path for item in chosen], load.limit_of(len(chosen)))
            ranks, bad = ranks + more, bad + worse
            notes += _notes(earlier, others)
    if not ranks:
        raise CommandError(_nothing(paths, bad, run), _NOTHING)
    return Chosen(ranks, bad, notes, launchers)


def _launchers(found: Sequence[LoadedFlight]) -> list[RankReport]:
    """Return the reports of processes that started ranks of this run and made no step themselves."""
    incarnations = {item.header.resource.get(LAUNCHED_BY) for item in found}
    reports, _ = load.load_reports([item.path for item in found if item.header.incarnation.hex() in incarnations])
    return [one for one in reports if not one.last_step and not one.partial]


def _run(found: Sequence[LoadedFlight], run: str | None) -> tuple[list[LoadedFlight], list[tuple[str, str]]]:
    """Return the files of the requested run, by default the one that lived last, and the other runs."""
    wanted = [item for item in found if run is None or item.claim.rank[1].startswith(run)]
    if not wanted:
        return [], sorted({item.claim.rank[:2] for item in found})
    last = max(wanted, key=lambda item: item.last_ns).claim.rank[:2]
    others = {item.claim.rank[:2] for item in found} - {last}
    return [item for item in wanted if item.claim.rank[:2] == last], sorted(others)


def _notes(earlier: Sequence[LoadedFlight], others: Sequence[tuple[str, str]]) -> list[str]:
    notes = []
    if earlier:
        names = ", ".join(item.path.name for item in earlier[-3:])
        notes.append(f"{text_format.plural(len(earlier), 'earlier attempt')} of these ranks: inspect {names}")
    if others:
        names = ", ".join(text_format.clean(run_id, 60) for _, run_id in others[-3:])
        notes.append(f"{text_format.plural(len(others), 'other run')} in this directory: --run {names}")
    return notes


def _default() -> Path:
    chosen, _ = settings.resolve({})
    path = find_existing(str(chosen.flight_dir) if chosen.flight_dir else None, settings.environment().get("XDG_RUNTIME_DIR"))
    if path is None:
        raise CommandError(
            "there is no flight directory yet: `torchobs run train.py` creates one, `torchobs doctor` shows where", _NOTHING
        )
    return Path(path)


def _nothing(paths: Sequence[Path], bad: Sequence[tuple[str, str]], run: str | None) -> str:
    if bad:
        return f"nothing readable: {'; '.join(f'{text_format.clean(name)}: {why}' for name, why in bad[:5])}"
    where = text_format.joined([text_format.clean(path) for path in paths])
    if run is not None:
        return f"no run {text_format.clean(run)!r} in {where}"
    return f"no flight files in {where}: a training writes them with torchobs.init() or `torchobs run train.py`"
