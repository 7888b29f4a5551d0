"""The ranks' event rings, read with descriptors of the push's own: the scanner's belong to its thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchobs.exporter.directory import Directory
from torchobs.exporter.tracked import HOSTILE
from torchobs.flight import reader
from torchobs.flight.birth import file_name

if TYPE_CHECKING:
    from collections.abc import Collection

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.otlp.spans import Frame
    from torchobs.exporter.scan import Rank
    from torchobs.flight.reader import FlightFile

_log = logging.getLogger(__name__)


class Rings:
    """One thread at a time."""

    def __init__(self, config: ExporterConfig) -> None:
        self._directory = Directory(config)
        self._files: dict[str, FlightFile] = {}

    def read(self, rank: Rank, wall_ns: int) -> list[tuple[int, Frame]]:
        """Return the position and the fields of every frame in a rank's ring, oldest first; none where it cannot be read."""
        name = file_name(rank.view.header)
        try:
            self._directory.names(wall_ns)
            return [*self._open(name, rank).events()]
        except HOSTILE as problem:
            self._forget(rank.incarnation)
            _log.warning("OTLP: spans of %s cannot be read: %s", name, problem)
            return []

    def keep(self, incarnations: Collection[str]) -> None:
        """Close the files of all others."""
        for incarnation in self._files.keys() - set(incarnations):
            self._forget(incarnation)

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

    def _forget(self, incarnation: str) -> None:
        file = self._files.pop(incarnation, None)
        if file is not None:
            file.close()
