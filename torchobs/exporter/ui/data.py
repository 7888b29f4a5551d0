"""Page data that is not in a snapshot: records, events, scalars. Read in the scan thread, only while there are viewers.

Events and long spans become lines of text, many of a kind one line with their number: otherwise the newest hundred would hide
the cause.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.diagnosis import rank_report, text_format
from torchobs.diagnosis.rank_report import Fact, SpanFact, events_of, spans_of, with_unit
from torchobs.diagnosis.status import (
    LAST_LOSSES,
    NO_REPLICAS,
    NOTHING_NEW,
    WORKER_DIED,
    EventSummary,
    Newest,
    Replicas,
    newest,
    replicas_of,
    summary_of,
)
from torchobs.flight.format.step_record import RecordKind, StepFlag
from torchobs.flight.metrics.throughput import RECORDS as LATEST
from torchobs.flight.metrics.throughput import Throughput, pace
from torchobs.ranks import labels
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.report.charts import Curve, curve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchobs.diagnosis.rank_report import Point
    from torchobs.exporter.snapshot_cache import Scan
    from torchobs.flight.format.layout import Header
    from torchobs.flight.format.step_record import StepRecord
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank, Snapshot


KEPT_EVENTS = 200
"""Newest events of a rank that are kept individually."""
MOST_KINDS = 64
"""Most kinds that are grouped, because applications may name events freely; further kinds are listed individually."""
MOST_ALIKE = 3
"""Up to this number, events of a kind are listed individually."""
MOST_LINES = 100
MOST_TEXT = 400
ALIKE_S = 60.0

_SPANS = {
    catalog.SPAN_EPOCH.name: "Epoch",
    catalog.SPAN_EVALUATION.name: "Evaluation",
    catalog.SPAN_CHECKPOINT.name: "Checkpoint",
    catalog.SPAN_RESTORE.name: "Restore",
}
"""Spans shown as events because they are long; those of steps are for tracing tools."""

Kind = tuple[str, str]
"""The title, and an anomaly's kind"""


class EventRow(NamedTuple):
    """An event for people. ``at_s`` is Unix time."""

    at_s: float
    ranks: tuple[str, ...]
    step: int | None
    severity: Severity
    title: str
    text: str
    anomaly: str = ""
    """the kind of anomaly; empty for other events"""
    number: int = 1
    """number of events that it stands for, including those the rank left out before it"""

    @property
    def kind(self) -> Kind:
        """By which it is grouped."""
        return self.title, self.anomaly


class EventGroup(NamedTuple):
    """One line of the list: number, first and last of the events of a kind, or a single event."""

    number: int
    first: EventRow
    last: EventRow


@dataclass(frozen=True, slots=True)
class RankEvents:
    """A rank's events since the page has viewers, including those that were overwritten in the ring meanwhile."""

    newest: tuple[EventRow, ...] = ()
    """oldest first"""
    groups: Mapping[Kind, EventGroup] = field(default_factory=dict)

    def add(self, events: Iterable[EventRow]) -> RankEvents:
        """Return a copy with later events added."""
        later, groups = list(events), dict(self.groups)
        for event in later:
            if (known := groups.get(event.kind)) is not None:
                groups[event.kind] = EventGroup(known.number + event.number, known.first, event)
            elif len(groups) < MOST_KINDS:
                groups[event.kind] = EventGroup(event.number, event, event)
        return RankEvents((*self.newest, *later)[-KEPT_EVENTS:], groups)


class EventLog(NamedTuple):
    """The list of a run's events."""

    lines: tuple[EventGroup, ...] = ()
    """newest first"""
    cause: EventRow | None = None
    """the first warning or error, which may have caused the later ones"""


NO_EVENTS = RankEvents()


def log_of(ranks: Iterable[RankEvents]) -> EventLog:
    """Merge the events of several ranks: equal events of several ranks become one line, and so do many of a kind."""
    ranks = list(ranks)
    groups: dict[Kind, EventGroup] = {}
    for kind, group in chain.from_iterable(rank.groups.items() for rank in ranks):
        groups[kind] = _merged(groups[kind], group) if kind in groups else group
    many = {kind: group for kind, group in groups.items() if group.number > MOST_ALIKE}
    single = (event for rank in ranks for event in rank.newest if event.kind not in many)
    lines = [EventGroup(1, event, event) for event in merged_ranks(sorted(single, key=_time, reverse=True))]
    lines = sorted([*lines, *many.values()], key=lambda line: line.last.at_s, reverse=True)
    serious = (group.first for group in groups.values() if group.first.severity is not Severity.INFO)
    cause = min(serious, key=_time, default=None)
    return EventLog(tuple(lines[:MOST_LINES]), cause if cause is None else _with_ranks(cause, lines))


