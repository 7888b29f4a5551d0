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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from types import FrameType, TracebackType
from typing import NamedTuple, TextIO

from torchobs import catalog
from torchobs.cli import arguments
from torchobs.cli.arguments import tolerant
from torchobs.config import settings
from torchobs.config.options import Option, duration
from torchobs.detect import speed as stragglers
from torchobs.detect.hangs import PATIENT_PHASES
from torchobs.detect.speed import Slowness
from torchobs.diagnosis import health, rank_report, text_format
from torchobs.diagnosis.endings import typical_phases
from torchobs.diagnosis.rank_report import Point, Step, events_of, last_known, steps_of
from torchobs.diagnosis.status import (
    NO_EVENTS,
    NO_REPLICAS,
    NOTHING_NEW,
    EventSummary,
    Newest,
    RankStatus,
    Replicas,
    RunStatus,
    anomalies_of,
    left_s,
    newest,
    recent_anomalies,
    replicas_of,
    status_of,
    summary_of,
)
from torchobs.document.blocks import Table
from torchobs.document.text import STATE_COLOURS, TerminalStyle, size_of, style_for, table
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.metrics.throughput import RECORDS, Throughput, pace
from torchobs.ranks import labels
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.ranks.scanner import Scanner
from torchobs.ranks.snapshot import Rank, Readings, Snapshot, grouped, readings_of
from torchobs.ranks.state import FADED_AFTER_S

_CURVE_ROWS = 4
_MOST_SCALARS = 4
_SHORT = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt", "other": "other"}
_HEAD = (
    "rank", "state", "step", "steps/s", "last step", "loss", "grad norm", "slow", "memory", "anomalies", "tokens/s",
    "samples/s", "MFU", *_SHORT.values(),
)  # fmt: skip
_WORDS = frozenset({1, 9})
_FINE = frozenset({"alive", "finished"})
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Alternate screen, no cursor, no wrapping."""
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_KEYS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"k": "up", b"j": "down"}
_QUIT = (b"q", b"Q", b"\x04")
_ENDING = (signal.SIGTERM, signal.SIGHUP)
QUIT = "quit"
_INTERVAL = Option("interval", duration("0.1s", "1h"), "Time between two updates.", "1s", flag="--interval", metavar="DURATION")
_CURVE, _OF_MANY, _MANY = 400, RECORDS, 16
_LARGEST_SHARE = 0.1
"""Largest share of a core to use beside the training: hundreds of ranks are read less often."""


@dataclass(frozen=True)
class RankView:
    """A rank with its last steps."""

    rank: Rank
    steps: Sequence[Step]
    pace: Throughput | None = None
    scalars: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    lately: Mapping[str, int] = field(default_factory=dict)
    """recent anomalies by kind"""
    events: EventSummary = NO_EVENTS
    replicas: Replicas = NO_REPLICAS
    newest: Newest = NOTHING_NEW

    @cached_property
    def readings(self) -> Readings:
        """Its values."""
        return readings_of(self.rank)

    @property
    def anomalous(self) -> bool:
        """True if an anomaly is active now."""
        return any(self.readings.get(catalog.ANOMALY_ACTIVE, kind) for kind in catalog.ANOMALY_KINDS)

    @property
    def speed(self) -> Throughput | None:
        """Its throughput while it trains."""
        return self.pace if self.rank.trains and self.pace and self.pace.per_s else None


class Screen(NamedTuple):
    """Height of the screen, and by how many ranks it is scrolled."""

    height: int
    first: int = 0


class Drawn(NamedTuple):
    """The lines of one screen, and how far it is scrolled in truth: no further than to its end."""

    lines: list[str]
    first: int = 0


class _Block(NamedTuple):
    """A run: the lines above its ranks, the last with the columns' names, and a line for each rank."""

    above: list[str]
    rows: list[str]


def frame(seen: Sequence[RankView], style: TerminalStyle, screen: Screen, now: str, note: str = "") -> list[str]:
    """Return the lines of one screen, at most ``screen.height``."""
    return drawn(seen, style, screen, now, note).lines


