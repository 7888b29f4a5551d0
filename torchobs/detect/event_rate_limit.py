"""Limit how many anomalies become events.

A run that has gone to NaN has an anomaly in every step; their events would evict each other, and the first one, from the
flight file's ring within minutes. ``torchobs.anomalies`` counts all of them.
"""

from __future__ import annotations

from torchobs.support.rate_limit import RateLimiter

BURST = 32
"""Events of a kind that may follow each other at once; the ring holds some hundred."""
REFILL_S = 600.0
"""After that, one event in this time: the first ones stay for a day, and recent ones are recorded, too."""


def anomaly_limiter() -> RateLimiter:
    """Return a limiter of anomalies by kind; its times are in seconds."""
    return RateLimiter(REFILL_S, BURST)
