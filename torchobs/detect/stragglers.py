"""Detect the rank that the others wait for, from each rank's time in the phases of a step.

Ranks that exchange gradients all take the same time for a step: the slow one is late in one phase, and the others wait for it
in another. So a rank's *lateness* is the largest excess above the median of its peers in a phase without waiting (data,
forward, optimizer), and the *wait* that it causes is its largest deficit below the median in another. Slowness within the
backward pass cannot be distinguished from waiting there, and is not found. Ranks with different step times do not wait for
each other; there the slow one is simply slower.

If one rank alone evaluates, saves or compiles, that is no part of its steps, but its peers wait for it within theirs: that
time is subtracted from theirs first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

_LATE = (0, 1, 3)
"""Indexes of data, forward and optimizer."""

LEAST_RANKS = 2
LEAST_STEPS = 8
"""Least number of steps for a comparison: a mean of fewer is dominated by single steps."""
SLOW = 1.2
"""Factor from which a rank is called slow. A fifth longer than its peers costs the run a sixth of its speed."""
LEAST_EXCESS_S = 0.005
"""Least excess per step: Python threads switch every 5 ms, which may not count against a rank with steps of 1 ms."""
LEAST_LOST_S = 1.0
"""Least excess of all steps compared: a first step, or a processor that others wanted, takes tenths of a second once"""


class Spent(NamedTuple):
    """Recent mean times of a rank's steps, from its counters or from its records."""

    steps: int
    """Number of steps averaged"""
    phases_s: Sequence[float]
    """Mean seconds of a step in each of ``catalog.PHASES``"""
    aside_s: float
    """Mean seconds per step of evaluation, checkpoints and compilation outside the steps"""


class Slowness(NamedTuple):
    """How a rank compares with its peers."""

    factor: float
    """Its step time over its peers', both without waiting; 1 = as fast as they are"""
    phase: int
    """Index of the phase in which it loses most"""
    own_s: float = inf
    """Its mean seconds per step in that phase"""
    others_s: float = 0.0
    """The median of its peers there"""
    excess_s: Sequence[float] = ()
    """Seconds per step above the median of its peers, in each phase"""
    steps: float = inf
    """Number of its steps compared"""

    @property
    def is_slow(self) -> bool:
        """Whether that is a finding."""
        excess_s = self.own_s - self.others_s
        return self.factor >= SLOW and excess_s >= LEAST_EXCESS_S and excess_s * self.steps >= LEAST_LOST_S


def slowness(spent: Mapping[str, Spent]) -> dict[str, Slowness]:
    """Return the slowness of each rank with enough steps; all views and metrics use this function."""
    enough = {rank: own for rank, own in spent.items() if own.steps >= LEAST_STEPS}
    times = {rank: own.phases_s for rank, own in enough.items()}
    found = compare(without_asides(times, {rank: own.aside_s for rank, own in enough.items()}))
    return {rank: one._replace(steps=enough[rank].steps) for rank, one in found.items()}


def compare(times: Mapping[str, Sequence[float]]) -> dict[str, Slowness]:
    """Return each rank's slowness, from its mean seconds per step in each phase; nothing for fewer than two ranks.

    Two ranks are each other's peers: the one that is late in data, forward or optimizer is the slow one.
    """
    if len(times) < LEAST_RANKS:
        return {}
    columns = [sorted(column) for column in zip(*times.values(), strict=True)]
    totals = sorted(sum(own) for own in times.values())
    return {rank: _slowness(own, columns, totals) for rank, own in times.items()}


def without_asides(times: Mapping[str, Sequence[float]], asides: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
    """Return the times without the waiting for peers that evaluate, save or compile.

    ``asides``: every rank's mean seconds per step in these. It is subtracted from the phase in which a rank is most above its
    peers, because it waited there: in its backward pass, or at a barrier between two steps.
    """
    if len(times) < LEAST_RANKS:
        return {rank: tuple(own) for rank, own in times.items()}
    columns = [sorted(column) for column in zip(*times.values(), strict=True)]
    ordered = sorted(asides[rank] for rank in times)
    found = {}
    for rank, own in times.items():
        above = [value - _median_without(column, value) for column, value in zip(columns, own, strict=True)]
        waited = max(range(len(own)), key=above.__getitem__)
        longer = max(0.0, _median_without(ordered, asides[rank]) - asides[rank])
        found[rank] = tuple(
            value - max(0.0, min(longer, above[index])) if index == waited else value for index, value in enumerate(own)
        )
    return found


def _slowness(own: Sequence[float], columns: Sequence[Sequence[float]], totals: Sequence[float]) -> Slowness:
    usual = [_median_without(column, value) for column, value in zip(columns, own, strict=True)]
    above = [value - typical for value, typical in zip(own, usual, strict=True)]
    whole, total = _median_without(totals, sum(own)), sum(own)
    late = max(above[index] for index in _LATE)
    wait = max(-value for value in above)
    without_waiting = whole - min(max(late, 0.0), max(wait, 0.0))
    phase = max(_LATE if late > 0 else range(len(above)), key=above.__getitem__)
    factor = total / without_waiting if without_waiting > 0 else 1.0
    return Slowness(factor, phase, own[phase], usual[phase], tuple(above))


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of a sorted sequence without one element equal to ``value``."""
    count, at = len(ordered) - 1, bisect_left(ordered, value)

    def item(index: int) -> float:
        return ordered[index + (index >= at)]

    return item(count // 2) if count % 2 else (item(count // 2 - 1) + item(count // 2)) / 2
