"""Is a step slow, and have the steps become slow?

One step is judged against the median of its predecessors, which no few slow ones move. That steps have *become* slow is judged
over seconds and by how they are distributed: ten steps of 1 ms are one hiccup of the machine, and the median of a few steps
jumps between the two times that a loader with two workers makes of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FACTOR = 3.0
LEAST_EXCESS_S = 0.005
"""The interpreter's threads take turns of 5 ms: a step of 1 ms that had to wait for one is no finding."""
LEAST_SEEN = 16
"""Fewer steps tell nothing: the first ones warm up."""


def slow_from(durations_s: Sequence[float]) -> float:
    """Return the seconds from which on a step is slow: three times what is usual. Infinity if too few have been seen."""
    if len(durations_s) < LEAST_SEEN:
        return inf
    usual_s = median(durations_s)
    return max(FACTOR * usual_s, usual_s + LEAST_EXCESS_S)


LATELY_S = 10.0
"""Of training: no hiccup of a machine lasts as long."""
LEAST_LATELY = 8
"""Steps, where these take longer than a second."""
EARLIER_S = 30.0
"""And as long as the last steps, at least, must have been trained before: what is usual is not known from less."""
SLOWER = 2.0
"""Half of that is what a busy machine, longer sequences or a garbage collection make of some seconds."""
SUPERIORITY = 0.71
"""The probability that a late step takes longer than an earlier one, from which on Vargha and Delaney (2000, *A critique and
improvement of the CL common language effect size statistics*) call an effect large. A few very long steps among others that
are as before leave it at a half."""


def slowed_from(durations_s: Sequence[float]) -> int | None:
    """Return the index of the step from which on the last ones, for ten seconds or more, were slow; ``None``: they were not.

    They took twice as long as those before in the mean, nearly each of them longer, and no stretch of the same length before
    took so long a step. Looked at are the last ten seconds, twenty, and so on, up to half of all.
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
    """Return the probability that one of ``ones`` is greater than one of ``others``, equals counted half. Neither is empty."""
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
    """Yield the mean of a step in each stretch of at least that length, one after the other."""
    begin, total_s = 0, 0.0
    for index, duration_s in enumerate(durations_s):
        total_s += duration_s
        if total_s >= length_s:
            yield total_s / (index + 1 - begin)
            begin, total_s = index + 1, 0.0
