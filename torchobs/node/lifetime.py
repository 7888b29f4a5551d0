"""Runs the elected exporter: serve, leave when no rank needs it, and check once more for new ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchobs.node import announcement, log_file
from torchobs.node.election import Election, anyone_alive

if TYPE_CHECKING:
    from collections.abc import Callable

VIEWER_WAIT_S = 900.0
"""How long the exporter stays after a run's end while its live page is open."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExporterStatus:
    """The exporter's view of the ranks, from which it is decided when to leave."""

    ranks: int
    """number of ranks served"""
    alive: int
    """number of ranks with a living process"""
    last_scrape_age_s: float | None
    """seconds since the last scrape; None before the first"""
    unscraped_final: int
    """number of dead ranks with a last state that no scrape has seen yet"""
    viewers: int = 0
    """browsers with the live page in the foreground"""


class Serve(Protocol):
    """The exporter's main loop: returns when it is stopped, or once ``finished``, called every second, returns True."""

    def __call__(
        self, flight_dir: str, address: str, *, announce: Callable[[str], None], finished: Callable[[ExporterStatus], bool]
    ) -> None:
        """Serve ``flight_dir``; call ``announce`` with the actual ``host:port`` as soon as it listens."""


class Post(NamedTuple):
    """Directory and address to serve, and how long a last state is kept for a scraper."""

    flight_dir: str
    address: str
    grace_s: float


class Departure:
    """Decides when to leave: the last rank is gone and its last state was scraped, or the grace period is over."""

    def __init__(self, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.decided = False
        self._grace_s, self._clock = grace_s, clock
        self._alone_since: float | None = None

    def __call__(self, status: ExporterStatus) -> bool:
        """Return True if the exporter should leave now."""
        self.decided = self._decide(status)
        return self.decided

    def _decide(self, status: ExporterStatus) -> bool:
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


def hold(target: Post, election: Election, directory_fd: int, serve: Serve) -> None:
    """Serve as the elected exporter until no rank is left or it is stopped."""
    departure = Departure(target.grace_s)
    _serve(target, election, directory_fd, serve, departure)
    while departure.decided and anyone_alive(directory_fd) and election.win():
        _log.info("a rank came while the exporter was leaving: it stays")
        departure = Departure(target.grace_s)
        _serve(target, election, directory_fd, serve, departure)


def _serve(target: Post, election: Election, directory_fd: int, serve: Serve, departure: Departure) -> None:
    def announce(address: str) -> None:
        announced = announcement.announce(directory_fd, address)
        _log.info("pid %d serves %s on %s", announced.pid, target.flight_dir, announced.url)

    def finished(status: ExporterStatus) -> bool:
        with contextlib.suppress(OSError):  # an error in the log file is no reason to leave
            log_file.shorten(sys.stderr.fileno())
        return not election.holds() or departure(status)

    try:
        serve(target.flight_dir, target.address, announce=announce, finished=finished)
    finally:
        if election.holds():
            announcement.withdraw(directory_fd)
        election.release()
    _log.info("pid %d has left %s", os.getpid(), target.flight_dir)
