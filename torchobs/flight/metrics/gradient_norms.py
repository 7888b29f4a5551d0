"""Aggregation of gradient norms, a part of the fold: gauge, distribution and anomalies."""

from __future__ import annotations

from math import exp, isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING

from torchobs import catalog
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
    observe,
)
from torchobs.flight.metrics.usual_values import Rise, UsualValues

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torchobs.detect.excursions import Candidate
    from torchobs.flight.format.step_record import StepRecord
    from torchobs.flight.metrics.totals import Anomaly

_NONE = -1
_KINDS = (NONFINITE_GRADIENT, GRADIENT_EXPLOSION, GRADIENT_VANISHING)


def fold_norms(
    totals: Totals,
    records: list[StepRecord],
    found: list[Anomaly],
    converged: Collection[int] = (),
    rises: Mapping[int, Rise] = MappingProxyType({}),
    scaled: Collection[int] = (),
) -> None:
    """Add the norms of ``records``, in ring order (see :func:`torchobs.flight.metrics.fold.fold`).

    ``converged``: numbers of records after a loss of exactly zero. A margin loss (hinge, triplet) that every example of a
    batch satisfies has a zero gradient because nothing is left to learn; it has not vanished. ``rises``: by number of a record,
    what its norm may be high by. ``scaled``: numbers of those under a loss scaler, where one that is not finite is ordinary.
    """
    if not records:
        return
    ints, floats = totals.ints, totals.floats
    newest, last, low = ints[Word.GRAD_NORM_STEP], floats[Word.GRAD_NORM], ints[Word.LOW_NORMS]
    since = ints[Word.MODEL_STEP]
    active = {kind: is_active(totals, kind) for kind in _KINDS}
    found_here = dict.fromkeys(_KINDS, 0)
    past = UsualValues.norms(totals)
    for record in records:
        norm, kind = record.grad_norm, _NONE
        if not isfinite(norm):
            kind = NONFINITE_GRADIENT
            if record.step >= since and record.seq not in scaled:
                _add_explosions(past, past.give_up(), found, found_here)
            add_anomaly(found, kind, record, norm, exp(past.usual) if past.baseline[2] else last)
        elif record.step >= since:
            at_rest = not norm and record.seq in converged
            vanished, low = (False, 0) if at_rest else judge_low(norm, *past.baseline, low)
            usual = past.usual
            explained = record.seq in rises and rises[record.seq].explains(record.step, newest, past)
            exploded = norm > 0.0 and _explodes(past, record, found, found_here, explained=explained)
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
    norms = [record.grad_norm for record in records if isfinite(record.grad_norm)]
    observe(totals, Word.NORM_DISTRIBUTION, catalog.NORM_BOUNDS, NORM_SUM, norms)


def end_norms(totals: Totals, found: list[Anomaly]) -> None:
    """Add the explosions among the last norms of a model: another one is trained."""
    past, counts = UsualValues.norms(totals), {GRADIENT_EXPLOSION: 0}
    _add_explosions(past, past.give_up(ended=True), found, counts)
    count(totals, GRADIENT_EXPLOSION, counts[GRADIENT_EXPLOSION], active=False)


def _explodes(past: UsualValues, record: StepRecord, found: list[Anomaly], counts: dict[int, int], *, explained: bool) -> bool:
    """Add a norm to its past, and the explosions before it that are certain by now; return whether it is one."""
    spikes, exploded = past.add(record.grad_norm, record.step, record.end_ns, explained=explained)
    _add_explosions(past, spikes[: len(spikes) - exploded], found, counts)
    return exploded


def _add_explosions(past: UsualValues, earlier: list[Candidate], found: list[Anomaly], counts: dict[int, int]) -> None:
    for candidate in earlier:
        add_anomaly(found, GRADIENT_EXPLOSION, candidate, exp(candidate.value), exp(past.usual))
    counts[GRADIENT_EXPLOSION] += len(earlier)
