"""Runs the elected exporter: serve, leave when no rank needs it, and check once more for new ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torchobs.node import announcement, log_file
from torchobs.node.election import Election, anyone_alive

if TYPE_CHECKING:
    from collections.abc import Callable

VIEWER_WAIT_S = 900.0
"""How long the exporter stays after a run's end while its live page is open."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """State of the ranks, by which a node's exporter decides when to leave."""

    alive: int
    """ranks with a living process"""
    last_scrape_age_s: float | None
    """``None`` before the first scrape"""
    unscraped_final: int
    """dead ranks with a last state that no scrape has seen yet"""
    viewers: int = 0
    """browsers with the live page in the foreground"""


class Serve(Protocol):
    """The exporter's main loop: returns when it is stopped, or once ``finished``, called every second, returns True."""

    def __call__(
        self, flight_dir: str, address: str, *, announce: Callable[[str, bool], None], finished: Callable[[ServiceStatus], bool]
    ) -> None:
        """Serve ``flight_dir``; call ``announce`` with the actual ``host:port`` and whether it has TLS once it listens."""


class Departure:
    """Decides when to leave: the last rank is gone and its last state was scraped, or the grace period is over.

    ``grace_s``: how long a last state is kept for a scraper.
    """

    def __init__(self, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.decided = False
        self._grace_s, self._clock = grace_s, clock
        self._alone_since: float | None = None

    def __call__(self, status: ServiceStatus) -> bool:
        """Return True if the exporter should leave now."""
        self.decided = self._decide(status)
        return self.decided

    def _decide(self, status: ServiceStatus) -> bool:
        if status.alive:
            self._alone_since = None
            return False
        now = self._clock()
        if self._alone_since is None:
            self._alone_since = now
        if status.viewers and now - self._alone_since < VIEWER_WAIT_S:
            return False
        if not status.unscraped_final:
            return True
        silent_s = now - self._alone_since
        if status.last_scrape_age_s is not None:
            silent_s = min(silent_s, status.last_scrape_age_s)
        return silent_s >= self._grace_s


def run(flight_dir: str, address: str, grace_s: float, election: Election, directory_fd: int, serve: Serve) -> None:
    """Serve as the elected exporter until no rank is left or it is stopped. ``grace_s``: as for :class:`Departure`."""
    departure = Departure(grace_s)

    def announce(actual: str, tls: bool) -> None:  # noqa: FBT001  # as the exporter calls it
        announced = announcement.announce(directory_fd, actual, tls=tls)
        _log.info("pid %d serves %s on %s", announced.pid, flight_dir, announced.url)

    def finished(status: ServiceStatus) -> bool:
        with contextlib.suppress(OSError):  # an error in the log file is no reason to leave
            log_file.shorten(sys.stderr.fileno())
        return not election.holds() or departure(status)

    while True:
        try:
            serve(flight_dir, address, announce=announce, finished=finished)
        finally:
            if election.holds():
                announcement.withdraw(directory_fd)
            election.release()
        _log.info("pid %d has left %s", os.getpid(), flight_dir)
        if not (departure.decided and anyone_alive(directory_fd) and election.win()):
            return
        _log.info("a rank came while the exporter was leaving: it stays")
        departure = Departure(grace_s)
