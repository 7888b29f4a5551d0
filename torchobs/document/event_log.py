"""The list of a run's events, of all its ranks; equal ones are one line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.flight.events import Event
from torchobs.ranks.events import MOST_TEXT, Events, title_of, words_of
from torchobs.support import text as text_format

KEPT_EVENTS = 200
"""Newest events of a rank that are listed"""
MOST_ALIKE = 3
"""Up to this number, events of a kind are listed individually."""
MOST_LINES = 100
MOST_MERGED = 20_000
"""Most events of all ranks that are searched for the list"""
ALIKE_S = 60.0
_SPANS = {
    catalog.SPAN_EPOCH.name: "Epoch",
    catalog.SPAN_EVALUATION.name: "Evaluation",
    catalog.SPAN_CHECKPOINT.name: "Checkpoint",
    catalog.SPAN_RESTORE.name: "Restore",
}
"""Spans shown as events because they are long; those of steps are for tracing tools."""


class EventRow(NamedTuple):
    """An event for people. ``at_s`` is Unix time."""

    at_s: float
    ranks: tuple[str, ...]
    step: int | None
    severity: Severity
    title: str
    text: str
    number: int = 1
    """number of events that it stands for, including those the rank left out before it"""


class EventGroup(NamedTuple):
    """One line of the list: number, first and last of the events of a kind, or a single event."""

    number: int
    first: EventRow
    last: EventRow


class EventLog(NamedTuple):
    """The list of a run's events."""

    lines: tuple[EventGroup, ...] = ()
    """newest first"""
    cause: EventRow | None = None
    """the first warning or error, which may have caused the later ones"""


def log_of(ranks: Iterable[Sequence[EventRow]]) -> EventLog:
    """Merge the events of several ranks: equal events of several ranks become one line, and so do many of a kind."""
    every = list(ranks)
    most = max(8, MOST_MERGED // max(1, len(every)))
    kinds: dict[str, list[EventRow]] = {}
    for row in chain.from_iterable(rows[-most:] for rows in every):
        kinds.setdefault(row.title, []).append(row)
    lines, serious = list[EventGroup](), list[EventRow]()
    for rows in kinds.values():
        counts = Counter[str]()
        for row in rows:
            counts[row.ranks[0]] += row.number
        merged = merged_ranks(sorted(rows, key=_time, reverse=True))
        number = max(counts.values())  # not the sum: ranks usually report the same events
        if number > MOST_ALIKE:
            everywhere = tuple(dict.fromkeys(rank for row in merged for rank in row.ranks))
            lines.append(EventGroup(number, merged[-1], merged[0]._replace(ranks=everywhere)))
        else:
            lines += [EventGroup(1, row, row) for row in merged]
        serious += [row for row in merged[-1:] if row.severity is not Severity.INFO]
    lines.sort(key=lambda line: line.last.at_s, reverse=True)
    return EventLog(tuple(lines[:MOST_LINES]), min(serious, key=_time, default=None))


def merged_ranks(events: Iterable[EventRow]) -> list[EventRow]:
    """Merge equal events of several ranks within a minute; input and result are newest first."""
    merged: dict[tuple[object, ...], list[EventRow]] = {}
    for event in events:
        alike = merged.setdefault(event[2:], [])
        if alike and alike[-1].at_s - event.at_s < ALIKE_S and event.ranks[0] not in alike[-1].ranks:
            alike[-1] = alike[-1]._replace(ranks=(*event.ranks, *alike[-1].ranks))
        else:
            alike.append(event)
    return sorted(chain.from_iterable(merged.values()), key=_time, reverse=True)


def _time(event: EventRow) -> float:
    return event.at_s


def rows_of(rank: str, events: Events) -> list[EventRow]:
    """Return the newest events and long spans of a rank, oldest first."""
    rows = [_event(rank, fact) for fact in events]
    for span in events.spans:
        if span.is_ours and span.name in _SPANS and span.ended_ns is not None:
            took = f"took {text_format.duration(span.duration_s)}"
            end = Event(span.name, span.ended_ns, None, span.attributes)
            words = words_of(end)
            row = EventRow(end.time_s, (rank,), None, Severity.INFO, _SPANS[span.name], " · ".join(filter(None, [took, words])))
            rows.append(row)
    return sorted(rows, key=_time)[-KEPT_EVENTS:]


def _event(rank: str, fact: Event) -> EventRow:
    """Return an event by its name, or an anomaly by its kind."""
    kind, is_ours = fact.attributes.get("kind"), fact.name in catalog.EVENT_BY_NAME
    is_anomaly = fact.name == catalog.EVENT_ANOMALY.name and kind in catalog.ANOMALY_KINDS
    severity = catalog.event_severity(fact.name, fact.attributes)
    title = title_of(str(kind) if is_anomaly else fact.name) if is_ours else text_format.clean(fact.name, MOST_TEXT)
    words = [] if is_anomaly else [fact.text("kind").replace("_", " ")]
    text = " · ".join(filter(None, [*words, words_of(fact)]))
    number = 1 + fact.count("left_out") if is_anomaly else 1
    return EventRow(fact.time_s, (rank,), fact.step, severity, text_format.capital(title) if is_ours else title, text, number)
