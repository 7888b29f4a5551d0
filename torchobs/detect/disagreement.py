"""Ranks with another gradient, other weights, or the same batches as their peers, under DistributedDataParallel.

DistributedDataParallel averages the gradients over the ranks, so that their norm in a step is the same on all, to the last
bits. A rank that has another one trains another model: its weights were not synchronised, or DDP is gone around. Weights that
differ once stay so, though the gradients agree: they are compared by what every rank writes down of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isclose, isfinite, sqrt
from statistics import fmean, median_low

LEAST_STEPS = 3
"""Least steps that all have measured, which each rank chooses by its own cost; the norm has to differ in every one of them."""
LOOKED_BATCHES = 8
"""Batches in a row that must be the same; fewer are tests whether a model can learn them"""
_LAST = 64
"""Steps with losses that are compared"""
LEAST_DIFFERENCE = 0.01
"""Least relative difference: the order of a sum in float16 makes less than a thousandth."""


def differing(norms: Mapping[str, Mapping[int, float]]) -> tuple[str, ...]:
    """Return the ranks with a norm unlike the median in all of the last steps that all ranks have measured.

    ``norms``: each rank's gradient norms by step. Of two ranks that differ both are returned: neither is the odd one. Empty if
    all agree, for a single rank, and with fewer than ``LEAST_STEPS`` common steps.
    """
    steps = sorted(set.intersection(*(set(by_step) for by_step in norms.values())))[-LEAST_STEPS:] if norms else []
    if len(steps) < LEAST_STEPS or not all(isfinite(by_step[step]) for by_step in norms.values() for step in steps):
        return ()
    usual = {step: median_low([by_step[step] for by_step in norms.values()]) for step in steps}
    alike = partial(isclose, rel_tol=LEAST_DIFFERENCE)
    odd = tuple(name for name, by_step in norms.items() if not any(alike(by_step[step], usual[step]) for step in steps))
    return tuple(norms) if odd and 2 * len(odd) >= len(norms) else odd


def drifted(weights: Mapping[str, Mapping[int, Sequence[float]]]) -> tuple[int, int, tuple[str, ...]] | None:
    """Return the step since which weights differ, the last one where they were alike (0: never), and the ranks that differ.

    ``weights``: by rank and step the norm of some weights and their sums with random signs. Of two ranks that differ both are
    returned. ``None`` if all agree in the last step that all ranks have, or have none.
    """
    steps = sorted(set.intersection(*(set(by_step) for by_step in weights.values()))) if len(weights) > 1 else []
    odd = {step: _apart({rank: by_step[step] for rank, by_step in weights.items()}) for step in steps}
    if not steps or not odd[steps[-1]]:
        return None
    alike = max((step for step in steps if not odd[step]), default=0)
    since = min(step for step in steps if step > alike)
    return since, alike, odd[steps[-1]]


def _apart(values: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """Return the ranks with weights further than ``LEAST_DIFFERENCE`` of their norm from the median."""
    if len({len(row) for row in values.values()}) > 1 or not all(isfinite(x) for row in values.values() for x in row):
        return ()
    usual = [median_low(column) for column in zip(*values.values(), strict=True)]
    limit = LEAST_DIFFERENCE * abs(usual[0]) if usual else 0.0
    distances = {
        rank: sqrt(fmean((x - middle) ** 2 for x, middle in zip(row, usual, strict=True))) for rank, row in values.items()
    }
    odd = tuple(rank for rank, distance in distances.items() if distance > limit)
    return tuple(values) if odd and 2 * len(odd) >= len(values) else odd


def same_batches(batches: Mapping[str, Mapping[int, Sequence[float]]]) -> int | None:
    """Return the step since which ranks get the same batches; ``None`` if they do not.

    ``batches``: by rank and step, numbers that differ from batch to batch, of those that begin there. One batch that comes
    again and again is a test whether a model can learn it.
    """
    steps = sorted(set.intersection(*(set(by_step) for by_step in batches.values()))) if len(batches) > 1 else []
    alike = all(_are_same([by_step[step] for by_step in batches.values()]) for step in steps)
    return steps[0] if steps and alike else None


def same_losses(losses: Iterable[Mapping[int, float]]) -> bool:
    """Return whether ranks compute the same of their batches: losses that are equal to the bit, and change.

    ``losses``: each rank's by step, of the last steps. Ranks that take their part of a common batch have others.
    """
    rows = [dict([*by_step.items()][-_LAST:]) for by_step in losses]
    common = sorted(set.intersection(*map(set, rows))) if rows else []
    alike = all(len({row[step] for row in rows}) == 1 for step in common)
    return alike and len(common) >= LOOKED_BATCHES and len({rows[0][step] for step in common}) >= LOOKED_BATCHES


def _are_same(rows: Sequence[Sequence[float]]) -> bool:
    """Return whether all ranks have the same batches, and these are not one that is repeated."""
    return len(set(map(tuple, rows))) == 1 and len(set(rows[0])) == len(rows[0]) == LOOKED_BATCHES