def drawn(seen: Sequence[RankView], style: TerminalStyle, screen: Screen, now: str, note: str = "") -> Drawn:
    """Return one screen; if not all ranks fit it begins with one of them, under its run's heading, and ends with a note."""
    runs = [list(group) for _, group in groupby(seen, key=lambda one: (one.rank.job_name, one.rank.run_id))]
    if not runs:
        return Drawn([text_format.cut(line, style.width) for line in (f"torchobs top  {now}", note)][: screen.height])
    room = screen.height - 3 * len(runs) + 1  # a blank line, the heading and the columns' names of each run
    rows = sum(map(_curve_rows, runs))
    curves = room >= rows + min(len(seen), 3 * len(runs))
    crowded = room < rows * curves + len(runs) + len(seen)  # also a line of findings of each
    blocks = [
        _block(run, style, now if not number else "", curves=curves, by_trouble=crowded) for number, run in enumerate(runs)
    ]
    lines, shown = _shown(blocks, 0, screen.height)
    if shown == len(seen):
        return Drawn(lines[: screen.height])
    first, room = min(screen.first, len(seen) - 1), screen.height - 1
    while first and first - 1 + _shown(blocks, first - 1, room)[1] == len(seen):
        first -= 1
    lines, shown = _shown(blocks, first, room)
    order = "those in trouble come first" if len(runs) == 1 else "runs that live come first"
    more = f"… {text_format.plural(len(seen) - shown, 'more rank')}: up, down; {order}"
    return Drawn([*lines[:room], style("dim", text_format.cut(more, style.width))], first)


def _shown(blocks: Sequence[_Block], first: int, room: int) -> tuple[list[str], int]:
    """Return the lines from the rank of number ``first`` on that fit, and how many ranks are among them."""
    lines, shown = list[str](), 0
    for above, rows in blocks:
        skipped = min(first, len(rows))
        first -= skipped
        begin = [*([""] if lines else []), *above]
        if skipped == len(rows):
            continue
        if lines and len(lines) + len(begin) >= room:
            break
        part = rows[skipped : skipped + max(1, room - len(lines) - len(begin))]
        lines, shown = [*lines, *begin, *part], shown + len(part)
    return lines, shown


def _block(run: Sequence[RankView], style: TerminalStyle, now: str, *, curves: bool, by_trouble: bool) -> _Block:
    slow = slownesses(run)
    ranks = [(one, _status(one, slow)) for one in run]
    above = [_heading(run, style, now), *_verdict([status for _, status in ranks], style)]
    above += _curves(run, style) if curves else []
    ranks = sorted(ranks, key=lambda pair: _trouble(*pair)) if by_trouble else ranks
    cells = [_row(*pair) for pair in ranks]
    heading, *rows = table(Table("", _HEAD, tuple(map(tuple, cells)), _WORDS), replace(style, colour=False))
    colours = [STATE_COLOURS.get(one.rank.state, "") for one, _ in ranks]
    for at, (one, _) in enumerate(ranks):
        if one.rank.state == "alive":
            colours[at] = "yellow" if one.anomalous or one.rank.standstill else ""
    return _Block([*above, style("dim", heading)], [style(colour, row) for colour, row in zip(colours, rows, strict=True)])


def slownesses(seen: Sequence[RankView]) -> dict[str, Slowness]:
    """Return the slowness of a run's living ranks by incarnation: as on the live page, at first by their last steps."""
    living = [one for one in seen if one.rank.up]
    known = {
        one.rank.incarnation: one.rank.standing.slowness
        for one in living
        if one.rank.standing is not None and one.rank.standing.slowness is not None
    }
    if len(known) == len(living):
        return known
    pace = {one.rank.incarnation: one.pace for one in living}
    teams = labels.teams([one.rank for one in living])
    spent = ({rank.incarnation: own.spent for rank in team if (own := pace[rank.incarnation])} for team in teams)
    return {incarnation: found for team in spent for incarnation, found in stragglers.slowness(team).items()}


def _verdict(statuses: Sequence[RankStatus], style: TerminalStyle) -> list[str]:
    """Return the findings in the live page's words, after its headline if that is one; none if all is well."""
    status = RunStatus(statuses, len(statuses), len(statuses))
    head = health.headline(status)
    found = [*([head] if head.severity != health.INFO else []), *health.findings(status)]
    severity = max((one.severity for one in found), key=lambda name: health.LEVELS[name].value, default=health.INFO)
    if severity == health.INFO:
        return []
    line = f"{health.BADGES[health.LEVELS[severity]]}: {' '.join(text_format.clean(one.long) for one in found)}"
    return [style("red" if severity == health.ERROR else "yellow", text_format.cut(line, style.width))]


def _status(one: RankView, slow: Mapping[str, Slowness]) -> RankStatus:
    status = status_of(
        one.rank, one.readings, one.newest, pace=one.pace, replicas=one.replicas, events=one.events, lately=one.lately
    )
    return replace(status, slowness=slow.get(one.rank.incarnation))


def _trouble(one: RankView, status: RankStatus) -> tuple[bool, bool, float]:
    # rounded, so that nearly equal ranks keep their order
    factor = round(status.slowness.factor, 1) if status.slowness else 1.0
    return one.rank.state in _FINE and one.rank.standstill is None, not one.anomalous, -max(1.0, factor)


