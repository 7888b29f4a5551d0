"""Ranks and runs of a scanner's snapshot, as the live page and ``top`` show them, with what their files say beyond it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, isnan
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.detect import speed
from torchobs.diagnosis.health import Health, health
from torchobs.diagnosis.status import (
    LAST_LOSSES,
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
from torchobs.flight.events import Event, Late, Span
from torchobs.flight.step_record import RecordKind, StepFlag
from torchobs.flight.throughput import RECORDS as LATEST
from torchobs.flight.throughput import Throughput, pace
from torchobs.ranks import comparison, labels
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.ranks.rank_view import MOST_TEXT, Fact, Point, curves, events_of, spans_of, title_of, words_of
from torchobs.ranks.snapshot import Reader, grouped
from torchobs.support import text as text_format

if TYPE_CHECKING:
    from torchobs.flight.layout import Header
    from torchobs.flight.reader import FlightFile
    from torchobs.flight.step_record import StepRecord
    from torchobs.ranks.snapshot import Rank, Readings, Snapshot

KEPT_EVENTS = 200
"""Newest events of a rank that are kept"""
MOST_ALIKE = 3
"""Up to this number, events of a kind are listed individually."""
MOST_LINES = 100
MOST_MERGED = 20_000
"""Events of all ranks that are looked through for the list"""
ALIKE_S = 60.0
RECORDS = 16_384
"""Records read per update over all ranks, at least 64 of each; one takes 2 µs to decode. Beyond 64 ranks, the throughput of
ranks that are not focused is over fewer steps."""
EVENTS_S = 0.2
"""Time limit per update for event rings, each of which takes up to 5 ms; the remaining rings are read by the next update."""
MOST_HISTORIES = 16
MOST_RUNS = 50
MOST_BY_STEPS = 256
"""Living ranks of a run up to which they are compared by their last steps: with more that takes as long as all else"""
MOST_COMPARED = 64
"""Steps by which ranks are compared."""
KEPT = 4096
"""Values kept of a quantity: as many as the ring has records."""
_SPANS = {
    catalog.SPAN_EPOCH.name: "Epoch",
    catalog.SPAN_EVALUATION.name: "Evaluation",
    catalog.SPAN_CHECKPOINT.name: "Checkpoint",
    catalog.SPAN_RESTORE.name: "Restore",
}
"""Spans shown as events because they are long; those of steps are for tracing tools."""


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

METRICS = (
    catalog.STEPS, catalog.LOSS, catalog.LEARNING_RATE, catalog.STEPS_PLANNED, catalog.GRAD_NORM,
    catalog.GRAD_CLIPPED_STEPS, catalog.GRAD_NONFINITE_STEPS, catalog.ANOMALIES, catalog.ANOMALY_ACTIVE,
    catalog.GOODPUT_TIME, catalog.AMP_SCALE, catalog.AMP_STEPS_SKIPPED, catalog.AMP_SKIP_STREAK,
    catalog.AMP_AUTOCAST, catalog.COMPILE_TIME, catalog.COMPILE_COMPILATIONS, catalog.COMPILE_GRAPH_BREAKS,
    catalog.COMPILE_FAILURES, catalog.COMPILE_IN_PROGRESS, catalog.MEMORY_DEVICE_ALLOCATED,
    catalog.MEMORY_DEVICE_RESERVED, catalog.MEMORY_DEVICE_PEAK, catalog.MEMORY_DEVICE_LIMIT, catalog.MEMORY_HOST_RSS,
    catalog.MEMORY_HOST_CHILDREN_RSS, catalog.MEMORY_HOST_UTILIZATION, catalog.MEMORY_TIME_TO_LIMIT,
    catalog.CGROUP_MEMORY_WORKING_SET, catalog.CGROUP_MEMORY_LIMIT, catalog.CHECKPOINTS, catalog.CHECKPOINT_TIMESTAMP,
    catalog.CHECKPOINT_SIZE, catalog.CHECKPOINT_FAILURE_STREAK,
    catalog.SCALAR_VALUE, catalog.DATA_STARVED, catalog.GRAD_UNMOVED_LAYERS, catalog.STEP_PHASE_TIME, catalog.PROBE_DISABLED,
    catalog.DISTRIBUTED_INFO, catalog.GRAD_NORM_RANKS, catalog.MFU, *comparison.COLLECTIVE_METRICS,
    catalog.DATA_WORKERS_DIED, catalog.HW_STATUS, catalog.MEMORY_HOST_AVAILABLE, catalog.CGROUP_MEMORY_PEAK,
    catalog.MEMORY_SHARED_USED, catalog.MEMORY_SHARED_SIZE, catalog.CGROUP_MEMORY_OOM_KILLS,
    *(metric for metric, _ in LAYERS.values()),
)  # fmt: skip
"""Metrics read from a rank."""


class FileSource(Protocol):
    """A scanner, or what lends one's files."""

    def flight_file(self, incarnation: str) -> AbstractContextManager[FlightFile]:
        """Lend a rank's file. Raises one of ``READ_ERRORS``."""


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
    kinds: dict[tuple[str, str], list[EventRow]] = {}
    for row in chain.from_iterable(rows[-most:] for rows in every):
        kinds.setdefault((row.title, row.anomaly), []).append(row)
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


