"""Does training wait for its data?

A loader that keeps up hides behind the computation: what is left of the waiting is the hand-over of a batch, well below a
hundredth. TensorFlow's profiler calls a program highly input-bound from 20 % of the step time on, and moderately so from 5 %
(``kHighlyInfeedBoundThresholdInPercent``, ``kModeratelyInfeedBoundThresholdInPercent`` in its input pipeline analysis). A fifth
of waiting is a quarter more steps a second for a loader that keeps up. Pure: every time is an argument, in seconds.
"""

from __future__ import annotations

from typing import NamedTuple

BEGINS = 0.20
ENDS = 0.10
"""Half of it: a share that varies around the limit is one finding, not one a minute."""
WINDOW_S = 60.0
"""Long enough for the start of an epoch's workers to be what it is in the whole."""
LEAST_STEPS = 10
LEAST_TRAINED_S = 10.0
"""Below, a run's total says what its first step did: that one starts the workers, for which nobody needs a warning."""


def waiting_share(data_s: float, trained_s: float) -> float | None:
    """Return the share of the steps' time that was spent waiting, over a whole run; ``None`` where it is no finding."""
    if trained_s < LEAST_TRAINED_S or data_s < BEGINS * trained_s:
        return None
    return data_s / trained_s


class DataCounters(NamedTuple):
    """What a rank's counters say at a moment."""

    now_s: float
    steps: int
    data_s: float
    trained_s: float
    """all phases of the steps, waiting for data among them"""


class Starvation:
    """Judges one window after the other."""

    __slots__ = ("_window_start", "share", "starved")

    def __init__(self) -> None:
        self._window_start: DataCounters | None = None
        self.share = 0.0
        """of the last window"""
        self.starved = False

    def judge(self, seen: DataCounters) -> bool:
        """Take what the counters say now; tell whether a window was judged just now."""
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
