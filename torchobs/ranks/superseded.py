"""Superseded ranks: no longer served, but their final counts are kept in snapshots for a while.

A program that repeats ``init()``, training and ``shutdown()`` has a new incarnation each time, and possibly none of them was
seen dead while it was the newest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.ranks.rank_file import Now, RankFile

TOLD_NS = 10_000_000_000
"""How long an ended rank stays in snapshots: a client that polls every second misses none."""


class SupersededRanks:
    """State of superseded ranks between scans."""

    def __init__(self) -> None:
        self._suffixes: dict[str, str] = {}
        self._since_ns: dict[str, int] = {}

    def served(self, incarnation: str, suffix: str) -> None:
        """Record that a rank is served, and its suffix."""
        self._suffixes[incarnation] = suffix

    def suffix(self, tracked: RankFile, now: Now) -> str | None:
        """Return the suffix of a superseded rank if its end is to be reported now; else ``None``.

        Excluded are ranks that still run, and those never served and long dead, which ended before this exporter started.
        """
        known = self._suffixes.get(tracked.incarnation)
        runs, is_old = tracked.up and not tracked.fading, known is None and tracked.certainly_dead(now)
        if tracked.retired or runs or is_old:
            return None
        since_ns = self._since_ns.setdefault(tracked.incarnation, now.monotonic_ns)
        return known or "" if now.monotonic_ns - since_ns < TOLD_NS else None

    def keep(self, incarnations: Iterable[str]) -> None:
        """Drop the state of all others."""
        for gone in self._suffixes.keys() - (kept := set(incarnations)):
            del self._suffixes[gone]
        for gone in self._since_ns.keys() - kept:
            del self._since_ns[gone]
