"""What the elected process does: serve, leave when nobody needs it, and look once more before it goes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchobs.node import announcement, log_file
from torchobs.node.election import Election, anyone_alive

if TYPE_CHECKING:
    from collections.abc import Callable

WATCHED_S = 900.0
"""How long an exporter stays for who looks at the page of a run that has ended: to read it, and not for ever."""

_log = logging.getLogger(__name__)


class ExporterStatus(Protocol):
    """What the exporter sees of the ranks: how many files, how many of them with a living rank, who asked for them when."""

    @property
    def ranks(self) -> int:
        """Ranks that are served."""

    @property
    def alive(self) -> int:
        """Those of them whose process lives."""

    @property
    def last_scrape_age_s(self) -> float | None:
        """Seconds since the last scrape; ``None`` before the first."""

    @property
    def unscraped_final(self) -> int:
        """Dead ranks whose last state was in no scrape yet."""

    @property
    def viewers(self) -> int:
        """Browsers that show the live page now; a tab in the background is none."""


class Serve(Protocol):
    """The exporter: returns when it was told to end, or once ``finished`` (asked every second) says so."""

    def __call__(
        self, flight_dir: str, address: str, *, announce: Callable[[str], None], finished: Callable[[ExporterStatus], bool]
    ) -> None:
        """Serve ``flight_dir``; call ``announce`` with the real ``host:port`` as soon as it is listened on."""


class Post(NamedTuple):
    """What is to be served, where, and how long a last state waits for a scraper that does not come."""

    flight_dir: str
    address: str
    grace_s: float


class Departure:
    """Decides when to leave: the last rank is gone and its last state was scraped, or nobody has asked for it in time."""

    def __init__(self, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.decided = False
        self._grace_s, self._clock = grace_s, clock
        self._alone_since: float | None = None

    def __call__(self, fleet: ExporterStatus) -> bool:
        """Return True if to leave now."""
        self.decided = self._decide(fleet)
        return self.decided

    def _decide(self, fleet: ExporterStatus) -> bool:
        if fleet.alive:
            self._alone_since = None
            return False
        now = self._clock()
        if self._alone_since is None:
            self._alone_since = now
        if fleet.viewers and now - self._alone_since < WATCHED_S:
            return False
        if not fleet.unscraped_final:
            return True
        silent_s = now - self._alone_since
        if fleet.last_scrape_age_s is not None:
            silent_s = min(silent_s, fleet.last_scrape_age_s)
        return silent_s >= self._grace_s


def hold(post: Post, election: Election, directory_fd: int, serve: Serve) -> None:
    """Be the exporter, for which this process was elected, until no rank is left or it is told to end."""
    departure = Departure(post.grace_s)
    _serve(post, election, directory_fd, serve, departure)
    while departure.decided and anyone_alive(directory_fd) and election.win():
        _log.info("a rank came while the exporter was leaving: it stays")
        departure = Departure(post.grace_s)
        _serve(post, election, directory_fd, serve, departure)


def _serve(post: Post, election: Election, directory_fd: int, serve: Serve, departure: Departure) -> None:
    def announce(address: str) -> None:
        made = announcement.announce(directory_fd, address)
        _log.info("pid %d serves %s on %s", made.pid, post.flight_dir, made.url)

    def finished(fleet: ExporterStatus) -> bool:
        with contextlib.suppress(OSError):  # a log that is full is no reason to leave
            log_file.shorten(sys.stderr.fileno())
        return not election.holds() or departure(fleet)

    try:
        serve(post.flight_dir, post.address, announce=announce, finished=finished)
    finally:
        if election.holds():
            announcement.withdraw(directory_fd)
        election.release()
    _log.info("pid %d has left %s", os.getpid(), post.flight_dir)
