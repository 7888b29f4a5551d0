"""How many spans may be written: the event ring is small, and what happens often must not push out what matters."""

from __future__ import annotations

LONG_NS = 100_000_000
"""A span as long as this is written in any case: ten a second is the most there can be."""


class Budget:
    """A token bucket: ``burst`` at once, after that one every ``every_ns``."""

    __slots__ = ("_burst", "_every_ns", "_full_ns")

    def __init__(self, every_ns: int, burst: int) -> None:
        self._every_ns, self._burst = every_ns, burst
        self._full_ns = 0
        """when the bucket is full again"""

    def take(self, now_ns: int) -> bool:
        """Take one, if there is one left."""
        full_ns = max(self._full_ns, now_ns) + self._every_ns
        if full_ns > now_ns + self._burst * self._every_ns:
            return False
        self._full_ns = full_ns
        return True
