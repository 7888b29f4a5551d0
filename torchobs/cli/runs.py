"""``torchobs runs``: the runs of this machine, those in its flight files and the kept ones. ``torchobs keep``: keep one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from torchobs.cli import arguments
from torchobs.cli.arguments import CommandError, tolerant
from torchobs.config import settings
from torchobs.document import kept
from torchobs.document.blocks import Table
from torchobs.document.kept import NotKeptError, RunSummary, summary_of
from torchobs.document.text import style_for, table
from torchobs.flight.events import plain
from torchobs.ranks.runs import Listing, NoRunError, RunFiles, choose, default_directory, listing, load, reason
from torchobs.support import text as text_format

RUNS_VERSION = 1
_RECORDS = 64
_SOON_S = 5.0
_HEAD = ("run", "job", "ranks", "state", "ended by", "steps", "loss", "best loss", "started", "last seen", "tag", "commit", "")
_COMMIT = 9

_RUNS = """\
List the runs of this machine, the latest first, those whose flight files are there and those that were kept beyond a reboot:
job, ranks, state, how they ended, steps, last and least loss, times, tag and git commit. A run's id, or the beginning of it, is
what `inspect --run`, `report` and `compare` take."""

_RUNS_EXAMPLES = """\
examples:
  torchobs runs                               this user's runs
  torchobs runs --job gpt --tag baseline      those of a job that were given this tag (torchobs run --tag)
  torchobs runs --dir /dev/shm/torchobs-1000  those in another directory, and the kept ones
  torchobs runs --json | jq -r '.runs[] | select(.state == "failed") | .run_id'

