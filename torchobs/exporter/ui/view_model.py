"""What the live page shows for one choice of a viewer: read from files, grouped, sorted, and cut into pages.

Events and long spans become lines of text, many of a kind one line with their number: otherwise the newest hundred would hide
the cause.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf, isfinite, isnan
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlencode

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.diagnosis import rank_report as scalars
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import Health, health
from torchobs.diagnosis.rank_report import Fact, SpanFact, events_of, spans_of, with_unit
from torchobs.diagnosis.status import (
    LAST_LOSSES,
    NO_REPLICAS,
    NOTHING_NEW,
    WORKER_DIED,
    EventSummary,
    Newest,
    RankStatus,
    Replicas,
    RunStatus,
    last_grad_norm,
    left_s,
    newest,
    recent_anomalies,
    replicas_of,
    status_of,
    summary_of,
)
from torchobs.document.charts import Curve, curve
from torchobs.document.markup import Html, tag
from torchobs.flight.format.step_record import RecordKind, StepFlag
from torchobs.flight.metrics.throughput import RECORDS as LATEST
from torchobs.flight.metrics.throughput import Throughput, pace
from torchobs.ranks import comparison, labels
from torchobs.ranks.rank_file import DIGITS, READ_ERRORS
from torchobs.ranks.snapshot import Reader, grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from torchobs.diagnosis.rank_report import Point
    from torchobs.exporter.snapshot_cache import Scan
    from torchobs.flight.format.layout import Header
    from torchobs.flight.format.step_record import StepRecord
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank, Readings, Snapshot


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
            logged = scalars.curves((frame for _, frame in new), self.details.scalars)
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


T = TypeVar("T")

PER_PAGE = 50
MOST_RUNS = 50
MOST_EVIDENCE = 50

WHOLES = {"cgroup": "container", "machine": "machine"}
"""What a limit on the host's memory is the limit of"""
SORTS = ("worst", "rank", "step", "time", "loss", "norm", "memory")
LAYERS = {
    "gradient": (catalog.GRAD_LAYER_NORM, "gradient norm"),
    "weights": (catalog.PARAM_LAYER_NORM, "weight norm"),
    "update": (catalog.UPDATE_LAYER_RATIO, "update / weights"),
    "output": (catalog.ACTIVATION_LAYER_MEAN_ABS, "mean output"),
    "spread": (catalog.ACTIVATION_LAYER_STD, "its deviation"),
    "zero": (catalog.ACTIVATION_LAYER_ZERO, "its zeros"),
}
"""Columns of the layers' table: the metric, and its heading. The last three at level extreme: the mean absolute value of what
a layer puts out, its standard deviation, and the share that is exactly zero."""
LAYER_SORTS = ("model", "name", *LAYERS)

METRICS = (
    catalog.STEPS, catalog.LOSS, catalog.LEARNING_RATE, catalog.STEPS_PLANNED, catalog.GRAD_NORM,
    catalog.GRAD_CLIPPED_STEPS, catalog.GRAD_NONFINITE_STEPS, catalog.ANOMALIES, catalog.ANOMALY_ACTIVE,
    catalog.GOODPUT_TIME, catalog.AMP_SCALE, catalog.AMP_STEPS_SKIPPED, catalog.AMP_SKIP_STREAK,
    catalog.AMP_AUTOCAST, catalog.COMPILE_TIME, catalog.COMPILE_COMPILATIONS, catalog.COMPILE_GRAPH_BREAKS,
    catalog.COMPILE_CACHE_LOOKUPS, catalog.COMPILE_FAILURES, catalog.COMPILE_IN_PROGRESS, catalog.MEMORY_DEVICE_ALLOCATED,
    catalog.MEMORY_DEVICE_RESERVED, catalog.MEMORY_DEVICE_PEAK, catalog.MEMORY_DEVICE_LIMIT, catalog.MEMORY_HOST_RSS,
    catalog.MEMORY_HOST_CHILDREN_RSS, catalog.MEMORY_HOST_UTILIZATION, catalog.MEMORY_TIME_TO_LIMIT,
    catalog.CGROUP_MEMORY_WORKING_SET, catalog.CGROUP_MEMORY_LIMIT, catalog.CHECKPOINTS, catalog.CHECKPOINT_TIMESTAMP,
    catalog.CHECKPOINT_SIZE, catalog.CHECKPOINT_FAILURE_STREAK,
    catalog.SCALAR_VALUE, catalog.DATA_STARVED, catalog.GRAD_UNMOVED_LAYERS, catalog.STEP_PHASE_TIME, catalog.PROBE_DISABLED,
    catalog.DISTRIBUTED_INFO, catalog.GRAD_NORM_RANKS, catalog.MFU, *comparison.COLLECTIVE_METRICS,
    catalog.DATA_WORKERS_DIED, catalog.HW_STATUS,
    *(metric for metric, _ in LAYERS.values()),
)  # fmt: skip
"""Metrics read from a rank."""