def _with_ranks(event: EventRow, lines: Iterable[EventGroup]) -> EventRow:
    """Return a rank's event with all ranks in which the same happened, if it is a line of the list by itself."""
    alike = (line.last.ranks for line in lines if line.number == 1 and line.last[2:] == event[2:])
    return event._replace(ranks=next((ranks for ranks in alike if event.ranks[0] in ranks), event.ranks))


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


def _merged(one: EventGroup, other: EventGroup) -> EventGroup:
    """Merge the groups of two ranks. The number is the larger, not the sum: ranks usually report the same events."""
    ranks = tuple(dict.fromkeys((*one.last.ranks, *other.last.ranks)))
    last = max(one.last, other.last, key=_time)._replace(ranks=ranks)
    return EventGroup(max(one.number, other.number), min(one.first, other.first, key=_time), last)


def recent_kinds(events: Iterable[EventRow]) -> Iterator[tuple[float, str, int]]:
    """Yield Unix time, kind and number of each, as :func:`torchobs.diagnosis.status.anomalies_of` does."""
    for event in events:
        yield event.at_s, WORKER_DIED if event.title == _title(WORKER_DIED) else event.anomaly, event.number


def _time(event: EventRow) -> float:
    return event.at_s


def of_ring(header: Header, rank: str, frames: Iterable[tuple[int, dict[str, Any]]]) -> list[EventRow]:
    """Return the events and the long spans of a rank's ring, oldest first."""
    frames = list(frames)
    ours = (frame for frame in frames if str(frame[1].get("scope", "")).startswith("['torchobs'"))
    rows = [_event(rank, fact) for fact in events_of(frames, header) if fact.name != catalog.EVENT_SCALARS.name]  # curves
    return sorted([*rows, *(_span(rank, span) for span in spans_of(ours) if span.name in _SPANS)], key=_time)


def _event(rank: str, fact: Fact) -> EventRow:
    known, kind = catalog.EVENT_BY_NAME.get(fact.name), fact.attributes.get("kind")
    is_anomaly = known is catalog.EVENT_ANOMALY and kind in catalog.ANOMALY_KINDS
    return EventRow(
        at_s=fact.time_s,
        ranks=(rank,),
        step=fact.step,
        severity=catalog.event_severity(fact.name, fact.attributes),
        title=_title(fact.name) if known else labels.text(fact.name)[:MOST_TEXT],
        text=_text(fact.name, fact.attributes),
        anomaly=str(kind) if is_anomaly else "",
        number=1 + fact.count("left_out") if is_anomaly else 1,
    )


def _title(name: str) -> str:
    return name.removeprefix("torchobs.").replace("_", " ").replace(".", " ").capitalize()


def _span(rank: str, span: SpanFact) -> EventRow:
    parts = [f"took {text_format.duration(span.end_s - span.start_s)}", _text(span.name, span.attributes)]
    return EventRow(span.end_s, (rank,), None, Severity.INFO, _SPANS[span.name], " · ".join(filter(None, parts)))


def _text(name: str, attributes: Mapping[str, Any]) -> str:
    """Return the attributes of an event or span as one line: names in words, sizes and durations with their unit."""
    parts = ((label, with_unit(name, label, value) or _value(value)) for label, value in attributes.items())
    named = ((labels.text(name).removeprefix("exception.").removesuffix("_s").replace("_", " "), text) for name, text in parts)
    return " · ".join(f"{name} {text}" for name, text in named if text)[:MOST_TEXT]


def _value(value: object) -> str:
    if isinstance(value, float) and isfinite(value):
        return text_format.number(value)
    return ", ".join(map(_value, value[:8])) if isinstance(value, list) else labels.text(value)


RECORDS = 16_384
"""Records read per update over all ranks, at least 64 of each; one takes 2 µs to decode. Beyond 64 ranks, the throughput of
ranks that are not focused is over fewer steps."""

EVENTS_S = 0.2
"""Time limit per update for event rings, each of which takes up to 5 ms; the remaining rings are read by the next update."""

MOST_HISTORIES = 16
MOST_COMPARED = 64
"""Steps by which ranks are compared."""
KEPT = 4096
"""Values kept of a quantity: as many as the ring has records."""


class Curves(NamedTuple):
    """The charts of one rank."""

    loss: Curve | None = None
    norm: Curve | None = None
    time: Curve | None = None
    read: bool = False
    """whether its records have been read: if so, a missing chart had no finite values"""


class RankDetails(NamedTuple):
    """The data of one rank."""

    pace: Throughput | None = None
    newest: Newest = NOTHING_NEW
    """the last loss and gradient norm, finite or not"""
    events: RankEvents = NO_EVENTS
    scalars: Mapping[str, tuple[Point, ...]] = MappingProxyType({})
    """the scalars that the script logs"""
    summary: EventSummary = EventSummary()
    replicas: Replicas = NO_REPLICAS
    """what the rank has written down to be compared with others, of the last steps"""
    curves: Curves = Curves()
    """empty if the rank is not focused"""


Details = Mapping[str, RankDetails]
"""The data by incarnation"""

NO_DETAILS = RankDetails()


