"""How many anomalies become events.

A run that has gone to NaN has one in every step. They would push each other, and how it all began, out of the flight file's
ring within minutes. Every one is counted all the same, in ``torchobs.anomalies``.
"""

from __future__ import annotations

from torchobs.support.rate_limit import RateLimiter

BURST = 32
"""Events of a kind that come one after the other; the ring holds some hundred."""
REFILL_S = 600.0
"""After them, one in this time: the beginning stays for a day, and how it goes on is told, too."""


def anomaly_limiter() -> RateLimiter:
    """Return the limiter of anomalies, by their kind and by times in seconds."""
    return RateLimiter(REFILL_S, BURST)
