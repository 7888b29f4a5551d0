"""The display of ``torchobs top`` as lines of text. Pure: input is a snapshot and the ranks' last steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from torchobs import catalog
from torchobs.cli.text import STATE_COLOURS, Column, TerminalStyle, table
from torchobs.detect import speed
from torchobs.detect.hangs import PATIENT_PHASES
from torchobs.detect.speed import Slowness
from torchobs.diagnosis import health, text_format
from torchobs.diagnosis.endings import typical_phases
from torchobs.diagnosis.rank_report import Point, Step, last_known
from torchobs.diagnosis.status import (
    NO_EVENTS,
    NO_REPLICAS,
    NOTHING_NEW,
    EventSummary,
    Newest,
    RankStatus,
    Replicas,
    RunStatus,
    left_s,
    status_of,
)
from torchobs.flight.metrics.throughput import Throughput
from torchobs.ranks import labels
from torchobs.ranks.snapshot import Rank, Readings, readings_of

_CURVE_ROWS = 4
_MOST_SCALARS = 4
_SHORT = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt", "other": "other"}
_COLUMNS = (
    Column("rank"), Column("state", right=False), Column("step"), Column("steps/s", dispensable=2),
    Column("last step", dispensable=3),
    Column("tokens/s", dispensable=6), Column("samples/s", dispensable=6), Column("MFU", dispensable=7), Column("loss"),
    Column("grad norm", dispensable=1), *(Column(_SHORT[phase], dispensable=5 + i) for i, phase in enumerate(catalog.PHASES)),
    Column("memory", dispensable=4), Column("slow", dispensable=3), Column("anomalies", right=False, dispensable=4),
)  # fmt: skip
_WHERE_KNOWN = frozenset({"tokens/s", "samples/s", "MFU", "anomalies"})
"""Columns that are left out, for the room of others, where no rank has anything in them"""
_FINE = frozenset({"alive", "finished"})


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
    kept = [at for at, one in enumerate(_COLUMNS) if one.heading not in _WHERE_KNOWN or any(row[at] for row in cells)]
    heading, *rows = table([_COLUMNS[at] for at in kept], [[row[at] for at in kept] for row in cells], style.width)
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
    return {incarnation: found for team in spent for incarnation, found in speed.slowness(team).items()}


def _verdict(statuses: Sequence[RankStatus], style: TerminalStyle) -> list[str]:
    """Return the findings in the live page's words, after its headline if that is one; none if all is well."""
    status = RunStatus(statuses, len(statuses), len(statuses))
    head = health.headline(status)
    found = [*([head] if head.severity != health.INFO else []), *health.findings(status)]
    severity = max((one.severity for one in found), key=lambda name: health.LEVELS[name].value, default=health.INFO)
    if severity == health.INFO:
        return []
    line = f"{health.BADGES[health.LEVELS[severity]]}: {' '.join(text_format.clean(one.text) for one in found)}"
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
        *_work(one),
        text_format.number(last.loss if last else None),
        text_format.number(last_known([step.grad_norm for step in steps])),
        *(text_format.percent(phases[phase] / whole) if whole > 0 else "-" for phase in catalog.PHASES),
        _memory(one),
        "-" if status.slowness is None else f"{status.slowness.factor:.2f}×",
        ", ".join(f"{kind.replace('_', ' ')} {text_format.count(count)}" for kind, count in counts.items() if count),
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
