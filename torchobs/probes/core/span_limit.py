"""How many spans may be written: the event ring is small, and what happens often must not push out what matters."""

from __future__ import annotations

from torchobs.support.rate_limit import RateLimiter

LONG_NS = 100_000_000
"""A span as long as this is written in any case: ten a second is the most there can be."""
_EVERY_NS, _BURST = 10_000_000_000, 10


def span_limiter() -> RateLimiter:
    """Return the limiter of one probe's short spans, by times in ns."""
    return RateLimiter(_EVERY_NS, _BURST)
