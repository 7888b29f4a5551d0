"""The ranks' event rings, read with descriptors of the push's own: the scanner's belong to its thread.

A rank that writes more between two looks than its ring holds writes over what nobody has read. What is missing is seen by the
positions, which count bytes since birth, and is told in bytes: how many spans that were, nobody knows.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from torchobs.flight.files.create import file_name
from torchobs.flight.format.event_ring import MAX_PAYLOAD
from torchobs.flight.format.layout import ALIGN
from torchobs.flight.reader import reader
from torchobs.ranks.directory import Directory
from torchobs.ranks.rank_file import HOSTILE
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Collection

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.otlp.span_encoder import Frame
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank

_LONGEST = MAX_PAYLOAD + ALIGN
"""What a frame takes at most, and less than what a lap's end may leave empty: a smaller gap may be no loss."""
_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class _End(NamedTuple):
    """Where a reading of a ring ended."""

    newest: int
    """position of its last frame"""
    at: int
    """a position up to which it missed nothing"""


class SpanReader:
    """One thread at a time."""

    def __init__(self, config: ExporterConfig, since_ns: int) -> None:
        """``since_ns``, Unix ns: what an older rank has lost by now, an exporter before this one may have read."""
        self.unread_bytes = 0
        """that were written over before they were read"""
        self._directory, self._since_ns = Directory(config), since_ns
        self._files: dict[str, FlightFile] = {}
        self._ends: dict[str, _End] = {}
        self._warnings = RateLimiter(_EVERY_S)

    def read(self, rank: Rank, wall_ns: int) -> list[tuple[int, Frame]]:
        """Return the position and the fields of every frame in a rank's ring, oldest first; none where it cannot be read."""
        name = file_name(rank.view.header)
        try:
            self._directory.names(wall_ns)
            file = self._open(name, rank)
            head = file.live().event_head  # before the ring: all up to there is in it
            frames = [*file.events()]
        except HOSTILE as problem:
            self._forget(rank.incarnation)
            _log.warning("OTLP: spans of %s cannot be read: %s", name, problem)
            return []
        self._miss(rank, frames)
        if frames:
            newest = frames[-1][0]
            self._ends[rank.incarnation] = _End(newest, head if newest < head else newest + _LONGEST)
        return frames

    def keep(self, incarnations: Collection[str]) -> None:
        """Close the files of all others."""
        for incarnation in self._files.keys() - set(incarnations):
            self._forget(incarnation)
        for incarnation in self._ends.keys() - set(incarnations):
            del self._ends[incarnation]

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

    def _miss(self, rank: Rank, frames: list[tuple[int, Frame]]) -> None:
        """Count what was written since the last reading and is not among the frames any more."""
        is_new = rank.view.header.wall_ns >= self._since_ns
        before = self._ends.get(rank.incarnation, _End(-1, 0) if is_new else None)
        oldest = next((position for position, _ in frames if before is not None and position > before.newest), None)
        if before is None or oldest is None or oldest - before.at <= _LONGEST:
            return
        self.unread_bytes += oldest - before.at
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
