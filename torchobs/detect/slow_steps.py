"""Detect slow steps, and steps that have become slow.

One step is judged against the median of its predecessors, which a few slow ones do not move. That steps have *become* slow is
judged over seconds and by their distribution: ten steps of 1 ms can be one hiccup of the machine, and with two loader workers
the median of a few steps jumps between two values.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from math import inf
from statistics import fmean, median

FACTOR = 3.0
LEAST_EXCESS_S = 0.005
"""Python threads switch every 5 ms: a step of 1 ms that waited for another thread is no finding."""
LEAST_SEEN = 16
"""Least number of steps for a baseline: the first ones warm up."""


def slow_from(durations_s: Sequence[float]) -> float:
    """Return the duration in seconds from which a step is slow: three times the median. Infinity with too few steps."""
    if len(durations_s) < LEAST_SEEN:
        return inf
    usual_s = median(durations_s)
    return max(FACTOR * usual_s, usual_s + LEAST_EXCESS_S)


LATELY_S = 10.0
"""Least length of a slow-down, in seconds of training: no hiccup of a machine lasts as long."""
LEAST_LATELY = 8
"""Least number of steps in it, if steps take longer than a second."""
EARLIER_S = 30.0
"""Least seconds of training before it, for the baseline; at least as long as the slow-down itself."""
SLOWER = 2.0
"""Least ratio of the means. A busy machine, longer sequences or a garbage collection cause half of it for some seconds."""
SUPERIORITY = 0.71
"""Least probability that a late step takes longer than an earlier one: Vargha and Delaney (2000, *A critique and improvement of
the CL common language effect size statistics*) call an effect large from there on. It stays at a half if only a few steps are
very long."""


def slowed_from(durations_s: Sequence[float]) -> int | None:
    """Return the index of the step from which on steps were slow, for ten seconds or more; ``None`` if they were not.

    Their mean is twice that of the steps before, nearly each is longer, and no earlier stretch of the same length had as
    high a mean. The last ten seconds are examined, then twenty, up to half of all.
    """
    length_s = LATELY_S
    while True:
        begin = _begin(durations_s, length_s)
        earlier, late = durations_s[:begin], durations_s[begin:]
        late_s = sum(late)
        if len(earlier) < LEAST_SEEN or late_s < length_s or sum(earlier) < max(EARLIER_S, late_s):
            return None
        if _is_slower(late, earlier, late_s):
            return begin
        length_s *= 2


def _is_slower(late: Sequence[float], earlier: Sequence[float], late_s: float) -> bool:
    now_s = fmean(late)
    if now_s < SLOWER * fmean(earlier) or superiority(late, earlier) < SUPERIORITY:
        return False
    return max(_stretches(earlier, late_s), default=0.0) < now_s / SLOWER


def superiority(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the probability that one of ``ones`` is greater than one of ``others``; ties count half. Neither is empty."""
    ordered = sorted(others)
    above = sum(bisect_left(ordered, value) + bisect_right(ordered, value) for value in ones)
    return above / (2 * len(ones) * len(ordered))


def _begin(durations_s: Sequence[float], length_s: float) -> int:
    begin, total_s = len(durations_s), 0.0
    while begin and (total_s < length_s or len(durations_s) - begin < LEAST_LATELY):
        begin -= 1
        total_s += durations_s[begin]
    return begin


def _stretches(durations_s: Sequence[float], length_s: float) -> Iterator[float]:
    """Yield the mean step duration in consecutive stretches of at least that length."""
    begin, total_s = 0, 0.0
    for index, duration_s in enumerate(durations_s):
        total_s += duration_s
        if total_s >= length_s:
            yield total_s / (index + 1 - begin)
            begin, total_s = index + 1, 0.0