NO_RANK = Health(
    Severity.INFO,
    "No rank has been seen yet. One appears as soon as a training calls torchobs.init().",
    "No rank has been seen yet.",
)
MISSING = Health(Severity.INFO, "No such run (any more). Once it is there it is shown here.", "No such run (any more).")
"""Health of a chosen run that does not exist"""


class Choice(NamedTuple):
    """A viewer's choice of run, rank and sorting, from a query string; any part may be invalid."""

    run: str = ""
    """``job_name/run_id``; empty: the first run"""
    rank: str = ""
    """the rank with curves and details; invalid: the first rank"""
    sort: str = SORTS[0]
    page: int = 1
    layers: str = LAYER_SORTS[0]


@dataclass(frozen=True, slots=True)
class Row:
    """One rank. Times in seconds."""

    incarnation: str
    status: RankStatus
    readings: Readings
    pace: Throughput | None
    """its throughput over its last steps, whatever it does now"""
    grad_norm: float | None
    """the last gradient norm that was measured, finite or not"""
    memory: float | None
    """bytes in use: on its devices, or by its process if it has none"""
    memory_limit: str
    """which share of what is in use, in words: of the fullest device, else of the container or the machine; empty if unknown"""

    @property
    def rank(self) -> str:
        """The rank's label."""
        return self.status.rank

    @property
    def speed(self) -> Throughput | None:
        """Its throughput while it trains; ``None`` if it has ended, hangs or does something else."""
        return self.pace if self.status.per_s else None

    @property
    def left_s(self) -> float | None:
        """Estimated time for the remaining steps, in seconds; ``None`` if unknown."""
        return left_s(self.readings.get, self.speed)


@dataclass(frozen=True, slots=True)
class Run:
    """The ranks of one run on this node, in the order of their numbers."""

    job_name: str
    run_id: str
    rows: tuple[Row, ...]
    status: RunStatus
    health: Health

    @property
    def key(self) -> str:
        """The run's key in links."""
        return f"{self.job_name}/{self.run_id}"


@dataclass(frozen=True, slots=True)
class Model:
    """The content of the page for one choice."""

    choice: Choice
    runs: tuple[Run, ...]
    run: Run | None
    """``None``: there is no run, or not the chosen one"""
    health: Health
    """of the run shown; failed other runs are mentioned, too"""
    focus: Row | None
    rows: tuple[Row, ...]
    """the rows shown: one page of the sorted table"""
    pages: int
    curves: Curves
    scalars: Mapping[str, Curve | None]
    """curves of the chosen rank's logged scalars, by name"""
    events: EventLog
    layers: tuple[tuple[str, Mapping[str, float]], ...]
    """name, and values by column as far as it has any"""
    evidence: tuple[Mapping[str, Any], ...]
    """as in the API, newest first; ``rank``: its label, for an earlier incarnation with that one's first digits behind it"""
    total_steps: int | None
    left_s: float | None
    now_s: float
    """Unix time"""


class Modeller:
    """Builds the runs of a snapshot; caches where each rank's values are in its file."""

    def __init__(self) -> None:
        self._reader = Reader(METRICS)

    def runs(self, snapshot: Snapshot, details: Details, asked: Collection[str] = ()) -> tuple[Run, ...]:
        """Return the runs in order: the first ones, and those with a key in ``asked``."""
        self._reader.keep(snapshot.ranks)
        runs = enumerate(grouped(snapshot.ranks))
        return tuple(self._run(ranks, details) for index, ranks in runs if index < MOST_RUNS or _key(ranks) in asked)

    def _run(self, ranks: Sequence[Rank], details: Details) -> Run:
        sizes = ("world_size", "local_world_size")
        world_size, here = (max(labels.number(rank.view.header.resource, name) or 0 for rank in ranks) for name in sizes)
        rows = tuple(self._row(rank, details.get(rank.incarnation, NO_DETAILS)) for rank in ranks)
        return run_of(ranks[0].job_name, ranks[0].run_id, rows, expected=here or world_size, world_size=world_size)

    def _row(self, rank: Rank, details: RankDetails) -> Row:
        readings = self._reader.read(rank)
        status = status_of(
            rank,
            readings,
            details.newest,
            pace=details.pace,
            replicas=details.replicas._replace(losses=details.newest.losses),
            events=details.summary,
            lately=recent_anomalies(recent_kinds(details.events.newest), time.time()),
        )
        grad_norm = last_grad_norm(readings.get, details.newest.grad_norm)
        return Row(rank.incarnation, status, readings, details.pace, grad_norm, *_memory(readings))


