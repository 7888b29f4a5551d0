"""The events, steps and logged scalars in a flight file, as JSON objects."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.diagnosis import scalars
from torchobs.diagnosis.event_units import units
from torchobs.diagnosis.rank_report import with_late
from torchobs.exporter.api.problems import bad
from torchobs.exporter.api.serializers import instant, named, wall_ns
from torchobs.flight.format.layout import PHASE_NAMES
from torchobs.flight.format.step_record import StepFlag
from torchobs.flight.metrics.throughput import RECORDS, pace, speed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchobs.flight.format.step_record import StepRecord
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank

MOST_STEPS = 4096
MOST_EVENTS = 1000
LATE_FACTOR = 3
"""Records read per requested step: the step's own, and those with values that devices delivered later."""

_CURSOR = re.compile(r"(-?[0-9]{1,19})-([0-9a-f]{32})-([0-9]{1,19})")
LONGEST_NAME = 256
"""Longest event name returned, in characters; an application's events may have any name."""


class Position(NamedTuple):
    """Position of an event in the order of all ranks' events."""

    wall_ns: int
    incarnation: str
    at: int

    def cursor(self) -> str:
        """Return the position as a cursor, with which a client requests older events."""
        return f"{self.wall_ns}-{self.incarnation}-{self.at}"


class Dated(NamedTuple):
    """An event and its position."""

    position: Position
    event: dict[str, Any]


def position_of(cursor: str) -> Position:
    """Return the position that a cursor encodes. Raises ``Problem``."""
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise bad("cursor is none that this API gave: take it from `next` of the page before.")
    return Position(int(match[1]), match[2], int(match[3]))


def events(file: FlightFile, rank: Rank) -> list[Dated]:
    """Return the events in the ring; spans are left out."""
    dated = []
    for at, fields in file.events():
        if fields.get("k") == "event":
            dated.append(_dated(at, fields, fields["name"][:LONGEST_NAME], wall_ns(rank.view.header, fields["t"]), rank))
    return dated


def page(events: Iterable[Dated], before: Position | None, limit: int) -> dict[str, Any]:
    """Return the newest ``limit`` events that are older than ``before``, newest first."""
    older = sorted(
        (one for one in events if before is None or one.position < before), key=lambda one: one.position, reverse=True
    )
    taken = older[:limit]
    more = len(older) > len(taken)
    return {"events": [one.event for one in taken], "next": taken[-1].position.cursor() if more else None}


def steps(file: FlightFile, rank: Rank, last: int) -> dict[str, Any]:
    """Return the last steps, oldest first, with values delivered after their end, and their throughput while it makes steps."""
    records = file.steps(max(last * LATE_FACTOR, RECORDS))
    found = speed(pace(records)) if rank.trains or not rank.up else None
    return {"speed": found, "steps": [_step(parts, rank) for parts in with_late(records)[-last:]]}


def logged(file: FlightFile, _: Rank) -> dict[str, Any]:
    """Return the curves of the scalars that the script logs, by name, oldest point first."""
    curves = scalars.curves(fields for _, fields in file.events())
    return {"scalars": [{"name": name, "points": [point._asdict() for point in points]} for name, points in curves.items()]}


def _dated(at: int, fields: dict[str, Any], name: str, when_ns: int, rank: Rank) -> Dated:
    attributes = fields["attrs"]
    return Dated(
        Position(when_ns, rank.incarnation, at),
        {
            **named(rank),
            "time": instant(when_ns),
            "name": name,
            "severity": catalog.event_severity(name, attributes).name.lower(),
            "step": fields.get("step"),
            "attributes": attributes,
            "units": units(name, attributes),
        },
    )


def _step(parts: Sequence[StepRecord], rank: Rank) -> dict[str, Any]:
    record, flags, loss, norm = parts[0], 0, None, None
    for part in parts:
        loss = part.loss if part.flags & StepFlag.LOSS else loss
        norm = part.grad_norm if part.flags & StepFlag.GRAD_NORM else norm
        flags |= part.flags
    return {
        "step": record.step,
        "ended": instant(wall_ns(rank.view.header, record.end_ns)),
        "duration_s": None if flags & StepFlag.UNTIMED else record.duration_s,
        "loss": loss,
        "losses": record.losses,
        "gradient_norm": norm,
        "learning_rate": record.learning_rate if flags & StepFlag.LEARNING_RATE else None,
        "phases_s": dict(zip(PHASE_NAMES, record.phase_s, strict=True)),
        "tokens": sum(part.tokens for part in parts),
        "samples": sum(part.samples for part in parts),
        "loss_scale": record.norm_scale,
        "skipped": bool(flags & StepFlag.SKIPPED),
    }
