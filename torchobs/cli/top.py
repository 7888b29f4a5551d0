"""``torchobs top``: the ranks of this machine, live, from their flight files."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Sequence
from itertools import chain

from torchobs.cli import arguments
from torchobs.cli.terminal import QUIT, Terminal
from torchobs.cli.terminal_style import size_of, style_for, tolerant
from torchobs.cli.top_view import RankView, Screen, drawn, frame
from torchobs.config import option_types, settings
from torchobs.config.options import Option
from torchobs.diagnosis import rank_report, text_format
from torchobs.diagnosis.rank_report import events_of, steps_of
from torchobs.diagnosis.status import anomalies_of, newest, recent_anomalies, replicas_of, summary_of
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.metrics.throughput import RECORDS, pace
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.ranks.scanner import Scanner
from torchobs.ranks.snapshot import Rank, Snapshot, grouped
from torchobs.ranks.state import FADED_AFTER_S

_DESCRIPTION = """\
Show the ranks (training processes) of this machine live: state, step, speed, loss, gradient norm, where the time of a step
goes, memory, which rank slows the others down, anomalies. It only reads the flight files, in which the ranks record
themselves: it needs no exporter and never delays a training. Keys: up and down scroll if not all ranks fit (those in trouble
come first), or not all runs (those that live come first), q quits. If the output is no terminal, the ranks are printed once, as
with --once."""

_EXAMPLES = """\
examples:
  torchobs top                                    every run of this user on this machine
  ssh node7 -t torchobs top --interval 5s         on another machine, updated every five seconds
  torchobs top --dir /dev/shm/run7 --once         printed once, for a script or a mail
  kubectl exec -it pod -c trainer -- torchobs top

Columns: tokens/s (or samples/s) and MFU, the share of the devices' peak, where they are known; data, fwd, bwd, opt and
other are shares of a typical step (waiting for data, forward, backward, optimizer, the rest); slow is the rank's step
time over what it would be if the others did not wait for it (1.00×: nobody waits for it)."""

_INTERVAL = Option(
    "interval", option_types.duration("0.1s", "1h"), "Time between two updates.", "1s", flag="--interval", metavar="DURATION"
)
_CURVE, _OF_MANY, _MANY = 400, RECORDS, 16
_LARGEST_SHARE = 0.1
"""Largest share of a core to use beside the training: hundreds of ranks are read less often."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("top", "torchobs top [options]", _DESCRIPTION, _EXAMPLES)
    arguments.add(made, _INTERVAL, default=1.0)
    made.add_argument("--once", action="store_true", help="Print the ranks once and end.")
    arguments.add(made, arguments.DIRECTORY)
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs top`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    environ = settings.environment()
    chosen, _ = settings.resolve({"flight_dir": options.flight_dir}, environ)
    flight_dir = str(chosen.flight_dir) if chosen.flight_dir else None
    # for the calling user: reads any file that the user may read
    config = ExporterConfig(flight_dir=flight_dir, runtime_dir=environ.get("XDG_RUNTIME_DIR"), allow_foreign_owner=True)
    logging.getLogger("torchobs").addHandler(logging.NullHandler())
    logging.getLogger("torchobs").propagate = False  # the scanner's problems are shown on the screen
    with contextlib.closing(Scanner(config)) as scanner:
        if options.once or not sys.stdout.isatty():
            return _once(scanner)
        return _live(scanner, options.interval)


def views(scanner: Scanner) -> tuple[list[RankView], str]:
    """Return every rank with its last steps, those of living and of new runs first, and a note if there is none."""
    snapshot = scanner.scan()
    limit = _CURVE if len(snapshot.ranks) <= _MANY else _OF_MANY
    shown = {(rank.job_name, rank.run_id): rank.incarnation for rank in reversed(snapshot.ranks)}.values()
    few = len(snapshot.ranks) <= _MANY
    ranks = [
        _view_of(scanner, rank, limit, events=few or rank.incarnation in shown, logged=rank.incarnation in shown)
        for rank in chain.from_iterable(grouped(snapshot.ranks))
    ]
    return ranks, _note(snapshot)


def _view_of(scanner: Scanner, rank: Rank, limit: int, *, events: bool, logged: bool) -> RankView:
    """Return the view of a rank; ``events``: with recent anomalies; ``logged``: with logged scalars, for a run's first rank."""
    try:
        with scanner.flight_file(rank.incarnation) as file:
            records = file.steps(limit)
            frames = list(file.events()) if events else []
            found = rank_report.curves(frame for _, frame in frames) if logged else {}
            told = events_of(frames, file.header)
            lately = recent_anomalies(anomalies_of(told), time.time())
            known = newest(records)
            replicas, steps = replicas_of(told, known.losses), steps_of(records, file.header)
            return RankView(rank, steps, pace(records), found, lately, summary_of(told), replicas, known)
    except READ_ERRORS:
        return RankView(rank, ())  # ending or replaced: the next scan shows the new state


def _note(snapshot: Snapshot) -> str:
    if snapshot.problems:
        return f"{text_format.clean(snapshot.problems[0])}: start a training with `torchobs run train.py`"
    if bad := snapshot.files["bad"]:
        files = text_format.plural(bad, "flight file")
        return f"{files} here cannot be read: `torchobs runs`, with the same --dir if any, says why"
    return "no rank trains here, or did lately: `torchobs run train.py` starts one, `torchobs inspect` reports on ended ones"


def _once(scanner: Scanner) -> int:
    out = tolerant(sys.stdout)
    if scanner.scan().fading:
        time.sleep(FADED_AFTER_S)  # no later scan would confirm a death
    seen, note = views(scanner)
    lines = frame(seen, style_for(out), Screen(10_000), time.strftime("%H:%M:%S"), note)
    out.write("".join(f"{line.rstrip()}\n" for line in lines))
    return 0 if seen else 1


def _live(scanner: Scanner, interval_s: float) -> int:
    out, first, due = tolerant(sys.stdout), 0, 0.0
    keys = sys.stdin.fileno() if sys.stdin.isatty() else -1
    seen: list[RankView] = []
    note = ""
    with contextlib.suppress(KeyboardInterrupt), Terminal(out, keys) as terminal:
        while True:
            if time.monotonic() >= due:
                began = time.monotonic()
                seen, note = views(scanner)
                took_s = time.monotonic() - began
                due = began + max(interval_s, took_s / _LARGEST_SHARE)
            screen = drawn(seen, style_for(out), Screen(size_of(out).lines, first), time.strftime("%H:%M:%S"), note)
            terminal.draw(screen.lines)
            key = terminal.wait(max(0.0, due - time.monotonic()))
            if key == QUIT:
                return 0
            first = max(0, screen.first + {"up": -1, "down": 1}.get(key, 0))
    return 130
