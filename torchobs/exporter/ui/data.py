"""Page data that is not in a snapshot: records, events, scalars. Read in the scan thread, only while there are viewers."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from torchobs.diagnosis import scalars
from torchobs.diagnosis.rank_report import events_of
from torchobs.diagnosis.status import (
    LAST_LOSSES,
    NO_REPLICAS,
    NOTHING_NEW,
    EventSummary,
    Newest,
    Replicas,
    newest,
    replicas_of,
    summary_of,
)
from torchobs.exporter.ui import events
from torchobs.exporter.ui.events import NO_EVENTS, RankEvents
from torchobs.flight.format.step_record import RecordKind, StepFlag
from torchobs.flight.metrics.throughput import RECORDS as LATEST
from torchobs.flight.metrics.throughput import Throughput, pace
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.report.charts import Curve, curve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchobs.diagnosis.scalars import Point
    from torchobs.exporter.snapshot_cache import Scan
    from torchobs.flight.format.step_record import StepRecord
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank, Snapshot

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
            rows = self.details.events.add(events.of_ring(rank.view.header, rank.rank, new))
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
