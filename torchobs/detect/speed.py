"""Slow steps, slow ranks, data that comes too late, and the steps that are sampled.

*Sampling* is by number, which gives all ranks the same numbers although each measures durations that differ. Two ranks with
measurements on different sides of a limit differ by a factor of two; the shorter takes all of the longer's.

*Slow steps*: one step is judged against the median of its predecessors, which a few slow ones do not move. That steps have
*become* slow is judged over seconds and by their distribution: ten steps of 1 ms can be one hiccup of the machine, and with two
loader workers the median of a few steps jumps between two values.

*Starvation*: with a loader that keeps up, the wait is only the hand-over of a batch, well below a hundredth of the step.
TensorFlow's profiler calls a program highly input-bound from 20 % of the step time on, and moderately so from 5 %
(``kHighlyInfeedBoundThresholdInPercent``, ``kModeratelyInfeedBoundThresholdInPercent`` in its input pipeline analysis). If a
fifth is waiting, a loader that keeps up means a quarter more steps a second. Pure: every time is an argument, in seconds.

*Slow ranks*: ranks that exchange gradients all take the same time for a step: the slow one works for longer, and the others
wait for it meanwhile, in whatever phase they wait: backward (gloo), other (``.item()`` with NCCL), forward (FSDP). So a rank is
late by what it is above its peers' median in data, where no rank waits for a peer, or in data, optimizer, other and between
together; and slow by as much of that as it waits less than its peers in all phases but data. What is above in optimizer, other
and between may itself be waiting, for peers that are slow in forward or backward: it counts only if fewer than half of the
ranks have it, so never of two. Else no rank is named: neither one that is slow in forward or backward, where its work cannot
be distinguished from waiting, nor one that the others wait for while it evaluates, saves or compiles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf
from operator import sub
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import LATE_PHASES, PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable


_MOST = 1 << 40


def alike_interval(unit: float, target: float) -> int:
    """Return the smallest power of two that, times ``unit``, reaches ``target``; at most 2^40, also for a unit of 0."""
    if unit * _MOST <= target:
        return _MOST
    return 1 << max(ceil(target / unit) - 1, 0).bit_length()


def taken(numbers: Iterable[int], interval: int) -> list[int]:
    """Return multiples of ``interval``, a power of two, and all powers of two, so that the first ones come sooner."""
    return [number for number in numbers if number > 0 and (not number % interval or not number & (number - 1))]


FACTOR = 3.0
LEAST_EXCESS_S = 0.005
"""Python threads switch every 5 ms: a step of 1 ms that waited for another thread is no finding, nor is a rank late for it."""
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
the CL common language effect size statistics*) call an effect large from there on. It stays at a half if few steps are long."""


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


BEGINS = 0.20
ENDS = 0.10
"""Half of it (hysteresis): a share that varies around the limit is one finding, not one a minute."""
WINDOW_S = 60.0
"""Long enough to include the worker start-up of an epoch in proportion."""
LEAST_WAITED_STEPS = 10
LEAST_TRAINED_S = 10.0
"""With less, the total is dominated by the first step, which starts the workers; so is a minute that is otherwise a hang."""


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

    def judge(self, counters: DataCounters) -> bool:
        """Process the current counters; return whether they completed a window."""
        start = self._window_start
        if start is None:
            self._window_start = counters
            return False
        trained_s = counters.trained_s - start.trained_s
        is_short = counters.now_s - start.now_s < WINDOW_S or trained_s < LEAST_TRAINED_S
        if is_short or counters.steps - start.steps < LEAST_WAITED_STEPS:
            return False
        self._window_start, self.share = counters, (counters.data_s - start.data_s) / trained_s
        self.starved = self.share >= (ENDS if self.starved else BEGINS)
        return True


LEAST_BETWEEN = 0.2
"""Share of a step in other and between from which on the line is named where the time goes"""
LEAST_SAMPLES, LEAST_OF_LINE = 30, 0.3
"""Fewest samples of the stack there, and the share that one line has of them"""


def between_share(phases_s: Mapping[str, float]) -> float | None:
    """Return the share of the steps' time in other and between, by phase; ``None`` if it is small, or little is known."""
    trained_s, between_s = sum(phases_s.values()), phases_s["other"] + phases_s["between"]
    return None if trained_s < LEAST_TRAINED_S or between_s < LEAST_BETWEEN * trained_s else between_s / trained_s


_DATA = PHASES.index("data")
_FORWARD, _BETWEEN = PHASES.index("forward"), PHASES.index("between")
_LATE = [PHASES.index(phase) for phase in LATE_PHASES]

