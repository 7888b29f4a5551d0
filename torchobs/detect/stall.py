"""From the durations of a run's steps to how long it may be without one. Pure: a histogram comes in, seconds go out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

LEAST_S = 10.0
"""Shortest stall: people wait about that long before Ctrl-C. Shorter ones may be a slow batch or an unobserved save."""

LONG_FACTOR = 2.0
"""Factor on the second longest step: if one in hundreds takes minutes (the first minibatch after a rollout), the 99th
percentile does not show it; and a single one, behind a cold cache, is no measure of the next."""

EARLY_FACTOR = 5.0
"""Factor on the 99th percentile of step times from which stacks are written: a quarter of the one from which a rank is called
hung (``ranks.state.HANG_FACTOR``), for nobody is told. The percentile itself is overestimated by up to 2."""

EARLY_FIRST_S = 300.0
"""The same before the steps are known: half the shortest default timeout of a collective (NCCL's, ten minutes), after which
nothing can be seen any more of where the ranks stood."""

USUAL_FACTOR = 20.0
"""Factor on the usual step from which a rank stands still, if its stacks are not written before"""

LEAST_STEPS = 2
"""Least number of steps that tell what is usual: one alone is that of a cold cache"""

_FEW_STEPS = 100
"""Below it the 99th percentile is the longest step"""

PATIENT_PHASES = frozenset({"evaluation", "checkpoint", "compile", "idle"})
"""Phases that may last arbitrarily long without a step; an idle rank has left its training loop."""


class Durations(NamedTuple):
    """Histogram of the durations of all of a run's steps in seconds, without evaluations and checkpoints."""

    counts: Sequence[int] = ()
    bounds: Sequence[float] = ()
    longest_s: float = 0.0


class Standstill(NamedTuple):
    """A living rank makes no step, and nothing else that may take long. Seconds."""

    seconds: float
    """since its last step"""
    usual_step: float
    """median of its latest steps"""
    habitual: bool = False
    """it has paused about as long before: between two rollouts, in an evaluation of its own"""


def usual_and_long_s(counts: Sequence[int], bounds: Sequence[float], longest_s: float) -> tuple[float, float]:
    """Return the 99th percentile and the second longest of at least one duration, as the upper bounds of their buckets.

    Of fewer than 100 the percentile would be the longest, which is often the first step (lazy imports, cold caches): it is
    left out of the percentile, and the long one is then the longest.
    """
    total, below = sum(counts), list(accumulate(counts))
    few = 1 < total < _FEW_STEPS
    ranks = min(0.99 * total, total - 1) if few else 0.99 * total, total if few else total - 1
    usual_s, long_s = ([*bounds, longest_s][bisect_left(below, rank)] for rank in ranks)
    return usual_s, long_s


def standstill_limit_s(usual_s: float, durations: Durations) -> float:
    """Return after how many seconds without a sign of a step people read that a rank stands still.

    20 usual steps, and no later than the stacks of a first stall are written. ``usual_s``: median of the latest steps.
    """
    return max(LEAST_S, min(USUAL_FACTOR * usual_s, early_limit_s(*durations, 0)))


def standstill(
    progress_age_s: float, quiet_s: float, phase: str | None, usual_s: float | None, durations: Durations
) -> Standstill | None:
    """Return that a living rank stands still, by one rule for page, commands, API and notebook; ``None`` if it does not.

    ``progress_age_s``: seconds since its last step. ``quiet_s``: since the last sign of a step or its phases, which is shorter
    after an evaluation. ``usual_s``: median of its latest steps, ``None`` before the first.
    """
    if usual_s is None or quiet_s < max(LEAST_S, standstill_limit_s(usual_s, durations)) or phase in PATIENT_PHASES:
        return None
    return Standstill(progress_age_s, usual_s, progress_age_s <= _habitual_pause_s(durations))


def _habitual_pause_s(durations: Durations) -> float:
    """Return how long a pause may be that a run has made before: twice its second longest step; 0 if it has no two."""
    below = list(accumulate(durations.counts))
    if not below or below[-1] < LEAST_STEPS:
        return 0.0
    return LONG_FACTOR * [*durations.bounds, durations.longest_s][bisect_left(below, below[-1] - 1)]


def early_limit_s(counts: Sequence[int], bounds: Sequence[float], longest_s: float, survived: int) -> float:
    """Return after how many seconds without a sign of a step a rank's stacks are written, in case that it is killed there.

    It doubles with each such time that the run ``survived``: whatever it does for so long (an evaluation in code of its own, a
    slow file system) is its habit, and a run of any length writes a few at most.
    """
    if sum(counts) < LEAST_STEPS:
        return EARLY_FIRST_S * (1 << survived)
    usual_s, long_s = usual_and_long_s(counts, bounds, longest_s)
    return max(LEAST_S, EARLY_FACTOR * usual_s, LONG_FACTOR * long_s) * (1 << survived)
