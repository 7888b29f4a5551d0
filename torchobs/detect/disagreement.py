"""Detect ranks whose gradient differs from that of the others though it is the same by construction.

DistributedDataParallel averages the gradients over the ranks, so that their norm in a step is the same on all, to the last
bits. A rank that has another one trains another model: its weights were not synchronised, or DDP is gone around.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from statistics import median_low

LEAST_STEPS = 3
"""Least steps that all have measured, which each rank chooses by its own cost; the norm has to differ in every one of them."""
LEAST_DIFFERENCE = 0.01
"""Least relative difference: the order of a sum in float16 makes less than a thousandth."""


def differing(norms: Mapping[str, Mapping[int, float]]) -> tuple[str, ...]:
    """Return the ranks whose norm differs from the median in all of the last steps that all ranks have measured.

    ``norms``: each rank's gradient norms by step. Of two ranks that differ both are returned: neither is the odd one. Empty if
    all agree, for a single rank, and with fewer than ``LEAST_STEPS`` common steps.
    """
    steps = sorted(set.intersection(*(set(own) for own in norms.values())))[-LEAST_STEPS:] if norms else []
    if len(steps) < LEAST_STEPS or not all(isfinite(own[step]) for own in norms.values() for step in steps):
        return ()
    usual = {step: median_low([own[step] for own in norms.values()]) for step in steps}
    odd = tuple(name for name, own in norms.items() if all(_differs(own[step], usual[step]) for step in steps))
    return tuple(norms) if odd and 2 * len(odd) >= len(norms) else odd


def _differs(norm: float, usual: float) -> bool:
    return abs(norm - usual) > LEAST_DIFFERENCE * max(abs(norm), abs(usual))
