"""Detect functions that are recompiled too often. Pure: every time is an argument, in seconds."""

from __future__ import annotations

from collections import deque

from torchobs.support.rate_limit import RateLimiter

STORM = 4
"""Recompilations of one function within the window. Up to three are usual: a size that turns out to be dynamic, training and
evaluation, a second dtype. torch stops at eight (``torch._dynamo.config.recompile_limit``) with a warning."""

APART, WITHIN_ONE = 3, 7
"""Steps of the training that a storm is spread over at least, or else the number that is one anyway: an optimizer that compiles
one function for each kind of parameter (torchao's) recompiles it four times in its first step and never again. Seven are all
that torch allows by default."""
WINDOW_S = 600.0
QUIET_S = 60.0
_MOST = 256


class Recompiles:
    """Recent recompilations by function name."""

    __slots__ = ("_report_limit", "_times")

    def __init__(self) -> None:
        self._times: dict[str, deque[tuple[float, int]]] = {}
        self._report_limit = RateLimiter(QUIET_S)

    def note(self, function: str, now_s: float, step: int) -> int:
        """Add a recompilation; return how many there were within ten minutes if that is to be reported now, else 0.

        The fourth is reported and, while they continue, one a minute. ``step``: the training's number of steps so far.
        """
        if function not in self._times and len(self._times) >= _MOST:
            self._forget_oldest()
        times = self._times.setdefault(function, deque(maxlen=_MOST))
        times.append((now_s, step))
        while times[0][0] < now_s - WINDOW_S:
            times.popleft()
        spread = len(times) >= WITHIN_ONE or len({step for _, step in times}) >= APART
        return len(times) if len(times) >= STORM and spread and self._report_limit.take(now_s, function) else 0

    def _forget_oldest(self) -> None:
        oldest = min(self._times, key=lambda function: self._times[function][-1][0])
        del self._times[oldest]
