"""Limit the rate of spans: the event ring is small, and frequent short spans must not evict important entries."""

from __future__ import annotations

from torchobs.support.rate_limit import RateLimiter

LONG_NS = 100_000_000
"""Spans from this length on are always written: there can be ten a second at most."""
_EVERY_NS, _BURST = 10_000_000_000, 10


def span_limiter() -> RateLimiter:
    """Return a limiter for one probe's short spans; its times are in ns."""
    return RateLimiter(_EVERY_NS, _BURST)
