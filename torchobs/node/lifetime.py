"""Runs the elected exporter: serve, leave when no rank needs it, and check once more for new ranks; its log.

The log lies in the flight directory, which is memory (tmpfs), and nobody watches it: a line comes once a minute, and the older
half is dropped when it grows too large.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torchobs.node.election import Election, announce, anyone_alive, withdraw
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable


MAX_SIZE = 256 * 1024
BURST = 10
"""Lines a minute that differ only in names"""
_MAX_CAUSES = 1000


def shorten(fd: int, limit: int = MAX_SIZE) -> None:
    """Drop the older lines if the file exceeds ``limit`` bytes, keeping half of it.

    Only for the file's single writer: lines that another process appends between read and write are lost.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= limit:
        return
    kept = os.pread(fd, limit // 2, status.st_size - limit // 2).partition(b"\n")[2]
    os.ftruncate(fd, 0)
    os.write(fd, kept)


class OncePerMinute(logging.Filter):
    """Passes a line (logger and text) once every ``interval_s``, and of lines with one unformatted message ``BURST``.

    The rest is counted. A record with ``good_news`` in its ``extra`` passes always; after it earlier problems count as new.
    """

    def __init__(self, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._texts = RateLimiter(interval_s, most_keys=_MAX_CAUSES)
        # the same about hundreds of files, or in words that others choose
        self._messages = RateLimiter(interval_s / BURST, BURST, most_keys=_MAX_CAUSES)
        self._clock = clock
        self._good_news: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is to be written; the number of suppressed ones is appended to it."""
        if getattr(record, "good_news", False):
            self._good_news[record.name] += 1
            return True
        now, source = self._clock(), (record.name, self._good_news[record.name])
        text, message = (*source, record.getMessage()), (*source, str(record.msg))
        if not self._texts.take(now, text) or not self._messages.take(now, message):
            return False
        if dropped := self._texts.held_back(text) + self._messages.held_back(message):
            record.msg = f"{record.msg} [and {dropped} more like it]"
        return True


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
        """Return whether the exporter should leave now."""
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

    def listens(actual: str, tls: bool) -> None:  # noqa: FBT001  # as the exporter calls it
        announced = announce(directory_fd, actual, tls=tls)
        _log.info("pid %d serves %s on %s", announced.pid, flight_dir, announced.url)

    def finished(status: ServiceStatus) -> bool:
        with contextlib.suppress(OSError):  # an error in the log file is no reason to leave
            shorten(sys.stderr.fileno())
        return not election.holds() or departure(status)

    while True:
        try:
            serve(flight_dir, address, announce=listens, finished=finished)
        finally:
            if election.holds():
                withdraw(directory_fd)
            election.release()
        _log.info("pid %d has left %s", os.getpid(), flight_dir)
        if not (departure.decided and anyone_alive(directory_fd) and election.win()):
            return
        _log.info("a rank came while the exporter was leaving: it stays")
        departure = Departure(grace_s)