def of_ring(header: Header, rank: str, ring: Sequence[Event | Span | Late]) -> list[EventRow]:
    """Return the events and the long spans of a rank's ring, oldest first."""
    ours = (span for span in ring if isinstance(span, Span) and span.is_ours)
    rows = [_event(rank, fact) for fact in events_of(ring, header) if fact.name != catalog.EVENT_SCALARS.name]  # curves
    for span in spans_of(ours):
        if span.name in _SPANS:
            took = f"took {text_format.duration(span.end_s - span.start_s)}"
            words = words_of(Fact(span.name, span.end_s, None, span.attributes))
            row = EventRow(span.end_s, (rank,), None, Severity.INFO, _SPANS[span.name], " · ".join(filter(None, [took, words])))
            rows.append(row)
    return sorted(rows, key=_time)


def _event(rank: str, fact: Fact) -> EventRow:
    kind, is_ours = fact.attributes.get("kind"), fact.name in catalog.EVENT_BY_NAME
    is_anomaly = fact.name == catalog.EVENT_ANOMALY.name and kind in catalog.ANOMALY_KINDS
    severity = catalog.event_severity(fact.name, fact.attributes)
    title = text_format.capital(title_of(fact.name)) if is_ours else text_format.clean(fact.name, MOST_TEXT)
    words = " · ".join(filter(None, [fact.text("kind").replace("_", " "), words_of(fact)]))
    number = 1 + fact.count("left_out") if is_anomaly else 1
    return EventRow(fact.time_s, (rank,), fact.step, severity, title, words, str(kind) if is_anomaly else "", number)


class Curves(NamedTuple):
    """Values of one rank by step, sorted by step."""

    loss: Sequence[tuple[int, float]] = ()
    grad_norm: Sequence[tuple[int, float]] = ()
    step_s: Sequence[tuple[int, float]] = ()
    read: bool = False
    """whether its records have been read: if so, there are no other values"""


class RankDetails(NamedTuple):
    """What a rank's file says beyond its metrics."""

    pace: Throughput | None = None
    newest: Newest = NOTHING_NEW
    """the last loss and gradient norm, finite or not"""
    facts: tuple[Fact, ...] = ()
    """the newest events"""
    rows: tuple[EventRow, ...] = ()
    """the same and long spans for people, oldest first"""
    scalars: Mapping[str, tuple[Point, ...]] = MappingProxyType({})
    """the scalars that the script logs"""
    summary: EventSummary = EventSummary()
    replicas: Replicas = NO_REPLICAS
    """what the rank has written down to be compared with others, of the last steps"""
    curves: Curves = Curves()
    """empty if the rank is not focused"""