def _heading(run: Sequence[RankView], style: TerminalStyle, now: str) -> str:
    states = Counter(one.rank.state for one in run)
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    name = f"{text_format.clean(run[0].rank.job_name)}  {text_format.clean(run[0].rank.run_id)}  {told}{_progress(run)}"
    room = style.width - len(now) - 2
    line = f"{text_format.pad(name, room)}  {now}" if now and room > len(told) else text_format.cut(name, style.width)
    bad = set(states) - _FINE
    return style("red" if bad else "bold", line)


def _progress(run: Sequence[RankView]) -> str:
    first = run[0]
    total = first.readings.get(catalog.STEPS_PLANNED)
    if not total or not first.steps:
        return ""
    most_s = max((seconds for one in run if (seconds := left_s(one.readings.get, one.speed)) is not None), default=None)
    time_left = "" if most_s is None else f", {text_format.duration(most_s)} left"
    return f"  step {first.steps[-1].step:,} of {total:,.0f}{time_left}"


def _curves(run: Sequence[RankView], style: TerminalStyle) -> list[str]:
    """Return loss, gradient norm and step time of the first rank that has steps."""
    first = next((one for one in run if one.steps), run[0])
    kinds = (
        ("loss", [step.loss for step in first.steps], text_format.number),
        ("grad norm", [step.grad_norm for step in first.steps], text_format.number),
        ("step time", [step.duration_s for step in first.steps], text_format.duration),
    )
    lines = []
    for name, values, say in kinds:
        lines.append(_curve(name, values, say(last_known(values)), style))
    for name, points in list(first.scalars.items())[:_MOST_SCALARS]:
        lines.append(_curve(name, [point.value for point in points], text_format.number(points[-1].value), style))
    return [*lines, ""]


def _curve(name: str, values: Sequence[float | None], last: str, style: TerminalStyle) -> str:
    bars = text_format.sparkline(values, style.width - 22, ascii_only=not style.unicode)
    return style(
        "cyan", f"{text_format.pad(text_format.clean(name), 9)} {text_format.pad(last, 9, right=True)}  {bars}".rstrip()
    )


def _curve_rows(run: Sequence[RankView]) -> int:
    first = next((one for one in run if one.steps), run[0])
    return _CURVE_ROWS + len(list(first.scalars)[:_MOST_SCALARS])


def _row(one: RankView, status: RankStatus) -> list[str]:
    rank, steps = one.rank, one.steps
    last, phases = steps[-1] if steps else None, typical_phases(steps)
    whole = sum(phases.values())
    counts = {kind: one.readings.get(catalog.ANOMALIES, kind) or 0 for kind in catalog.ANOMALY_KINDS}
    return [
        rank.rank,
        _state(rank),
        f"{last.step}" if last else "-",
        text_format.rate(one.speed.per_s if one.speed else None),
        health.last_step(status),
        text_format.number(last.loss if last else None),
        text_format.number(last_known([step.grad_norm for step in steps])),
        "-" if status.slowness is None else f"{status.slowness.factor:.2f}×",
        _memory(one),
        ", ".join(f"{kind.replace('_', ' ')} {text_format.count(count)}" for kind, count in counts.items() if count),
        *_work(one),
        *(text_format.percent(phases[phase] / whole) if whole > 0 else "-" for phase in catalog.PHASES),
    ]


def _work(one: RankView) -> tuple[str, str, str]:
    """Return tokens a second, else samples, and the share of the devices' peak; empty where unknown."""
    pace, share = one.speed, one.readings.get(catalog.MFU)
    tokens, samples = (pace.tokens_per_s, pace.samples_per_s) if pace else (None, None)
    told = text_format.rate(tokens) if tokens else "", text_format.rate(samples) if samples and not tokens else ""
    return *told, text_format.percent(share) if pace and share is not None else ""


def _state(rank: Rank) -> str:
    """Return the state, and a living rank's phase outside of steps."""
    phase = rank.view.live.phase
    return f"{rank.state}, {phase}" if rank.state == "alive" and phase in PATIENT_PHASES else rank.state


def _memory(one: RankView) -> str:
    """Return the fullest device's memory with its limit, else the process's resident set."""
    devices = one.readings.of(catalog.MEMORY_DEVICE_RESERVED)
    if not devices:
        return text_format.size(one.readings.get(catalog.MEMORY_HOST_RSS))
    fullest = max(devices, key=lambda device: devices[device])
    limit = one.readings.get(catalog.MEMORY_DEVICE_LIMIT, *fullest)
    return text_format.size(devices[fullest]) + (f" of {text_format.size(limit)}" if limit is not None else "")


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
