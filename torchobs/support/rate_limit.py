"""How often something may be said, written or sent: the one rate limiter of torchobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable


class _State(NamedTuple):
    full: float
    """when the key may take its whole burst again"""
    latest: float
    held: int
    """takes that were refused since the last that was not"""
    held_before: int


class RateLimiter:
    """A token bucket for each key, as the generic cell rate algorithm (ITU-T I.371): ``burst`` at once, then one per ``every``.

    The time is an argument, in the unit of ``every``; one that goes back is no credit. Not locked: of two threads that take at
    once, both may get the last one.
    """

    __slots__ = ("_burst", "_every", "_most_keys", "_states")

    def __init__(self, every: float, burst: int = 1, most_keys: int = 1000) -> None:
        """``most_keys``: when there are more, all are forgotten, so that keys which somebody else chooses fill no memory."""
        self._every, self._burst, self._most_keys = every, burst, most_keys
        self._states: dict[Hashable, _State] = {}

    def take(self, now: float, key: Hashable = None) -> bool:
        """Return True if one more may be, and count it."""
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= self._most_keys:
                self._states.clear()
            state = _State(now, now, 0, 0)
        now = max(now, state.latest)
        full = max(state.full, now) + self._every
        taken = full <= now + self._burst * self._every
        self._states[key] = _State(full, now, 0, state.held) if taken else state._replace(latest=now, held=state.held + 1)
        return taken

    def held_back(self, key: Hashable = None) -> int:
        """Return how many were refused between the last that was not and the one before it."""
        return self._states[key].held_before if key in self._states else 0