def run_of(job_name: str, run_id: str, rows: Sequence[Row], *, expected: int, world_size: int) -> Run:
    """Return a run with its health; ``expected``: number of its ranks that this node should have."""
    status = RunStatus([row.status for row in rows], max(expected, len(rows)), max(world_size, len(rows)))
    return Run(job_name, run_id, tuple(rows), status, health(status))


def model(
    runs: tuple[Run, ...], choice: Choice, details: Details, evidence: Iterable[Mapping[str, Any]], now_s: float
) -> Model:
    """Return the model for one viewer. ``evidence``: the API's list of artifacts, newest first; ``now_s``: Unix time."""
    run = _chosen({run.key: run for run in runs}, choice)
    rows = run.rows if run else ()
    focus = next((row for row in rows if row.rank == choice.rank), rows[0] if rows else None)
    focused = details.get(focus.incarnation, NO_DETAILS) if focus else NO_DETAILS
    pages = max(1, -(-len(rows) // PER_PAGE))
    choice = _sane(choice, run, focus, pages)
    first = (choice.page - 1) * PER_PAGE
    total = max((int(row.readings.get(catalog.STEPS_PLANNED) or 0) for row in rows), default=0)
    return Model(
        choice=choice,
        runs=runs,
        run=run,
        health=health_beside(run, runs) if run else MISSING if choice.run else NO_RANK,
        focus=focus,
        rows=tuple(_ordered_rows(rows, choice.sort)[first : first + PER_PAGE]),
        pages=pages,
        curves=focused.curves,
        scalars={name: curve(points) for name, points in focused.scalars.items()},
        events=log_of(details.get(row.incarnation, NO_DETAILS).events for row in rows),
        layers=_layers(focus.readings, choice.layers) if focus else (),
        evidence=tuple(islice(_evidence_of(run, evidence), MOST_EVIDENCE)),
        total_steps=total or None,
        left_s=max((seconds for row in rows if (seconds := row.left_s) is not None), default=None),
        now_s=now_s,
    )


def health_beside(run: Run, runs: Iterable[Run]) -> Health:
    """Return the health of a run among others: failed ones are mentioned, too."""
    failed = [other for other in runs if other is not run and other.health.level is Severity.ERROR]
    if not failed:
        return run.health
    names = f"{failed[0].job_name[:80]} {failed[0].run_id[:80]}" + (f" and {len(failed) - 1:,} more" * (len(failed) > 1))
    text = f"Another run here is in trouble: {names}."
    level = max(run.health.level, Severity.WARNING, key=lambda level: level.value)
    return Health(level, f"{run.health.text} {text}", f"{run.health.gist} {text}")


def _sane(choice: Choice, run: Run | None, focus: Row | None, pages: int) -> Choice:
    """Return the choice without its invalid parts, so that links do not repeat them.

    The run becomes the one shown, so that an open page stays with it, whatever begins or ends. A chosen run that does not exist
    is kept with its rank, because it may begin soon.
    """
    return Choice(
        run=run.key if run else choice.run,
        rank=choice.rank if focus is None or focus.rank == choice.rank else "",
        sort=choice.sort if choice.sort in SORTS else SORTS[0],
        page=min(max(choice.page, 1), pages) if run else max(choice.page, 1),
        layers=choice.layers if choice.layers in LAYER_SORTS else LAYER_SORTS[0],
    )


def focused(ranks: Iterable[Rank], choice: Choice) -> str | None:
    """Return the incarnation of the chosen rank, which is shown with curves and details."""
    members = _chosen({_key(run): run for run in grouped(ranks)}, choice) or []
    return next((rank.incarnation for rank in members if rank.rank == choice.rank), members[0].incarnation if members else None)


def _chosen(runs: Mapping[str, T], choice: Choice) -> T | None:
    """Return the chosen run (``runs``: by key). If the chosen one does not exist, no other is shown in its place."""
    return runs.get(choice.run) if choice.run else next(iter(runs.values()), None)


def _trouble(status: RankStatus) -> float:
    """Return a score of how urgently a rank needs attention; by default the table is sorted by it, worst first."""
    by_state = {"lost": 6.0, "failed": 6.0, "hung": 5.0, "unresponsive": 4.0}.get(status.state, 0.0)
    slow = status.slowness.factor - 1 if status.slowness and status.slowness.factor > 1 else 0.0
    return by_state + 3.0 * bool(status.standstill) + 2.0 * bool(status.anomalies) + min(slow, 1.0)


def _ordered_rows(rows: Sequence[Row], sort: str) -> list[Row]:
    """Return the ranks sorted; where values are equal or missing, by rank number."""
    keys: dict[str, Callable[[Row], float]] = {
        "worst": lambda row: -round(_trouble(row.status), 1),
        "step": lambda row: row.status.steps,
        "time": lambda row: -(row.pace.step_s if row.pace else -1.0),
        "loss": lambda row: _descending(row.status.loss),
        "norm": lambda row: _descending(row.grad_norm),
        "memory": lambda row: _descending(row.memory),
    }
    return sorted(rows, key=keys[sort]) if sort in keys else list(rows)


def _descending(value: float | None) -> float:
    """Return a sort key for descending order: NaN first, missing values last."""
    return inf if value is None else -inf if isnan(value) else -value


def _key(ranks: Sequence[Rank]) -> str:
    return f"{ranks[0].job_name}/{ranks[0].run_id}"


def _memory(readings: Readings) -> tuple[float | None, str]:
    """Return the bytes that a rank has on its devices, or its process has if there are none, and how full what they are in is.

    The process's bytes are not all that fill the machine, or the container: so it is said which of the two is how full.
    """
    allocated, limits = readings.of(catalog.MEMORY_DEVICE_RESERVED), readings.of(catalog.MEMORY_DEVICE_LIMIT)
    if allocated:
        shares = {device: value / limits[device] for device, value in allocated.items() if limits.get(device)}
        device = max(shares, key=lambda name: shares[name], default=None)
        words = f"{text_format.percent(shares[device])} of {device[0]}" if device is not None else ""
        return sum(allocated.values()), words
    used = {limit: share for (limit,), share in readings.of(catalog.MEMORY_HOST_UTILIZATION).items()}
    fullest = max(used, key=lambda limit: used[limit], default=None)
    words = f"{WHOLES.get(fullest, fullest)} {text_format.percent(used[fullest])} full" if fullest is not None else ""
    return readings.get(catalog.MEMORY_HOST_RSS), words


def _evidence_of(run: Run | None, evidence: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the artifacts of a run's ranks, including earlier incarnations."""
    names = {row.incarnation: row.rank for row in run.rows} if run else {}
    for one in evidence:
        if one["incarnation"] in names or (run and (one["job_name"], one["run_id"]) == (run.job_name, run.run_id)):
            yield {**one, "rank": names.get(one["incarnation"], f"{one['rank']}-{one['incarnation'][:DIGITS]}")}


def _layers(readings: Readings, sort: str) -> tuple[tuple[str, Mapping[str, float]], ...]:
    values: dict[str, dict[str, float]] = {}
    for column, (metric, _) in LAYERS.items():
        for key, value in readings.of(metric).items():
            values.setdefault(key[0] if key else "", {})[column] = value
    if sort == "model":
        return tuple(values.items())
    return tuple(sorted(values.items(), key=lambda row: row[0] if sort == "name" else _descending(row[1].get(sort))))


STREAM_PATH = "/live/stream"

_MOST_QUERY = 16_000
"""Enough for the longest name of a run: it is from a header of 4 KiB, and each byte may take three in a query"""

_MOST_PAGE = 1000


def choice_of(query: str) -> Choice:
    """Return the choice in a query string. Invalid parts are ignored, never an error."""
    try:
        fields = parse_qs(query[:_MOST_QUERY], max_num_fields=16)
    except ValueError:
        return Choice()
    given = {name: fields[name][0] for name in ("run", "rank", "sort", "layers") if name in fields}
    page = fields.get("page", ["1"])[0]
    return Choice(**given, page=min(int(page), _MOST_PAGE) if page.isdecimal() and page.isascii() else 1)


def query_of(choice: Choice) -> str:
    """Return the query string for a choice; empty for the default one."""
    chosen = {name: str(value) for name, value in choice._asdict().items() if value != Choice._field_defaults[name]}
    return f"?{urlencode(chosen, errors='replace')}" if chosen else ""


def stream_of(choice: Choice) -> str:
    """Return the URL of the event stream for a choice."""
    return f".{STREAM_PATH}{query_of(choice)}"


def link(choice: Choice, words: str, section: str, *, label: str | None = None, current: bool = False) -> Html:
    """Return a link to the page with another choice."""
    target = f"./{query_of(choice)}#{section}"
    return tag("a", words, href=target, aria_label=label, aria_current="true" if current else None)