LEAST_RANKS = 2
LEAST_STEPS = 8
"""Least number of steps for a comparison: a mean of fewer is dominated by single steps."""
SLOW = 1.2
"""Factor from which a rank is called slow. A fifth longer than its peers costs the run a sixth of its speed."""
LEAST_LOST_S = 1.0
"""Least excess of all steps compared: a first step, or a processor that others wanted, takes tenths of a second once"""


class Spent(NamedTuple):
    """Recent mean times of a rank's steps, from its counters or from its records."""

    steps: int
    """Number of steps averaged"""
    phases_s: Sequence[float]
    """Mean seconds of a step in each of ``catalog.PHASES``"""


class Slowness(NamedTuple):
    """How a rank compares with its peers."""

    factor: float
    """Its step time over what it would be if its peers did not wait for it; 1 = none waits for it"""
    phase: int
    """Index of the phase in which it loses most"""
    own_s: float = inf
    """Its mean seconds per step in that phase"""
    others_s: float = 0.0
    """The median of its peers there"""
    excess_s: Sequence[float] = ()
    """Seconds per step that its peers wait for it, by the phase in which it is late"""
    steps: float = inf
    """Number of its steps compared"""

    @property
    def is_slow(self) -> bool:
        """Whether that is a finding."""
        excess_s = self.own_s - self.others_s
        return self.factor >= SLOW and excess_s >= LEAST_EXCESS_S and excess_s * self.steps >= LEAST_LOST_S


def slowness(spent: Mapping[str, Spent]) -> dict[str, Slowness]:
    """Return the slowness of each rank with enough steps; all views and metrics use this function."""
    enough = {rank: times for rank, times in spent.items() if times.steps >= LEAST_STEPS}
    compared = compare({rank: times.phases_s for rank, times in enough.items()})
    return {rank: result._replace(steps=enough[rank].steps) for rank, result in compared.items()}


def compare(times: Mapping[str, Sequence[float]]) -> dict[str, Slowness]:
    """Return each rank's slowness, from its mean seconds per step in each phase; nothing for fewer than two ranks."""
    if len(times) < LEAST_RANKS:
        return {}
    if any(row[_BETWEEN] for row in times.values()):  # in which others may have a part of their forward pass
        times = {rank: _without_forward(row) for rank, row in times.items()}
    columns = [sorted(column) for column in zip(*times.values(), strict=True)]
    usual = {
        rank: [_median_without(column, value) for column, value in zip(columns, row, strict=True)]
        for rank, row in times.items()
    }
    above = {rank: list(map(sub, row, usual[rank])) for rank, row in times.items()}
    together = [sum(lengths[index] for index in _LATE) for lengths in above.values()]
    few = 2 * sum(2 * length >= max(together) for length in together) < len(together)
    results = {}
    for rank, row in times.items():
        excess, total = _excess(above[rank], _LATE if few else [_DATA]), sum(row)
        waited_for = sum(excess)
        phase = max(_LATE if waited_for else range(len(row)), key=(excess if waited_for else above[rank]).__getitem__)
        factor = total / (total - waited_for) if total > waited_for else 1.0
        results[rank] = Slowness(factor, phase, row[phase], usual[rank][phase], tuple(excess))
    return results


def _without_forward(row: Sequence[float]) -> list[float]:
    """Return the times with the forward pass as a part of between."""
    times = list(row)
    times[_BETWEEN], times[_FORWARD] = row[_BETWEEN] + row[_FORWARD], 0.0
    return times


def _excess(above_s: Sequence[float], phases: Sequence[int]) -> list[float]:
    """Return the seconds in each phase by which a rank is late, as far as its peers wait; ``phases``: those that count."""
    waited_s = sum(max(0.0, -above) for index, above in enumerate(above_s) if index != _DATA)
    together_s = sum(above_s[index] for index in phases)
    late = [_DATA] if above_s[_DATA] >= together_s else phases
    excess = [max(0.0, above) if index in late else 0.0 for index, above in enumerate(above_s)]
    waiting_s = min(waited_s, max(0.0, above_s[_DATA], together_s))
    return [length * (waiting_s / sum(excess)) for length in excess] if waiting_s else [0.0] * len(above_s)


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of a sorted sequence without one element equal to ``value``."""
    count, at = len(ordered) - 1, bisect_left(ordered, value)

    def item(index: int) -> float:
        return ordered[index + (index >= at)]

    return item(count // 2) if count % 2 else (item(count // 2 - 1) + item(count // 2)) / 2
