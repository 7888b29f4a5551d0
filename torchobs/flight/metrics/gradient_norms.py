"""Aggregation of gradient norms, a part of the fold: gauge, distribution and anomalies."""

from __future__ import annotations

from math import exp, isfinite
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.vanishing import judge_low
from torchobs.flight.format.step_record import StepFlag, StepRecord
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
    observe,
)
from torchobs.flight.metrics.usual_values import Rise, UsualValues

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torchobs.flight.metrics.totals import Anomaly

_NONE = -1
_KINDS = (NONFINITE_GRADIENT, GRADIENT_EXPLOSION, GRADIENT_VANISHING)


def fold_norms(
    totals: Totals, records: Sequence[StepRecord], found: list[Anomaly], converged: Collection[int], rises: Mapping[int, Rise]
) -> None:
    """Add the norms of ``records``, in ring order (see :func:`torchobs.flight.metrics.fold.fold`).

    ``converged``: numbers of records after a loss of exactly zero. A margin loss (hinge, triplet) that every example of a
    batch satisfies has a zero gradient because nothing is left to learn; it has not vanished. ``rises``: by number of a record,
    what its norm may be high by.
    """
    ints, floats = totals.ints, totals.floats
    newest, last, low = ints[Word.GRAD_NORM_STEP], floats[Word.GRAD_NORM], ints[Word.LOW_NORMS]
    since = ints[Word.MODEL_STEP]
    active = {kind: is_active(totals, kind) for kind in _KINDS}
    found_here = dict.fromkeys(_KINDS, 0)
    past, skipped = UsualValues.norms(totals), ints[Word.STEPS_SKIPPED] > 0
    for record in records:
        skipped = skipped or bool(record.flags & StepFlag.SKIPPED)
        if not record.flags & StepFlag.GRAD_NORM:
            continue
        norm, kind = record.grad_norm, _NONE
        if not isfinite(norm):
            kind = NONFINITE_GRADIENT
            if record.step >= since and not skipped and record.norm_scale == 1.0:  # under a loss scaler it is ordinary
                found_here[GRADIENT_EXPLOSION] += past.report(past.give_up(), found)
            add_anomaly(found, kind, record, norm, exp(past.usual) if past.baseline[2] else last)
        elif record.step >= since:
            at_rest = not norm and record.seq in converged
            vanished, low = (False, 0) if at_rest else judge_low(norm, *past.baseline, low)
            usual, explained = past.usual, rises[record.seq].explains(record.step, newest, past)
            earlier, exploded = _explode(past, record, found, explained=explained) if norm > 0.0 else (0, False)
            found_here[GRADIENT_EXPLOSION] += earlier
            past.usual = usual if vanished else past.usual
            if exploded or vanished:
                kind = GRADIENT_EXPLOSION if exploded else GRADIENT_VANISHING
                add_anomaly(found, kind, record, norm, exp(past.usual) if past.baseline[2] else 0.0)
        if kind != _NONE:
            found_here[kind] += 1
        if record.step >= newest:  # else delivered by a device after a newer step's value
            newest, active = record.step, {each: each == kind for each in _KINDS}
            last = norm if isfinite(norm) else last
    ints[Word.GRAD_NORM_STEP], floats[Word.GRAD_NORM], ints[Word.LOW_NORMS] = newest, last, low
    ints[Word.NONFINITE_STEPS] += found_here[NONFINITE_GRADIENT]
    past.store()
    for kind in _KINDS:
        count(totals, kind, found_here[kind], active=active[kind])
    norms = [record.grad_norm for record in records if record.flags & StepFlag.GRAD_NORM and isfinite(record.grad_norm)]
    observe(totals, Word.NORM_DISTRIBUTION, catalog.NORM_BOUNDS, NORM_SUM, norms)


def _explode(past: UsualValues, record: StepRecord, found: list[Anomaly], *, explained: bool) -> tuple[int, bool]:
    """Add a norm to its past; return the number of explosions before it that are certain by now, and whether it is one."""
    spikes, exploded = past.add(record.grad_norm, record.step, record.end_ns, explained=explained)
    return past.report(spikes[: len(spikes) - exploded], found), exploded
