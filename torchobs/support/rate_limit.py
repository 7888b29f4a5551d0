"""The rate limiter of log lines, events and requests, used everywhere in torchobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable


class _State(NamedTuple):
    full: float
    """time at which the whole burst is available again"""
    latest: float
    denied: int
    """refusals since the last success"""
    denied_before: int


class RateLimiter:
    """Token bucket per key, as the generic cell rate algorithm (ITU-T I.371): ``burst`` at once, then one per ``every``.

    The time is an argument, in the unit of ``every``; time that goes back earns no tokens. Not locked: two threads may both get
    the last token.
    """

    __slots__ = ("_burst", "_every", "_most_keys", "_states")

    def __init__(self, every: float, burst: int = 1, most_keys: int = 1000) -> None:
        """``most_keys``: beyond it all keys are dropped, so that keys chosen by others cannot fill the memory."""
        self._every, self._burst, self._most_keys = every, burst, most_keys
        self._states: dict[Hashable, _State] = {}

    def take(self, now: float, key: Hashable = None) -> bool:
        """Take a token; return whether there was one."""
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= self._most_keys:
                self._states.clear()
            state = _State(now, now, 0, 0)
        now = max(now, state.latest)
        full = max(state.full, now) + self._every
        taken = full <= now + self._burst * self._every
        self._states[key] = _State(full, now, 0, state.denied) if taken else state._replace(latest=now, denied=state.denied + 1)
        return taken

    def held_back(self, key: Hashable = None) -> int:
        """Return the number of refusals between the last two successes."""
        return self._states[key].denied_before if key in self._states else 0


BURST = 32
"""Events of a kind that may follow each other at once; the ring holds some hundred."""
REFILL_S = 600.0
"""After that, one event in this time: the first ones stay for a day, and recent ones are recorded, too."""


def anomaly_limiter() -> RateLimiter:
    """Return a limiter of the events of anomalies by kind; its times are in seconds.

    A run that has gone to NaN has an anomaly in every step; their events would evict each other, and the first one, from the
    flight file's ring within minutes. ``torchobs.anomalies`` counts all of them.
    """
    return RateLimiter(REFILL_S, BURST)
