"""Detect training that waits for its data.

With a loader that keeps up, the wait is only the hand-over of a batch, well below a hundredth of the step. TensorFlow's
profiler calls a program highly input-bound from 20 % of the step time on, and moderately so from 5 %
(``kHighlyInfeedBoundThresholdInPercent``, ``kModeratelyInfeedBoundThresholdInPercent`` in its input pipeline analysis). If a
fifth is waiting, a loader that keeps up means a quarter more steps a second. Pure: every time is an argument, in seconds.
"""

from __future__ import annotations

from typing import NamedTuple

BEGINS = 0.20
ENDS = 0.10
"""Half of it (hysteresis): a share that varies around the limit is one finding, not one a minute."""
WINDOW_S = 60.0
"""Long enough to include the worker start-up of an epoch in proportion."""
LEAST_STEPS = 10
LEAST_TRAINED_S = 10.0
"""With less, the total is dominated by the first step, which starts the workers."""


def waiting_share(data_s: float, trained_s: float) -> float | None:
    """Return the share of the steps' time spent waiting for data over a whole run; ``None`` if that is no finding."""
    if trained_s < LEAST_TRAINED_S or data_s < BEGINS * trained_s:
        return None
    return data_s / trained_s


class DataCounters(NamedTuple):
    """A rank's counters at one moment."""

    now_s: float
    steps: int
    data_s: float
    trained_s: float
    """Time in all phases of the steps, waiting for data included"""


class Starvation:
    """Judges consecutive windows."""

    __slots__ = ("_window_start", "share", "starved")

    def __init__(self) -> None:
        self._window_start: DataCounters | None = None
        self.share = 0.0
        """Share of the last window"""
        self.starved = False

    def judge(self, seen: DataCounters) -> bool:
        """Process the current counters; return True if they completed a window."""
        start = self._window_start
        if start is None:
            self._window_start = seen
            return False
        if seen.now_s - start.now_s < WINDOW_S or seen.steps - start.steps < LEAST_STEPS:
            return False
        trained_s = seen.trained_s - start.trained_s
        self._window_start, self.share = seen, (seen.data_s - start.data_s) / trained_s if trained_s > 0 else 0.0
        self.starved = self.share >= (ENDS if self.starved else BEGINS)
        return True
