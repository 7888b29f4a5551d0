"""Detect the rank that the others wait for, from each rank's time in the phases of a step.

Ranks that exchange gradients all take the same time for a step: the slow one is late in one phase, and the others wait for it
in another. So a rank is slow by as much as its peers wait for it: by the time that it is above their median in data, forward
or optimizer, as far as it is below their median in a phase in which they may wait for that. A rank that is above its peers
while nobody waits for it may itself be waiting: for a rank that evaluates, saves or compiles, wherever in its own step.
Slowness within the backward pass cannot be distinguished from waiting there, and is not found; neither are ranks that never
wait for each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

_LATE = (0, 1, 3)
"""Indexes of data, forward and optimizer."""
_WAITS = ((0, 1, 2, 3, 4), (2, 3), (), (1, 2), (2, 3))
"""By the index of a phase, those in which peers may wait for a rank that is late in it: a rank that is above its peers in
forward, optimizer or other may wait there for what they do in data or other"""

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


class Slowness(NamedTuple):
    """How a rank compares with its peers."""

    factor: float
    """Its step time over what it would be if its peers did not wait for it; 1 = nobody waits for it"""
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
    enough = {rank: own for rank, own in spent.items() if own.steps >= LEAST_STEPS}
    found = compare({rank: own.phases_s for rank, own in enough.items()})
    return {rank: one._replace(steps=enough[rank].steps) for rank, one in found.items()}


def compare(times: Mapping[str, Sequence[float]]) -> dict[str, Slowness]:
    """Return each rank's slowness, from its mean seconds per step in each phase; nothing for fewer than two ranks.

    Two ranks are each other's peers: the one that is late in data, forward or optimizer is the slow one.
    """
    if len(times) < LEAST_RANKS:
        return {}
    columns = [sorted(column) for column in zip(*times.values(), strict=True)]
    return {rank: _slowness(own, columns) for rank, own in times.items()}


def _slowness(own: Sequence[float], columns: Sequence[Sequence[float]]) -> Slowness:
    usual = [_median_without(column, value) for column, value in zip(columns, own, strict=True)]
    above = [value - typical for value, typical in zip(own, usual, strict=True)]
    waits = [max((-above[index] for index in phases), default=0.0) for phases in _WAITS]
    excess = [max(0.0, min(late, wait)) for late, wait in zip(above, waits, strict=True)]
    waited_for = max(excess[index] for index in _LATE)
    phase = max(_LATE if waited_for else range(len(above)), key=(excess if waited_for else above).__getitem__)
    total = sum(own)
    without_waiting = total - waited_for
    factor = total / without_waiting if without_waiting > 0 else 1.0
    return Slowness(factor, phase, own[phase], usual[phase], tuple(excess))


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of a sorted sequence without one element equal to ``value``."""
    count, at = len(ordered) - 1, bisect_left(ordered, value)

    def item(index: int) -> float:
        return ordered[index + (index >= at)]

    return item(count // 2) if count % 2 else (item(count // 2 - 1) + item(count // 2)) / 2
