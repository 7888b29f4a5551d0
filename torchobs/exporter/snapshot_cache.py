"""Cache of the newest snapshot: one thread scans, and all requests wait for it up to a deadline."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from torchobs.ranks.scanner import system_clock
from torchobs.ranks.snapshot import EMPTY, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.ranks.rank_file import Now
    from torchobs.ranks.scanner import Scanner

FRESH_S = 0.1
"""Age up to which a snapshot serves another scrape as well."""

DEADLINE_S = 2.0
"""How long a scrape waits for a scan, as of a hanging file system; then it gets the last snapshot."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class SnapshotCache:
    """The newest snapshot. To be used in one event loop."""

    def __init__(self, scanner: Scanner, clock: Callable[[], Now] = system_clock) -> None:
        self.latest = EMPTY
        self.timeouts = 0
        """waits for a scan that reached the deadline"""
        self._scanner, self._clock = scanner, clock
        self._thread = ThreadPoolExecutor(1, "scan")
        self._running: asyncio.Future[None] | None = None

    async def fresh(self, max_age_s: float = FRESH_S, deadline_s: float = DEADLINE_S) -> Snapshot:
        """Return a snapshot that is at most ``max_age_s`` old, or after ``deadline_s`` the newest.

        A call during a scan waits for that scan.
        """
        if self.latest is EMPTY or self._clock().monotonic_ns - self.latest.taken_ns > max_age_s * 1e9:
            await self._scan(deadline_s)
        return self.latest

    async def after_now(self, deadline_s: float = DEADLINE_S) -> Snapshot:
        """Return a snapshot scanned after this call, or after ``deadline_s`` the newest."""
        if self._running is not None:
            await self._scan(deadline_s)
        await self._scan(deadline_s)
        return self.latest

    async def ask(self, question: Callable[[Scanner], T]) -> T:
        """Call a function that reads more of the files than a snapshot, in the scan thread; return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, question, self._scanner)

    def close(self) -> None:
        """Close the files after the last scan."""
        self._thread.submit(self._scanner.close)
        self._thread.shutdown(wait=False)

    async def _scan(self, deadline_s: float) -> None:
        """Wait for a scan."""
        if self._running is None:
            self._running = asyncio.get_running_loop().run_in_executor(self._thread, self._renew)
        running = self._running
        done, _ = await asyncio.wait({running}, timeout=deadline_s)
        if not done:
            self.timeouts += 1
            _log.error("the flight directory does not answer within %g s: the last snapshot is served", deadline_s)
        elif self._running is running:
            self._running = None
            if (problem := running.exception()) is not None:
                _log.error("a scan failed, the last snapshot is served: %r", problem, exc_info=problem)

    def _renew(self) -> None:
        self.latest = self._scanner.scan()
