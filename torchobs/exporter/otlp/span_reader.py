"""Read the ranks' event rings for the push, with its own file descriptors: the scanner's belong to its thread.

Spans are read with the whole ring, because some wait in it; log records from what is new, at every look.

A rank that writes more between two reads than its ring holds overwrites unread frames. Positions count bytes since the file's
creation, so the loss is known in bytes, but not in spans.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from torchobs.flight.files.create import file_name
from torchobs.flight.format.event_ring import MAX_PAYLOAD, Tail
from torchobs.flight.format.layout import ALIGN, Region
from torchobs.flight.reader import reader
from torchobs.ranks.directory import Directory
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Collection

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.otlp.span_encoder import Frame
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank

_LONGEST = MAX_PAYLOAD + ALIGN
"""Longest frame. The gap at the ring's wrap-around is shorter, so that a gap up to this size may be no loss."""
_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class _End(NamedTuple):
    """Where the last read of a ring ended."""

    newest: int
    """position of its newest frame"""
    at: int
    """position up to which nothing was missed"""


class SpanReader:
    """Reads the event rings and counts what was lost. To be used by one thread at a time."""

    def __init__(self, config: ExporterConfig, since_ns: int) -> None:
        """``since_ns``, Unix ns: what older ranks have lost so far may have been read by an earlier exporter."""
        self.unread_bytes = 0
        """bytes overwritten before they were read"""
        self._directory, self._since_ns = Directory(config), since_ns
        self._files: dict[str, FlightFile] = {}
        self._ends: dict[str, _End] = {}
        self._tails: dict[str, tuple[Tail, int]] = {}
        """with the end of the ring at the last call"""
        self._warnings = RateLimiter(_EVERY_S)

    def read(self, rank: Rank, wall_ns: int) -> list[tuple[int, Frame]]:
        """Return position and fields of every frame in a rank's ring, oldest first; nothing if it cannot be read."""
        name = file_name(rank.view.header)
        try:
            self._directory.names(wall_ns)
            file = self._open(name, rank)
            head = file.live().event_head  # read before the ring, which then holds everything up to there
            frames = [*file.events()]
        except READ_ERRORS as problem:
            self._forget(rank.incarnation)
            _log.warning("OTLP: spans of %s cannot be read: %s", name, problem)
            return []
        self._count_overwritten(rank, frames)
        if frames:
            newest = frames[-1][0]
            self._ends[rank.incarnation] = _End(newest, head if newest < head else newest + _LONGEST)
        return frames

    def fresh(self, rank: Rank, wall_ns: int) -> list[bytes]:
        """Return the payloads written to a rank's ring since the last call, oldest first; nothing if it cannot be read."""
        name, header = file_name(rank.view.header), rank.view.header
        size, is_new = header.regions[Region.EVENTS].length, header.wall_ns >= self._since_ns
        tail, before = self._tails.get(rank.incarnation) or (Tail(size, header.seed), 0 if is_new else None)
        try:
            self._directory.names(wall_ns)
            file = self._open(name, rank)
            head = file.live().event_head
            payloads = file.fresh_events(tail, head)
        except READ_ERRORS as problem:
            self._forget(rank.incarnation)
            _log.warning("OTLP: events of %s cannot be read: %s", name, problem)
            return []
        self._tails[rank.incarnation] = tail, head
        if before is not None and head - before > size:
            self._missed(rank, head - before - size)
        return payloads

    def keep(self, incarnations: Collection[str]) -> None:
        """Close the files of all other incarnations."""
        for incarnation in self._files.keys() - set(incarnations):
            self._forget(incarnation)
        for known in (self._ends, self._tails):
            for incarnation in known.keys() - set(incarnations):
                del known[incarnation]

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.keep(())
        self._directory.close()

    def _open(self, name: str, rank: Rank) -> FlightFile:
        file = self._files.get(rank.incarnation)
        if file is None:
            file = self._files[rank.incarnation] = reader.open_file(self._directory.fd, name, self._directory.owner)
            if file.header != rank.view.header:
                raise ValueError("another file has its name")
        else:
            file.follow(self._directory.fd, name)
        return file

    def _count_overwritten(self, rank: Rank, frames: list[tuple[int, Frame]]) -> None:
        """Count the bytes written since the last read that are no longer in the ring."""
        is_new = rank.view.header.wall_ns >= self._since_ns
        before = self._ends.get(rank.incarnation, _End(-1, 0) if is_new else None)
        oldest = next((position for position, _ in frames if before is not None and position > before.newest), None)
        if before is None or oldest is None or oldest - before.at <= _LONGEST:
            return
        self._missed(rank, oldest - before.at)

    def _missed(self, rank: Rank, size: int) -> None:
        self.unread_bytes += size
        if self._warnings.take(time.monotonic()):
            _log.warning(
                "OTLP: rank %s writes more spans than its ring holds from one look to the next: of all ranks %d KiB are lost",
                rank.rank,
                self.unread_bytes >> 10,
            )

    def _forget(self, incarnation: str) -> None:
        file = self._files.pop(incarnation, None)
        if file is not None:
            file.close()