class RankHistory:
    """Loss, gradient norm and step time of one rank."""

    def __init__(self) -> None:
        self.losses, self.norms, self.times = RecentValues(), RecentValues(), RecentValues()
        self.upto = 0
        """number of the last record added"""

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add the records that are new."""
        for record in records:
            if record.seq <= self.upto:
                continue
            self.upto = record.seq
            if record.flags & StepFlag.LOSS:
                self.losses.append(record.step, record.loss)
            if record.flags & StepFlag.GRAD_NORM:
                self.norms.append(record.step, record.grad_norm)
            if record.kind == RecordKind.STEP and not record.flags & StepFlag.UNTIMED:
                self.times.append(record.step, record.duration_s)


class RecentValues:
    """The last values with their steps, in arrays: 16 bytes each, where a list of tuples takes 120."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")

    def append(self, step: int, value: float) -> None:
        """Add a value; the oldest are dropped in blocks."""
        self._steps.append(step)
        self._values.append(value)
        if len(self._values) >= 2 * KEPT:
            del self._steps[:KEPT], self._values[:KEPT]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Yield the last (step, value) pairs in the order of their addition."""
        return ((int(step), value) for step, value in zip(self._steps[-KEPT:], self._values[-KEPT:], strict=True))


_UNREAD = object()


class _RankReader:
    """Reads one rank's data, as far as it has changed since the last time."""

    def __init__(self) -> None:
        self.details = NO_DETAILS
        self._core: object = _UNREAD
        """the values of the rank when its records were read"""
        self._history: RankHistory | None = None
        """of a focused rank"""
        self._event_head = self._newest_event = -1

    def read_records(self, scan: Scan, rank: Rank, limit: int, *, focused: bool) -> None:
        """Read the last records; ``focused``: with the curves."""
        if not focused and self._history is not None:
            self._history, self.details = None, self.details._replace(curves=Curves())
        core = rank.view.blocks[0] if rank.view.blocks else None
        if core is self._core and (self._history is not None or not focused):
            return
        with suppress(*READ_ERRORS), scan.flight_file(rank.incarnation) as file:  # gone or unreadable: earlier data stays
            records = file.latest(LATEST if focused else limit)
            self.details = self.details._replace(pace=pace(records), newest=newest(records))
            if focused:
                self.details = self.details._replace(curves=self._read_curves(file))
            self._core = core

    def _read_curves(self, file: FlightFile) -> Curves:
        history = self._history or RankHistory()
        latest = file.latest(64)
        gap = not latest or latest[0].seq > history.upto + 1
        history.add(file.latest(KEPT) if gap else latest)
        self._history = history
        return Curves(curve(history.losses), curve(history.norms), curve(history.times), read=history.upto > 0)

    def read_events(self, scan: Scan, rank: Rank) -> None:
        """Read the new events."""
        if rank.view.live.event_head == self._event_head:
            return
        with suppress(*READ_ERRORS), scan.flight_file(rank.incarnation) as file:
            new = [(position, frame) for position, frame in file.events() if position > self._newest_event]
            rows = self.details.events.add(of_ring(rank.view.header, rank.rank, new))
            logged = rank_report.curves((frame for _, frame in new), self.details.scalars)
            facts, known = events_of(new, rank.view.header), self.details
            replicas = replicas_of(facts, known.newest.losses, known.replicas)
            weights, batches = (dict([*steps.items()][-MOST_COMPARED:]) for steps in replicas[:2])
            self.details = known._replace(
                events=rows,
                scalars=logged,
                summary=summary_of(facts, known.summary),
                replicas=Replicas(weights, batches),
            )
            self._newest_event = max((position for position, _ in new), default=self._newest_event)
        self._event_head = rank.view.live.event_head


class PageData:
    """Reads the data and caches it per incarnation. To be used in one thread."""

    def __init__(self) -> None:
        self._readers: dict[str, _RankReader] = {}

    def gather(self, scan: Scan, snapshot: Snapshot, focused: Iterable[str]) -> Details:
        """Read the data of all ranks in a snapshot, and the curves of the incarnations in ``focused``."""
        chosen = list(dict.fromkeys(focused))[:MOST_HISTORIES]
        limit = min(LATEST, max(LAST_LOSSES, RECORDS // max(1, len(snapshot.ranks))))
        self._readers = {rank.incarnation: self._readers.get(rank.incarnation) or _RankReader() for rank in snapshot.ranks}
        for rank in snapshot.ranks:
            self._readers[rank.incarnation].read_records(scan, rank, limit, focused=rank.incarnation in chosen)
        deadline = time.perf_counter() + EVENTS_S
        for rank in sorted(snapshot.ranks, key=lambda rank: (rank.incarnation not in chosen, rank.up)):
            if time.perf_counter() > deadline:
                break
            self._readers[rank.incarnation].read_events(scan, rank)
        return {incarnation: reader.details for incarnation, reader in self._readers.items()}