Details = Mapping[str, RankDetails]
"""The details by incarnation"""
NO_DETAILS = RankDetails()
_UNREAD = object()


class _History:
    """The last losses, gradient norms and step times of a rank."""

    def __init__(self) -> None:
        self._values = tuple(deque[tuple[int, float]](maxlen=KEPT) for _ in range(3))
        self.upto = 0
        """number of the last record added"""

    def add(self, records: Iterable[StepRecord]) -> None:
        losses, norms, times = self._values
        for record in records:
            if record.seq <= self.upto:
                continue
            self.upto = record.seq
            if record.flags & StepFlag.LOSS:
                losses.append((record.step, record.loss))
            if record.flags & StepFlag.GRAD_NORM:
                norms.append((record.step, record.grad_norm))
            if record.kind == RecordKind.STEP and not record.flags & StepFlag.UNTIMED:
                times.append((record.step, record.duration_s))

    def curves(self) -> Curves:
        loss, norm, step_s = (sorted(values, key=lambda pair: pair[0]) for values in self._values)
        return Curves(loss, norm, step_s, read=self.upto > 0)


class _RankReader:
    """Reads one rank's details, as far as they have changed since the last time."""

    def __init__(self) -> None:
        self.details = NO_DETAILS
        self._core: object = _UNREAD
        """the values of the rank when its records were read"""
        self._history: _History | None = None
        """of a focused rank"""
        self._event_head = self._newest_event = -1

    def read_records(self, files: FileSource, rank: Rank, limit: int, *, focused: bool) -> None:
        """Read the last records; ``focused``: with the curves."""
        if not focused and self._history is not None:
            self._history, self.details = None, self.details._replace(curves=Curves())
        core = rank.view.blocks[0] if rank.view.blocks else None
        if core is self._core and (self._history is not None or not focused):
            return
        with suppress(*READ_ERRORS), files.flight_file(rank.incarnation) as file:  # gone or unreadable: earlier data stays
            records = file.latest(LATEST if focused else limit)
            self.details = self.details._replace(pace=pace(records, file.forward_share()), newest=newest(records))
            if focused:
                self._history = self._history or _History()
                gap = not records or records[0].seq > self._history.upto + 1
                self._history.add(file.latest(KEPT) if gap else records)
                self.details = self.details._replace(curves=self._history.curves())
            self._core = core

    def read_events(self, files: FileSource, rank: Rank) -> None:
        """Read the new events."""
        if rank.view.live.event_head == self._event_head:
            return
        with suppress(*READ_ERRORS), files.flight_file(rank.incarnation) as file:
            new = [one for one in file.events() if not isinstance(one, Late) and one.position > self._newest_event]
            facts, known = events_of(new, rank.view.header), self.details
            replicas = replicas_of(facts, known.newest.losses, known.replicas)
            weights, batches = (dict([*steps.items()][-MOST_COMPARED:]) for steps in replicas[:2])
            self.details = known._replace(
                facts=(*known.facts, *facts)[-KEPT_EVENTS:],
                rows=(*known.rows, *of_ring(rank.view.header, rank.rank, new))[-KEPT_EVENTS:],
                scalars=curves(new, known.scalars),
                summary=summary_of(facts, known.summary),
                replicas=Replicas(weights, batches),
            )
            self._newest_event = max((one.position for one in new), default=self._newest_event)
        self._event_head = rank.view.live.event_head


