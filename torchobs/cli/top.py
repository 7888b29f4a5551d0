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
from types import FrameType, TracebackType
from typing import NamedTuple, TextIO

from torchobs.cli import arguments
from torchobs.cli.arguments import tolerant
from torchobs.config import settings
from torchobs.config.options import Option, duration
from torchobs.document.blocks import Table
from torchobs.document.live import screen_document
from torchobs.document.text import SEVERITY_COLOURS, TerminalStyle, block_lines, size_of, style_for, table
from torchobs.exporter.config import ExporterConfig
from torchobs.ranks.live import DetailsReader, RunsReader
from torchobs.ranks.rank_view import RunView
from torchobs.ranks.scanner import Scanner
from torchobs.ranks.snapshot import Snapshot, grouped
from torchobs.ranks.state import FADED_AFTER_S
from torchobs.support import text as text_format

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Alternate screen, no cursor, no wrapping."""
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_KEYS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"k": "up", b"j": "down"}
_QUIT = (b"q", b"Q", b"\x04")
_ENDING = (signal.SIGTERM, signal.SIGHUP)
QUIT = "quit"
_INTERVAL = Option("interval", duration("0.1s", "1h"), "Time between two updates.", "1s", flag="--interval", metavar="DURATION")
_LARGEST_SHARE = 0.1
"""Largest share of a core to use beside the training: hundreds of ranks are read less often."""


class Screen(NamedTuple):
    """The lines of one screen, and by how many ranks it is scrolled, to its end at most."""

    lines: list[str]
    first: int = 0


class Watch:
    """Reads the runs of a scanner again and again."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner, self._details, self._runs = scanner, DetailsReader(), RunsReader()

    def look(self) -> tuple[tuple[RunView, ...], str]:
        """Return the runs, those with living ranks and the newest first, and a note if there is none."""
        snapshot = self._scanner.scan()
        first = [run[0].incarnation for run in grouped(snapshot.ranks)]
        return self._runs.runs(snapshot, self._details.gather(self._scanner, snapshot, first)), _note(snapshot)


def screen(runs: Sequence[RunView], style: TerminalStyle, height: int, first: int = 0, note: str = "") -> Screen:
    """Return one screen of at most ``height`` lines.

    If not all fit there are no curves, the ranks in trouble come first, and it shows those from number ``first`` on.
    """
    now = time.strftime("%H:%M:%S")
    if not runs:
        return Screen([text_format.cut(line, style.width) for line in (f"torchobs top  {now}", note)][:height])
    count = sum(len(run.ranks) for run in runs)
    if count + len(runs) <= height:
        lines, shown = _shown([_block(run, style, "" if at else now) for at, run in enumerate(runs)], 0, height)
        if shown == count:
            return Screen(lines)
    blocks = [_block(run, style, "" if at else now, crowded=True) for at, run in enumerate(runs)]
    first = min(first, count - 1)
    while first and first - 1 + _shown(blocks, first - 1, height - 1)[1] == count:
        first -= 1  # no further than needed to show the last one
    lines, shown = _shown(blocks, first, height - 1)
    more = f"… {text_format.plural(count - shown, 'more rank')}: up, down; those in trouble come first"
    return Screen([*lines, style("dim", text_format.cut(more, style.width))], first)


_Block = tuple[list[str], list[str]]
"""A run: the lines above its ranks, the last with the columns' names, and a line for each rank"""


def _shown(blocks: Sequence[_Block], first: int, room: int) -> tuple[list[str], int]:
    """Return the lines from the rank of number ``first`` on that fit, and how many ranks are among them."""
    lines, shown = list[str](), 0
    for above, rows in blocks:
        begin, rest = [*([""] if lines else []), *above], rows[first:]
        first = max(0, first - len(rows))
        part = rest[: max(0 if lines else 1, room - len(lines) - len(begin))]
        if part:
            lines, shown = [*lines, *begin, *part], shown + len(part)
        if len(part) < len(rest):
            break
    return lines[:room], shown


def _block(run: RunView, style: TerminalStyle, now: str, *, crowded: bool = False) -> _Block:
    document = screen_document(run, crowded=crowded)
    severity, badge = document.badge
    colour = SEVERITY_COLOURS[severity]
    line = text_format.cut("  ".join([document.title, *document.subtitle.split(" · ")]), style.width)
    room = style.width - text_format.columns(line) - 2
    above = [style("red" if severity == "error" else "bold", f"{line}  {now:>{room}}" if now and room >= len(now) else line)]
    if document.headline:
        words = f"{badge}: {document.headline}" if colour else document.headline
        above += [style(colour or "dim", text_format.cut(words, style.width))]
    *charts, ranks = (block for section in document.sections for block in section.blocks)
    curves = [line for chart in charts for line in block_lines(chart, style)]
    heading, *rows = table(ranks, style) if isinstance(ranks, Table) else [""]
    return [*above, *curves, *([""] if curves else []), heading], rows


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
        self._enter()
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

    def _enter(self) -> None:
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
        self._enter()


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
    parser = arguments.parser("top", "torchobs top [options]", _DESCRIPTION, _EXAMPLES)
    arguments.add(parser, _INTERVAL, default=1.0)
    parser.add_argument("--once", action="store_true", help="Print the ranks once and end.")
    arguments.add(parser, arguments.DIRECTORY)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run ``torchobs top`` with these arguments and return its exit status."""
    options = parser().parse_args(list(argv))
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
    runs, note = Watch(scanner).look()
    out.write("".join(f"{line.rstrip()}\n" for line in screen(runs, style_for(out), 10_000, note=note).lines))
    return 0 if runs else 1


def _live(scanner: Scanner, interval_s: float) -> int:
    out, first, due, watch = tolerant(sys.stdout), 0, 0.0, Watch(scanner)
    keys = sys.stdin.fileno() if sys.stdin.isatty() else -1
    runs, note = tuple[RunView, ...](), ""
    with contextlib.suppress(KeyboardInterrupt), Terminal(out, keys) as terminal:
        while True:
            if time.monotonic() >= due:
                began = time.monotonic()
                runs, note = watch.look()
                due = began + max(interval_s, (time.monotonic() - began) / _LARGEST_SHARE)
            shown = screen(runs, style_for(out), size_of(out).lines, first, note)
            terminal.draw(shown.lines)
            key = terminal.wait(max(0.0, due - time.monotonic()))
            if key == QUIT:
                return 0
            first = max(0, shown.first + {"up": -1, "down": 1}.get(key, 0))
    return 130