Exit status: 0, or 2 if there was nothing to read."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``torchobs runs``."""
    parser = arguments.parser("runs", "torchobs runs [options]", _RUNS, _RUNS_EXAMPLES)
    parser.add_argument("--job", metavar="NAME", help="Only runs of this job.")
    parser.add_argument("--tag", metavar="TAG", help="Only runs with this tag.")
    parser.add_argument("--json", action="store_true", help="Print JSON for programs; docs/report.md describes its fields.")
    arguments.add(parser, arguments.DIRECTORY)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run ``torchobs runs`` with these arguments and return its exit status."""
    options = parser().parse_args(list(argv))
    place = kept.directory()
    try:
        directory: Path | None = options.flight_dir or default_directory()
    except NoRunError:  # a reboot has taken it
        directory = None
    try:
        listed = arguments.read(lambda: listing(directory)) if directory is not None else Listing([], [])
    except CommandError as problem:
        raise CommandError(f"{text_format.clean(directory)}: {problem}", problem.status) from None
    summaries, bad = kept.listed(place)
    bad = [*listed.bad, *bad]
    runs: dict[RunSummary, Path | None] = {}
    by_name = {path.name: run for run, path in summaries.items()}
    for run in listed.runs:
        earlier = by_name.get(kept.name_of(run.job_name, run.run_id, run.files[0].header.boot_id))
        if earlier is None or run.lives or run.last_s > earlier.last_s + _SOON_S:  # what is kept need not be read again
            summary, unreadable = _summary(run)
            bad += unreadable
            if summary is not None:
                runs[summary] = summaries.pop(earlier, None) if earlier is not None else None
    every = {**summaries, **runs}.items()
    wanted = [run for run in every if options.job in {None, run[0].job_name} and options.tag in {None, run[0].tag}]
    shown = sorted(wanted, key=lambda run: -run[0].last_s)
    out = tolerant(sys.stdout)
    if options.json:
        data = {
            "version": RUNS_VERSION, "directory": _text(directory), "kept_in": _text(place),
            "runs": [{**plain(run._asdict()), "kept": _text(file)} for run, file in shown],
            "unreadable": [{"file": name, "reason": why} for name, why in bad], "left_out": listed.left_out,
        }  # fmt: skip
        out.write(json.dumps(data, indent=1, allow_nan=False) + "\n")
        return 0 if shown else arguments.NOTHING
    style = style_for(out)
    rows = Table("", _HEAD, tuple(_row(*run) for run in shown), frozenset({0, 1, 3, 4, 10, 11, 12}))
    where = text_format.joined([text_format.clean(path) for path in (directory, place) if path is not None])
    of = "".join(f" with {name} {text_format.clean(word)!r}" for name in ("job", "tag") if (word := getattr(options, name)))
    missing = f"no runs{of} in {where}: a training writes them with torchobs.init()"
    unread = [text_format.cut(f"not read: {text_format.clean(name)}: {why}", style.width) for name, why in bad[:5]]
    out.write("".join(f"{line}\n" for line in (*(table(rows, style) if shown else [missing]), *listed.notes, *unread)))
    return 0 if shown else arguments.NOTHING


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None


def _summary(run: RunFiles) -> tuple[RunSummary | None, list[tuple[str, str]]]:
    """Return the line of a run, and its unreadable files; all records are read of its first rank."""
    paths = [*run.newest()[0]]
    (first, bad), (others, more) = load(paths[:1], evidence=False), load(paths[1:], _RECORDS, evidence=False)
    begun_s = min(run.files, key=lambda item: item.header.wall_ns).header.begun_s
    return summary_of([*first, *others], begun_s) if first or others else None, bad + more


def _row(run: RunSummary, file: Path | None) -> tuple[str, ...]:
    ranks = f"{run.ranks:,} of {run.world_size:,}" if run.world_size and run.world_size > run.ranks else f"{run.ranks:,}"
    again = f" (attempt {run.attempt})" if run.attempt > 1 else ""
    return (
        text_format.cut(run.run_id, 48), text_format.cut(run.job_name, 32), ranks, run.state,
        (run.ended_by.replace("_", " ") if run.ended_by != run.state else "") + again, f"{run.steps:,}",
        text_format.number(run.loss), text_format.number(run.best_loss),
        text_format.moment(run.started, "%m-%d %H:%M:%S"), text_format.moment(run.last_seen, "%m-%d %H:%M:%S"),
        text_format.cut(run.tag, 24), run.commit[:_COMMIT], "kept" if file else "",
    )  # fmt: skip


_KEEP = """\
Keep what `report` shows of a run that has ended, in a file that a reboot does not take. `torchobs run` and the exporter of a
node do it by themselves; this is for a run without both, and in a pod for TORCHOBS_KEEP_DIR."""

_KEEP_EXAMPLES = """\
examples:
  torchobs keep                 the latest run on this machine
  torchobs keep 4711            another, by its run_id or the beginning of it, or by its job's name

Exit status: 0 if it is kept, 1 if it cannot be, 2 if there was nothing to read."""


def keep_parser() -> argparse.ArgumentParser:
    """Return the parser of ``torchobs keep``."""
    parser = arguments.parser("keep", "torchobs keep [options] [RUN]", _KEEP, _KEEP_EXAMPLES)
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="A run_id or its beginning, or a job's name. [default: the latest]"
    )
    parser.add_argument("--automatic", action="store_true", help="Not if the run was started with --no-keep.")
    arguments.add(parser, arguments.DIRECTORY)
    return parser


def keep(argv: Sequence[str]) -> int:
    """Run ``torchobs keep`` with these arguments and return its exit status."""
    options = keep_parser().parse_args(list(argv))
    place = kept.directory()
    if place is None:
        raise CommandError("there is no place to keep it: set TORCHOBS_KEEP_DIR to a directory on a volume")
    chosen = arguments.read(lambda: choose([options.flight_dir or default_directory()], options.run))
    if options.automatic and not kept.is_wanted(chosen):
        return 0
    try:
        path = kept.keep(chosen, place, max(1, settings.resolve({})[0].keep_runs))
    except (NotKeptError, OSError) as problem:
        raise CommandError(f"not kept in {text_format.clean(place)}: {reason(problem)}") from None
    sys.stdout.write(f"{' '.join(chosen.ranks[0].names)} is kept in {text_format.clean(path)}\n")
    return 0
