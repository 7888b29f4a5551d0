"""Page data that is not in a snapshot: records, events, scalars. Read in the scan thread, only while there are viewers."""

from __future__ import annotations

import time
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from torchobs.diagnosis import scalars
from torchobs.diagnosis.status import Newest, newest
from torchobs.exporter.ui import events as page_events
from torchobs.exporter.ui.event_groups import NOTHING as NO_EVENTS
from torchobs.exporter.ui.sparkline_data import KEPT, Curve, RankHistory, curve
from torchobs.flight.metrics.throughput import RECORDS as LATEST
from torchobs.flight.metrics.throughput import Throughput, pace
from torchobs.ranks.rank_file import READ_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torchobs.exporter.snapshot_cache import Scan
    from torchobs.exporter.ui.event_groups import RankEvents
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank, Snapshot

RECORDS = 16_384
"""Records read per update over all ranks, at least 32 of each; one takes 2 µs to decode. Beyond 64 ranks, the throughput of
ranks that are not focused is over fewer steps."""

EVENTS_S = 0.2
"""Time limit per update for event rings, each of which takes up to 5 ms; the remaining rings are read by the next update."""

MOST_HISTORIES = 16


class Curves(NamedTuple):
    """The charts of one rank."""

    loss: Curve | None = None
    norm: Curve | None = None
    time: Curve | None = None
    read: bool = False
    """whether its records have been read: if so, a missing chart had no finite values"""


class Details(NamedTuple):
    """The data by incarnation."""

    paces: Mapping[str, Throughput]
    curves: Mapping[str, Curves]
    events: Mapping[str, RankEvents]
    took_s: float = 0.0
    newest: Mapping[str, Newest] = MappingProxyType({})
    """the last loss and gradient norm, finite or not"""
    scalars: Mapping[str, scalars.Curves] = MappingProxyType({})
    """the scalars that the script logs"""


NOTHING = Details({}, {}, {})


class PageData:
    """Reads the data and caches it per incarnation. To be used in one thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._paces: dict[str, tuple[object, Throughput | None, Newest]] = {}
        self._events: dict[str, tuple[int, int, RankEvents]] = {}
        self._scalars: dict[str, scalars.Curves] = {}
        self._histories: dict[str, tuple[RankHistory, Curves]] = {}

    def gather(self, scan: Scan, snapshot: Snapshot, focused: Iterable[str]) -> Details:
        """Read the data of all ranks in a snapshot, and the curves of the incarnations in ``focused``."""
        began = self._clock()
        chosen = list(dict.fromkeys(focused))[:MOST_HISTORIES]
        self._forget({rank.incarnation for rank in snapshot.ranks}, chosen)
        limit = min(LATEST, max(32, RECORDS // max(1, len(snapshot.ranks))))
        for rank in snapshot.ranks:
            self._look(scan, rank, limit, focused=rank.incarnation in chosen)
        self._look_at_events(scan, sorted(snapshot.ranks, key=lambda rank: (rank.incarnation not in chosen, rank.up)))
        return Details(
            {incarnation: found for incarnation, (_, found, _) in self._paces.items() if found},
            {incarnation: curves for incarnation, (_, curves) in self._histories.items()},
            {incarnation: events for incarnation, (_, _, events) in self._events.items()},
            self._clock() - began,
            {incarnation: last for incarnation, (_, _, last) in self._paces.items()},
            dict(self._scalars),
        )

    def _forget(self, served: set[str], focused: list[str]) -> None:
        for cache, kept in (
            (self._paces, served),
            (self._events, served),
            (self._scalars, served),
            (self._histories, {*focused} & served),
        ):
            for gone in cache.keys() - kept:
                del cache[gone]

    def _look(self, scan: Scan, rank: Rank, limit: int, *, focused: bool) -> None:
        known = self._paces.get(rank.incarnation)
        core = rank.view.blocks[0] if rank.view.blocks else None
        unchanged = known is not None and known[0] is core
        if unchanged and focused <= (rank.incarnation in self._histories):
            return
        try:
            with scan.flight_file(rank.incarnation) as file:
                records = file.latest(LATEST if focused else limit)
                self._paces[rank.incarnation] = core, pace(records), newest(records)
                if focused:
                    self._histories[rank.incarnation] = self._follow(rank.incarnation, file)
        except READ_ERRORS:
            self._paces.setdefault(rank.incarnation, (core, None, Newest()))  # gone or unreadable: earlier data stays

    def _follow(self, incarnation: str, file: FlightFile) -> tuple[RankHistory, Curves]:
        history = self._histories[incarnation][0] if incarnation in self._histories else RankHistory()
        newest = file.latest(64)
        gap = not newest or newest[0].seq > history.upto + 1
        history.add(file.latest(KEPT) if gap else newest)
        return history, Curves(curve(history.losses), curve(history.norms), curve(history.times), read=history.upto > 0)

    def _look_at_events(self, scan: Scan, ranks: Iterable[Rank]) -> None:
        deadline = self._clock() + EVENTS_S
        for rank in ranks:
            head = rank.view.live.event_head
            known, upto, events = self._events.get(rank.incarnation, (-1, -1, NO_EVENTS))
            if known == head:
                continue
            if self._clock() > deadline:
                return
            with suppress(*READ_ERRORS), scan.flight_file(rank.incarnation) as file:
                new = [(at, frame) for at, frame in file.events() if at > upto]
                events = events.add(page_events.of_ring(rank.view.header, rank.rank, new))
                upto = max((at for at, _ in new), default=upto)
                logged = scalars.curves((frame for _, frame in new), self._scalars.get(rank.incarnation))
                self._scalars[rank.incarnation] = logged
            self._events[rank.incarnation] = head, upto, events
