"""Findings on loss, gradients and learning rate. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, isfinite, isnan
from statistics import median
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.catalog.findings import ORIGIN, Finding, finding
from torchobs.detect.learning import NEGLIGIBLE, ZeroRate, is_stuck
from torchobs.detect.spikes import (
    LEAST_EXPLOSIONS,
    LEAST_LOSS_SPIKES,
    LEAST_NORM_EXCESS,
    LEAST_RATES,
    LEFT,
    RATE_MEMORY,
    RATE_ROSE,
    START,
    WARM_UP,
    leaves_start,
)
from torchobs.diagnosis.from_events import (
    GATED,
    SPOILED,
    UNTIL_A_STEP,
    from_events,
)
from torchobs.ranks.rank_view import RankView, Step, model_begins

LEAST_NOTABLE = {"gradient_explosion": LEAST_EXPLOSIONS, "loss_spike": LEAST_LOSS_SPIKES}
"""Least number of past anomalies that is reported, as for the alert; one for the other kinds."""
_BEFORE = RATE_MEMORY
"""Steps before a bad loss that are searched for its cause."""
_BASELINE = 200
_LEAST_BASELINE = LEAST_RATES
_MANY_SKIPPED = 0.05
"""Share of all steps. A healthy scaler doubles its scale every 2,000 steps, and skips one if that was too much."""


class Rise(NamedTuple):
    """A value that rose in one step above its baseline."""

    step: int
    usual: float
    value: float


def numerics(report: RankView) -> Iterator[Finding]:
    """Yield numerical problems, the loss first; then what events alone make."""
    lost, past, events = onset([step.loss for step in report.steps]), report.past, from_events(report.events)
    if lost is not None:
        yield _nonfinite_loss(report, lost)
    else:
        yield from _spikes(report, past)
    yield from _diverged(report)
    if report.zero_rate is not None:
        yield zero_learning_rate(report.zero_rate)
    if ORIGIN in events:
        yield _settled(events[ORIGIN], past, report, spoiled=SPOILED in events)
    yield from _nonfinite_gradients(report, past)
    yield from _vanished(report, past)
    if catalog.EVENT_AMP_SCALE_COLLAPSED.name not in {fact.name for fact in report.events}:
        yield from _skips(report)
    for kind, found in events.items():
        if kind not in GATED and not (kind == UNTIL_A_STEP and report.last_step):
            yield found


def onset(values: Sequence[float | None]) -> int | None:
    """Return the index from which on all known values are non-finite; ``None`` if the last one is finite."""
    found = None
    for index in range(len(values) - 1, -1, -1):
        value = values[index]
        if value is not None and isfinite(value):
            break
        found = index if value is not None else found
    return found


def _nonfinite_loss(report: RankView, lost: int) -> Finding:
    steps, step = report.steps, report.steps[lost]
    name = "NaN" if step.loss is None or isnan(step.loss) else "infinite"
    if steps[0].step > 1 and all(before.loss is None for before in steps[:lost]):
        return finding("nonfinite_loss_before", step=step.step, name=name)
    rate = _rate(steps, lost)
    return finding(
        "nonfinite_loss",
        step=step.step,
        name=name,
        **_cause(steps, lost),
        **rate,
        learning_rate=None if rate else step.learning_rate,
        wasted=steps[-1].step - step.step or None,
    )


def _cause(steps: Sequence[Step], lost: int) -> dict[str, Any]:
    """Return how the gradient behaved before the loss became non-finite."""
    step, before = steps[lost], steps[max(model_begins(steps, lost), lost - _BEFORE) : lost]
    odd = next(
        (item for item in before if item.grad_norm is not None and not isfinite(item.grad_norm) and not item.skipped), None
    )
    if odd is not None:
        return {"ago": step.step - odd.step, "loss": odd.loss}
    rise = norm_rise(steps, lost)
    if rise is None:
        return {}
    later = step.step - rise.step
    found = {"rise": rise.value / rise.usual, "rise_usual": rise.usual, "rise_value": rise.value}
    return {**found, "rise_ago": later} if later else {**found, "rise_with": True}


def norm_rise(steps: Sequence[Step], end: int) -> Rise | None:
    """Return the first explosion of the gradient norm in the 50 steps up to ``end``: eight times the median before.

    Among a run's first norms, too few for a median, one that is orders of magnitude above the first values.
    """
    begin = model_begins(steps, end)
    for index in range(max(begin, end - _BEFORE), end + 1):
        norm = steps[index].grad_norm if index < len(steps) else None
        if norm is None or not isfinite(norm):
            continue
        earlier = [item.grad_norm for item in steps[max(begin, index - _BASELINE) : index] if item.grad_norm is not None]
        usual = median(earlier) if len(earlier) >= _LEAST_BASELINE and all(map(isfinite, earlier)) else 0.0
        if usual > 0 and norm / usual >= exp(LEAST_NORM_EXCESS):
            return Rise(steps[index].step, usual, norm)
        start = max(filter(isfinite, earlier[:START]), default=0.0)
        if not usual and start > 0 and leaves_start(norm, start, len(earlier)):
            return Rise(steps[index].step, start, norm)
    return None


def rate_rise(steps: Sequence[Step], end: int) -> Rise | None:
    """Return the step among the last 50 up to ``end`` in which the learning rate jumped to a new maximum."""
    highest, found, begin = 0.0, None, model_begins(steps, end)
    for index, step in enumerate(steps[begin : end + 1], begin):
        rate = step.learning_rate
        if rate is None or not isfinite(rate):
            continue
        if index >= max(begin + _LEAST_BASELINE, end - _BEFORE) and highest > 0 and rate >= RATE_ROSE * highest:
            found = Rise(step.step, highest, rate)
        highest = max(highest, rate)
    return found


def _rate(steps: Sequence[Step], end: int) -> dict[str, Any]:
    rise = rate_rise(steps, end)
    if rise is None:
        return {}
    return {"rate": rise.value / rise.usual, "rate_usual": rise.usual, "rate_value": rise.value, "rate_step": rise.step}


def _spikes(report: RankView, past: Mapping[str, int]) -> Iterator[Finding]:
    """Yield loss spikes and explosions, with their causes, if the last loss was finite."""
    for kind in ("gradient_explosion", "loss_spike"):
        count = report.count(catalog.ANOMALIES, kind)
        first = next((fact for fact in report.events_named(catalog.EVENT_ANOMALY) if fact.text("kind") == kind), None)
        if not count or first is None or first.step is None:
            continue
        rate = _rate(report.steps, _index(report.steps, first.step))
        # single ones are ordinary, unless the learning rate explains them
        severity = None if rate or count >= LEAST_NOTABLE[kind] else Severity.INFO
        values: dict[str, Any] = {
            name: first.attributes.get(name) for name in ("value", "baseline", "layer", "layer_norm", "layer_usual")
        }
        again, healthy = count - 1 or None, past.get(kind)
        yield finding(kind, step=first.step, severity=severity, again=again, healthy=healthy, **values, **rate)
    if count := report.count(catalog.ANOMALIES, "nonfinite_loss"):
        seen = [step for step in report.steps if step.loss is not None]
        recovered = bool(seen) and (not report.partial or seen[-1].step >= report.last_step)
        yield finding("nonfinite_loss_passed", losses=count, recovered=recovered, healthy=past.get("nonfinite_loss"))


def _index(steps: Sequence[Step], number: int) -> int:
    return next((index for index, step in enumerate(steps) if step.step >= number), len(steps) - 1)


def _settled(origin: Finding, past: Mapping[str, int], report: RankView, *, spoiled: bool) -> Finding:
    """Return the origin of a NaN, with the healthy steps since if the training has recovered from all of its kinds."""
    kinds = {kind for kind in ("nonfinite_loss", "nonfinite_gradient") if report.value(catalog.ANOMALIES, kind)}
    if report.value(catalog.AMP_STEPS_SKIPPED):
        kinds.discard("nonfinite_gradient")  # part of normal loss scaling
    if not kinds or spoiled or not kinds <= past.keys():
        return origin
    return origin._replace(values={**origin.values, "healthy": min(past[kind] for kind in kinds)})


def _nonfinite_gradients(report: RankView, past: Mapping[str, int]) -> Iterator[Finding]:
    """Yield the layers where gradients first became non-finite."""
    events = report.events_named(catalog.EVENT_NONFINITE_GRADIENT)
    if events and events[0].step is not None:
        first, scaled = events[0], bool(report.by_attribute(catalog.AMP_SCALE))
        last = first.attributes.get("measured") is False
        yield finding(
            "nonfinite_gradient",
            step=first.step,
            severity=Severity.INFO if scaled else None,
            kinds=first.text("kinds").replace("nan", "NaN").replace("inf", "infinite") or "not finite",
            layers=first.texts("layers"),
            layers_affected=first.count("layers_affected"),
            last=last,
            steps=None if last else report.count(catalog.GRAD_NONFINITE_STEPS) or None,
            scaled=scaled,
            healthy=past.get("nonfinite_gradient"),
        )


def _vanished(report: RankView, past: Mapping[str, int]) -> Iterator[Finding]:
    if count := report.count(catalog.ANOMALIES, "gradient_vanishing"):
        measured, zero = max(report.measured_norms, count), report.value(catalog.GRAD_ZERO) or None
        healthy = past.get("gradient_vanishing")
        yield finding("gradient_vanishing", vanished=count, measured=measured, zero=zero, healthy=healthy)


def _skips(report: RankView) -> Iterator[Finding]:
    skipped, steps = report.count(catalog.AMP_STEPS_SKIPPED), report.count(catalog.STEPS)
    streak = report.count(catalog.AMP_SKIP_STREAK)
    if is_stuck(streak, report.scale):
        yield finding("amp_skips", streak=streak, up=report.up)
    elif skipped and skipped >= _MANY_SKIPPED * steps:
        yield finding("amp_many_skips", skipped=skipped, steps=steps)


def zero_learning_rate(found: ZeroRate) -> Finding:
    """Return that the learning rate of all parameter groups is zero, or next to it, since some step."""
    kind, everything = "tiny_learning_rate" if found.highest else "zero_learning_rate", found.first == 1
    rates: dict[str, Any] = {"rate": NEGLIGIBLE * found.highest, "highest": found.highest}
    since, before = None if everything else found.first, found.is_begun_before
    return finding(kind, all=everything, since=since, before=before, steps=found.steps, **rates)


def _diverged(report: RankView) -> Iterator[Finding]:
    """Yield that the loss has left its start for good (``detect.spikes``)."""
    if not report.value(catalog.ANOMALY_ACTIVE, "diverged"):
        return
    steps = report.steps[model_begins(report.steps, len(report.steps) - 1) :] if report.steps else ()
    is_start = bool(steps) and (steps[0].step == 1 or steps[0].new_model)
    diverged = [event for event in report.events_named(catalog.EVENT_ANOMALY) if event.text("kind") == "diverged"]
    first = diverged[-1].number("baseline") if diverged else None
    last = next((step for step in reversed(report.steps) if step.loss is not None), None)
    rate = max((step.learning_rate for step in steps[:WARM_UP] if step.learning_rate), default=None) if is_start else None
    yield finding(
        "diverged",
        step=last.step if last else None,
        first=first,
        left=LEFT,
        warm_up=WARM_UP,
        value=last.loss if last else None,
        rate=rate,
    )
