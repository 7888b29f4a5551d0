"""How many anomalies become events.

A run that has gone to NaN has one in every step. They would push each other, and how it all began, out of the flight file's
ring within minutes. Every one is counted all the same, in ``torchobs.anomalies``.
"""

from __future__ import annotations

BURST = 32
"""Events of a kind that come one after the other; the ring holds some hundred."""
REFILL_S = 600.0
"""After them, one in this time: the beginning stays for a day, and how it goes on is told, too."""


class Ration:
    """A token bucket for each kind."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        self._omitted: dict[str, int] = {}

    def take(self, kind: str, now_s: float) -> int | None:
        """Return how many of the kind were left out since the last event; ``None``: this one is left out, too."""
        left, at_s = self._left.get(kind, (float(BURST), now_s))
        left = min(float(BURST), left + max(0.0, now_s - at_s) / REFILL_S)
        told = left >= 1.0
        self._left[kind] = (left - told, now_s)
        omitted = self._omitted.get(kind, 0)
        self._omitted[kind] = 0 if told else omitted + 1
        return omitted if told else None