class DetailsReader:
    """Reads details of ranks and caches them per incarnation. To be used in one thread."""

    def __init__(self) -> None:
        self._readers: dict[str, _RankReader] = {}

    def gather(self, files: FileSource, snapshot: Snapshot, focused: Iterable[str]) -> Details:
        """Return the details of all ranks in a snapshot, and the curves of the incarnations in ``focused``."""
        chosen = list(dict.fromkeys(focused))[:MOST_HISTORIES]
        limit = min(LATEST, max(LAST_LOSSES, RECORDS // max(1, len(snapshot.ranks))))
        self._readers = {rank.incarnation: self._readers.get(rank.incarnation) or _RankReader() for rank in snapshot.ranks}
        for rank in snapshot.ranks:
            self._readers[rank.incarnation].read_records(files, rank, limit, focused=rank.incarnation in chosen)
        deadline = time.perf_counter() + EVENTS_S
        for rank in sorted(snapshot.ranks, key=lambda rank: (rank.incarnation not in chosen, rank.up)):
            if time.perf_counter() > deadline:
                break
            self._readers[rank.incarnation].read_events(files, rank)
        return {incarnation: reader.details for incarnation, reader in self._readers.items()}


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank of a snapshot. Times in seconds."""

    incarnation: str
    status: RankStatus
    readings: Readings
    details: RankDetails = NO_DETAILS

    @property
    def rank(self) -> str:
        """The rank's label."""
        return self.status.rank

    @property
    def pace(self) -> Throughput | None:
        """Its throughput over its last steps, whatever it does now."""
        return self.details.pace

    @property
    def speed(self) -> Throughput | None:
        """Its throughput while it trains; ``None`` if it has ended, hangs or does something else."""
        return self.pace if self.status.per_s else None

    @property
    def left_s(self) -> float | None:
        """Estimated time for the remaining steps, in seconds; ``None`` if unknown."""
        return left_s(self.readings.get, self.speed)

    @property
    def memory(self) -> float | None:
        """Bytes that the rank has on its devices; where there are none, those of its process."""
        reserved = self.readings.of(catalog.MEMORY_DEVICE_RESERVED)
        return sum(reserved.values()) if reserved else self.readings.get(catalog.MEMORY_HOST_RSS)

    @property
    def memory_limit(self) -> str:
        """How full the fullest device is, in words; without devices the container or the machine; empty if unknown."""
        reserved, limits = self.readings.of(catalog.MEMORY_DEVICE_RESERVED), self.readings.of(catalog.MEMORY_DEVICE_LIMIT)
        if reserved:
            shares = [(size / limits[device], device[0]) for device, size in reserved.items() if limits.get(device)]
            share, device = max(shares, default=(0.0, ""))
            return f"{text_format.percent(share)} of {device}" if device else ""
        used = [(share, limit) for (limit,), share in self.readings.of(catalog.MEMORY_HOST_UTILIZATION).items()]
        share, limit = max(used, default=(0.0, ""))
        return f"{WHOLES.get(limit, limit)} {text_format.percent(share)} full" if limit else ""

    @property
    def trouble(self) -> float:
        """How urgently it needs attention."""
        by_state = {"lost": 6.0, "failed": 6.0, "hung": 5.0, "unresponsive": 4.0}.get(self.status.state, 0.0)
        slow = self.status.slowness.factor - 1 if self.status.slowness and self.status.slowness.factor > 1 else 0.0
        # rounded, so that nearly equal ranks keep their order
        return round(by_state + 3.0 * bool(self.status.standstill) + 2.0 * bool(self.status.anomalies) + min(slow, 1.0), 1)


@dataclass(frozen=True, slots=True)
class RunView:
    """The ranks of one run on this node, in the order of their numbers."""

    job_name: str
    run_id: str
    ranks: tuple[RankView, ...]
    status: RunStatus
    health: Health

    @property
    def key(self) -> str:
        """The run's key in links."""
        return f"{self.job_name}/{self.run_id}"

    @property
    def total_steps(self) -> int:
        """Number of steps that are planned; 0 if unknown."""
        return max((int(rank.readings.get(catalog.STEPS_PLANNED) or 0) for rank in self.ranks), default=0)

    @property
    def left_s(self) -> float | None:
        """Estimated time for the remaining steps of its slowest rank, in seconds; ``None`` if unknown."""
        return max((seconds for rank in self.ranks if (seconds := rank.left_s) is not None), default=None)


class RunsReader:
    """Builds the runs of a snapshot; caches where each rank's values are in its file."""

    def __init__(self) -> None:
        self._reader = Reader(METRICS)

    def runs(self, snapshot: Snapshot, details: Details, asked: Collection[str] = ()) -> tuple[RunView, ...]:
        """Return the runs in order: the first ones, and those with a key in ``asked``."""
        self._reader.keep(snapshot.ranks)
        runs = enumerate(grouped(snapshot.ranks))
        return tuple(self._run(ranks, details) for index, ranks in runs if index < MOST_RUNS or key_of(ranks) in asked)

    def _run(self, ranks: Sequence[Rank], details: Details) -> RunView:
        sizes = ("world_size", "local_world_size")
        world_size, here = (max(labels.number(rank.view.header.resource, name) or 0 for rank in ranks) for name in sizes)
        views = [self._view(rank, details.get(rank.incarnation, NO_DETAILS)) for rank in ranks]
        return run_of(ranks[0].job_name, ranks[0].run_id, views, expected=here or world_size, world_size=world_size)

    def _view(self, rank: Rank, details: RankDetails) -> RankView:
        readings = self._reader.read(rank)
        status = status_of(
            rank,
            readings,
            details.newest,
            pace=details.pace,
            replicas=details.replicas._replace(losses=details.newest.losses),
            events=details.summary,
            lately=recent_anomalies(anomalies_of(details.facts), time.time()),
        )
        return RankView(rank.incarnation, status, readings, details)


def run_of(job_name: str, run_id: str, ranks: Sequence[RankView], *, expected: int, world_size: int) -> RunView:
    """Return a run with its health; ``expected``: number of its ranks that this node should have."""
    compared = _compared(ranks)
    status = RunStatus([rank.status for rank in compared], max(expected, len(ranks)), max(world_size, len(ranks)))
    return RunView(job_name, run_id, tuple(compared), status, health(status))


def _compared(ranks: Sequence[RankView]) -> Sequence[RankView]:
    """Return the ranks with the slowness of the living ones: by their last steps until the scanner compares them."""
    living = [rank for rank in ranks if rank.status.up]
    if not 1 < len(living) <= MOST_BY_STEPS or any(rank.status.slowness for rank in living):
        return ranks
    slow: dict[str, speed.Slowness] = {}
    for team in labels.teams(living):
        slow |= speed.slowness({rank.incarnation: rank.pace.spent for rank in team if rank.pace})
    return [replace(rank, status=replace(rank.status, slowness=slow.get(rank.incarnation))) for rank in ranks]


def key_of(ranks: Sequence[Rank]) -> str:
    """Return the key of a run in links."""
    return f"{ranks[0].job_name}/{ranks[0].run_id}"


WHOLES = {"cgroup": "container", "machine": "machine"}
"""What a limit on the host's memory is the limit of"""
SORTS = ("worst", "rank", "step", "time", "loss", "norm", "memory")


def ordered(ranks: Sequence[RankView], sort: str) -> list[RankView]:
    """Return the ranks sorted by one of :data:`SORTS`; where values are equal or missing, by rank number."""
    keys: dict[str, Callable[[RankView], float]] = {
        "worst": lambda rank: -rank.trouble,
        "step": lambda rank: rank.status.steps,
        "time": lambda rank: -(rank.pace.step_s if rank.pace else -1.0),
        "loss": lambda rank: descending(rank.status.loss),
        "norm": lambda rank: descending(rank.status.grad_norm),
        "memory": lambda rank: descending(rank.memory),
    }
    return sorted(ranks, key=keys[sort]) if sort in keys else list(ranks)


def descending(value: float | None) -> float:
    """Return a sort key for descending order: NaN first, missing values last."""
    return inf if value is None else -inf if isnan(value) else -value
