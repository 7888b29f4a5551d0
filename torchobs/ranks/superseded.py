"""Ranks that another incarnation has replaced: they are served no more, and what they counted last is told for a while.

A program that runs ``init()``, trains and runs ``shutdown()`` again and again has a new incarnation in each turn, and none of
them may have been seen dead while it was the newest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.ranks.rank_file import Now, RankFile

TOLD_NS = 10_000_000_000
"""How long a rank's end is told: whoever looks each second misses none, though snapshots come between."""


class SupersededRanks:
    """What is known of them from one scan to the next."""

    def __init__(self) -> None:
        self._suffixes: dict[str, str] = {}
        self._since_ns: dict[str, int] = {}

    def served(self, incarnation: str, suffix: str) -> None:
        """Note that a rank is served, and what was added to its name."""
        self._suffixes[incarnation] = suffix

    def suffix(self, tracked: RankFile, now: Now) -> str | None:
        """Return what was added to the name of a replaced rank whose end is to be told; ``None``: it is not, or no more.

        One that still runs is not dead yet. One that was never served and has been dead for long ended before this exporter.
        """
        known = self._suffixes.get(tracked.incarnation)
        runs, is_old = tracked.up and not tracked.fading, known is None and tracked.certainly_dead(now)
        if tracked.retired or runs or is_old:
            return None
        since_ns = self._since_ns.setdefault(tracked.incarnation, now.monotonic_ns)
        return known or "" if now.monotonic_ns - since_ns < TOLD_NS else None

    def keep(self, incarnations: Iterable[str]) -> None:
        """Forget all others."""
        for gone in self._suffixes.keys() - (kept := set(incarnations)):
            del self._suffixes[gone]
        for gone in self._since_ns.keys() - kept:
            del self._since_ns[gone]
