"""Read the ranks' event rings for the push, with its own file descriptors: the scanner's belong to its thread.

Spans and log records have a reader each, for they are read at times of their own; each reads what is new.

A rank that writes more between two reads than its ring holds overwrites unread frames. Positions count bytes since the file's
creation, so the loss is known in bytes, but not in spans.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from torchobs.flight.files.create import file_name
from torchobs.flight.format.event_ring import Tail
from torchobs.flight.format.layout import Region
from torchobs.flight.reader import reader
from torchobs.ranks.directory import Directory
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Collection

    from torchobs.exporter.config import ExporterConfig
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank

_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class RingReader:
    """Reads the event rings and counts what was lost. To be used by one thread at a time."""

    def __init__(self, config: ExporterConfig, since_ns: int) -> None:
        """``since_ns``, Unix ns: what older ranks have lost so far may have been read by an earlier exporter."""
        self.unread_bytes = 0
        """bytes overwritten before they were read"""
        self._directory, self._since_ns = Directory(config), since_ns
        self._files: dict[str, FlightFile] = {}
        self._tails: dict[str, Tail] = {}
        self._heads: dict[str, int] = {}
        """position of the end of each rank's ring when it was last read"""
        self._warnings = RateLimiter(_EVERY_S)

    def written(self, rank: Rank) -> int:
        """Return the bytes written to a rank's ring since it was last read, according to the file's header."""
        return rank.view.live.event_head - self._heads.get(rank.incarnation, 0)

    def fresh(self, rank: Rank, wall_ns: int) -> list[bytes]:
        """Return the payloads written to a rank's ring since the last call, oldest first; nothing if it cannot be read."""
        self._heads[rank.incarnation] = rank.view.live.event_head
        name, header = file_name(rank.view.header), rank.view.header
        known = self._tails.get(rank.incarnation)
        tail = known or Tail(header.regions[Region.EVENTS].length, header.seed)
        try:
            self._directory.names(wall_ns)
            file = self._open(name, rank)
            payloads = file.fresh_events(tail, file.live().event_head)
        except READ_ERRORS as problem:
            self._forget(rank.incarnation)
            _log.warning("OTLP: events of %s cannot be read: %s", name, problem)
            return []
        self._tails[rank.incarnation] = tail
        if tail.missed and (known or header.wall_ns >= self._since_ns):
            self._missed(rank, tail.missed)
        return payloads

    def keep(self, incarnations: Collection[str]) -> None:
        """Close the files of all other incarnations."""
        for incarnation in self._files.keys() - set(incarnations):
            self._forget(incarnation)
        for incarnation in self._heads.keys() - set(incarnations):
            del self._heads[incarnation]
            self._tails.pop(incarnation, None)

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
