"""``torchobs top``: the ranks of this machine, live, from their flight files."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from itertools import chain
from types import FrameType, TracebackType
from typing import TextIO

from torchobs.cli import arguments
from torchobs.cli.arguments import tolerant
from torchobs.cli.text import size_of, style_for
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

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Alternate screen, no cursor, no wrapping."""
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_KEYS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"k": "up", b"j": "down"}
_QUIT = (b"q", b"Q", b"\x04")
_ENDING = (signal.SIGTERM, signal.SIGHUP)
QUIT = "quit"
_INTERVAL = Option(
    "interval", option_types.duration("0.1s", "1h"), "Time between two updates.", "1s", flag="--interval", metavar="DURATION"
)
_CURVE, _OF_MANY, _MANY = 400, RECORDS, 16
_LARGEST_SHARE = 0.1
"""Largest share of a core to use beside the training: hundreds of ranks are read less often."""


class Terminal:
    """A terminal under control in a ``with`` block. ``keys``: descriptor to read keys from, -1 for none."""

    def __init__(self, out: TextIO, keys: int) -> None:
        self._out, self._keys = out, keys
        self._before: list[object] | None = None
        self._handlers: dict[int, object] = {}
        self._wakeup = os.pipe()

    def __enter__(self) -> Terminal:  # noqa: PYI034  # typing.Self needs Python 3.11
        """Take control of the terminal."""
        for end in self._wakeup:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _end) for number in _ENDING}
        self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, _ignore)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Restore the terminal."""
        self._give()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as returned by signal()
        for end in self._wakeup:
            os.close(end)

    def draw(self, lines: Sequence[str]) -> None:
        """Show exactly these lines, overwriting the previous ones without flicker."""
        self._out.write("\x1b[H" + "".join(f"{line}\x1b[0m\x1b[K\r\n" for line in lines[:-1]))
        self._out.write("".join(f"{line}\x1b[0m\x1b[K" for line in lines[-1:]) + "\x1b[J")
        self._out.flush()

    def wait(self, seconds: float) -> str:
        """Wait for a key, a resize or the timeout. Returns ``up``, ``down``, ``quit``, or an empty text."""
        readable, _, _ = select.select([end for end in (self._keys, self._wakeup[0]) if end >= 0], [], [], seconds)
        if self._wakeup[0] in readable:
            os.read(self._wakeup[0], 4096)
        if self._keys not in readable:
            return ""
        typed = os.read(self._keys, 64)
        if not typed or typed[:1] in _QUIT:
            return QUIT  # end of file: the connection is gone
        return _KEYS.get(typed, "")

    def _take(self) -> None:
        if self._keys >= 0:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        self._out.write(_ENTER)
        self._out.flush()

    def _give(self) -> None:
        self._out.write(_LEAVE)
        self._out.flush()
        if self._before is not None:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]  # as returned by tcgetattr()

    def _suspend(self, number: int, _: FrameType | None) -> None:
        """Handle Ctrl-Z: restore the terminal for the shell, and take it again when continued."""
        self._give()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._suspend)
        self._take()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _ignore(_: int, __: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor reports the signal."""


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
