"""The live page's address, which the exporter announces a second after it was started: said once, by rank 0."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import ClassVar

_INTERVAL_S = 0.5
_PATIENCE_S = 60.0
_logger = logging.getLogger("torchobs")


class PageAddress:
    """Waits for the exporter of the flight file's directory; for the sampler thread."""

    said_elsewhere: ClassVar[bool] = False
    """Whether the command that runs the script says it"""

    def __init__(self, flight_file: str, *, says: bool) -> None:
        self._directory, self._says = str(Path(flight_file).parent), says
        self._due_s, self._until_s = 0.0, time.monotonic() + _PATIENCE_S
        self.url = ""
        """Empty until it is announced"""

    def sample(self) -> None:
        """Look whether it is announced."""
        now_s = time.monotonic()
        if self.url or now_s < self._due_s or now_s > self._until_s:
            return
        self._due_s = now_s + _INTERVAL_S
        self.url = announced(self._directory)
        if self.url and self._says and not PageAddress.said_elsewhere:
            _logger.warning("torchobs: this run is shown live on %s", self.url)


def announced(directory: str) -> str:
    """Return the address of the directory's exporter; empty if there is none, or none that listens yet."""
    from torchobs.flight.files.location import opened
    from torchobs.node import election

    try:
        with opened(directory) as directory_fd:
            found = election.read(directory_fd)
    except OSError:
        return ""
    return found.url if found is not None else ""
