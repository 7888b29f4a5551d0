"""Aggregation of gradient norms, a part of the fold: gauge, distribution and anomalies."""

from __future__ import annotations

from math import exp, isfinite, log
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.spikes import LEAST_NORM_EXCESS, START, WARM_UP, judge, leaves_start
from torchobs.detect.vanishing import judge_low
from torchobs.flight.metrics.totals import (
    GRADIENT_EXPLOSION,
    GRADIENT_VANISHING,
    NONFINITE_GRADIENT,
    NORM_SUM,
    Totals,
    Word,
    add_anomaly,
    count,
    is_active,
    load_baseline,
    load_bursts,
    observe,
    store_baseline,
    store_bursts,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from torchobs.detect.spikes import Bursts
    from torchobs.flight.format.step_record import StepRecord
    from torchobs.flight.metrics.totals import Anomaly

_NONE = -1
_KINDS = (NONFINITE_GRADIENT, GRADIENT_EXPLOSION, GRADIENT_VANISHING)
_TWICE = log(2.0)


def fold_norms(totals: Totals, records: list[StepRecord], found: list[Anomaly], converged: Collection[int] = ()) -> None:
    """Add the norms of ``records``, in ring order (see :func:`torchobs.flight.metrics.fold.fold`).

    ``converged``: numbers of records after a loss of exactly zero. A margin loss (hinge, triplet) that every example of a
    batch satisfies has a zero gradient because nothing is left to learn; it has not vanished.
    """
    if not records:
        return
    ints, floats = totals.ints, totals.floats
    newest, last, low = ints[Word.GRAD_NORM_STEP], floats[Word.GRAD_NORM], ints[Word.LOW_NORMS]
    since = ints[Word.MODEL_STEP]
    active = {kind: is_active(totals, kind) for kind in _KINDS}
    found_here = dict.fromkeys(_KINDS, 0)
    mean, variance, seen = load_baseline(totals, Word.NORM_BASELINE)
    usual, start = floats[Word.NORM_USUAL], floats[Word.NORM_START]
    bursts = load_bursts(totals, Word.NORM_BURSTS)
    for record in records:
        norm, kind = record.grad_norm, _NONE
        if not isfinite(norm):
            kind = NONFINITE_GRADIENT
            add_anomaly(found, kind, record, norm, exp(usual) if active[GRADIENT_EXPLOSION] else last)
        elif record.step >= since:
            at_rest = not norm and record.seq in converged
            vanished, low = (False, 0) if at_rest else judge_low(norm, mean, variance, seen, low)
            exploded, early, start, mean, variance, seen = _assess(norm, start, mean, variance, seen, bursts)
            if early and start > 0.0:
                usual = min(usual, log(start))
            if exploded or vanished:
                kind = GRADIENT_EXPLOSION if exploded else GRADIENT_VANISHING
                add_anomaly(found, kind, record, norm, exp(usual) if seen else 0.0)
            else:
                usual = mean
        if kind != _NONE:
            found_here[kind] += 1
        if record.step >= newest:  # else delivered by a device after a newer step's value
            newest, active = record.step, {each: each == kind for each in _KINDS}
            last = norm if isfinite(norm) else last
    ints[Word.GRAD_NORM_STEP], floats[Word.GRAD_NORM], ints[Word.LOW_NORMS] = newest, last, low
    ints[Word.NONFINITE_STEPS] += found_here[NONFINITE_GRADIENT]
    floats[Word.NORM_USUAL], floats[Word.NORM_START] = usual, start
    store_baseline(totals, Word.NORM_BASELINE, mean, variance, seen)
    store_bursts(totals, Word.NORM_BURSTS, bursts)
    for kind in _KINDS:
        count(totals, kind, found_here[kind], active=active[kind])
    norms = [record.grad_norm for record in records if isfinite(record.grad_norm)]
    observe(totals, Word.NORM_DISTRIBUTION, catalog.NORM_BOUNDS, NORM_SUM, norms)


def _assess(
    norm: float, start: float, mean: float, variance: float, seen: int, bursts: Bursts
) -> tuple[bool, bool, float, float, float, int]:
    """Return whether the norm explodes, whether judged by the run's first values, and these values and the baseline updated."""
    if seen < WARM_UP and leaves_start(norm, start, seen):
        return True, True, start, mean, variance, seen + 1  # not learned by the baseline
    if norm <= 0.0:  # zero has no logarithm
        return False, False, start, mean, variance, seen
    exploded, mean, variance, seen = judge(log(norm), mean, variance, seen, LEAST_NORM_EXCESS)
    exploded = bursts.judge(log(norm), bursts.peak + _TWICE, is_spike=exploded)
    if seen <= START:
        start = max(start, norm) if seen > 1 else norm
    return exploded, False, start, mean, variance, seen
