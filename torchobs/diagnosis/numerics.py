"""Findings on loss, gradients and learning rate. Pure functions of a rank's report."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import exp, isfinite, isnan, nan
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.catalog.findings import ORIGIN, Finding, finding
from torchobs.detect.learning import LEAST_SKIPPED, LEAST_ZEROS, NEGLIGIBLE, ZeroRate, is_stuck
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
from torchobs.diagnosis.from_events import GATED, SPOILED, UNTIL_A_STEP, from_events
from torchobs.flight.events import Event
from torchobs.ranks.rank_view import RankView, Step, model_begins

LEAST_NOTABLE = {"gradient_explosion": LEAST_EXPLOSIONS, "loss_spike": LEAST_LOSS_SPIKES}
"""Least number of past anomalies that is reported, as for the alert; one for the other kinds."""
_AT_THE_END = frozenset({"nonfinite_loss", "diverged"})
"""States that last until the end of a training; the other kinds are about single steps"""
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
    """Yield numerical problems, those of the loss first; then the findings that come from events alone."""
    events = from_events(report.events)
    is_lost = report.loss is not None and not isfinite(report.loss)
    if is_lost:
        yield _nonfinite_loss(report)
    else:
        yield from _spikes(report)
    yield from _diverged(report)
    if report.zero_rate is not None:
        yield zero_learning_rate(report.zero_rate)
    if ORIGIN in events:
        yield _origin(events[ORIGIN], report, spoiled=SPOILED in events, is_lost=is_lost)
    if SPOILED in events and not is_lost:
        yield events[SPOILED]
    yield from _nonfinite_gradients(report)
    yield from _vanished(report)
    yield from _skips(report, events.get("amp_scale_collapsed"))
    for kind, item in events.items():
        if kind not in GATED and not (kind == UNTIL_A_STEP and report.done):
            yield item
    unmoved = report.count(catalog.GRAD_UNMOVED_LAYERS)
    if unmoved and not any(kind.startswith("unmoved_layers") for kind in events):
        yield finding("unmoved_layers", unmoved=unmoved)


def _judged(report: RankView, kind: str, *, explained: bool = False) -> dict[str, Any]:
    """Return the severity of an anomaly: by its kind if it lasts, else by how many there were lately, or in all.

    ``explained``: even a single one is worth a look. From a past one the training has recovered for certain.
    """
    is_now = kind in report.anomalies and (report.up or kind in _AT_THE_END)
    number = report.counted.get(kind, 0)
    notable = (report.lately.get(kind, 0) if report.up else number) >= LEAST_NOTABLE.get(kind, 1)
    severity = catalog.ANOMALY_SEVERITY[kind] if is_now else None if notable or explained else Severity.INFO
    healthy = None if is_now else report.past.get(kind)
    return {"anomaly": kind, "number": number, "now": is_now, "severity": severity, "healthy": healthy}


def onset(values: Sequence[float | None]) -> int | None:
    """Return the index from which all known values are non-finite; ``None`` if the last known value is finite."""
    first = None
    for index, value in reversed(list(enumerate(values))):
        if value is not None and isfinite(value):
            break
        first = index if value is not None else first
    return first


def _nonfinite_loss(report: RankView) -> Finding:
    """Return since when the loss is not finite. Events do not show that: in a row of many only the first ones write one."""
    steps, lost = report.steps, onset([step.loss for step in report.steps])
    newest = from_events(report.events).get("nonfinite_loss")
    if lost is None:
        return finding("nonfinite_loss", step=newest.step if newest else None)
    step = steps[lost]
    name = "NaN" if step.loss is None or isnan(step.loss) else "infinite"
    if _is_older(steps, [step.loss for step in steps[:lost]]):
        return finding("nonfinite_loss_before", step=step.step, name=name)
    rate = _rate(steps, lost)
    return finding(
        "nonfinite_loss",
        step=step.step,
        since=step.step,
        name=name,
        **_cause(steps, lost),
        **rate,
        learning_rate=None if rate else step.learning_rate,
        wasted=steps[-1].step - step.step or None,
    )


def _is_older(steps: Sequence[Step], before: Sequence[float | None]) -> bool:
    """Return whether a value may have turned before the steps at hand. ``before``: their values up to the first bad one."""
    return steps[0].step > 1 and all(value is None for value in before)


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
    cause = {"rise": rise.value / rise.usual, "rise_usual": rise.usual, "rise_value": rise.value}
    return {**cause, "rise_ago": later} if later else {**cause, "rise_with": True}


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
    highest, rise, begin = 0.0, None, model_begins(steps, end)
    for index, step in enumerate(steps[begin : end + 1], begin):
        rate = step.learning_rate
        if rate is None or not isfinite(rate):
            continue
        if index >= max(begin + _LEAST_BASELINE, end - _BEFORE) and highest > 0 and rate >= RATE_ROSE * highest:
            rise = Rise(step.step, highest, rate)
        highest = max(highest, rate)
    return rise


def _rate(steps: Sequence[Step], end: int) -> dict[str, Any]:
    rise = rate_rise(steps, end)
    if rise is None:
        return {}
    return {"rate": rise.value / rise.usual, "rate_usual": rise.usual, "rate_value": rise.value, "rate_step": rise.step}


def _spikes(report: RankView) -> Iterator[Finding]:
    """Yield loss spikes and explosions, with their causes, if the last loss was finite."""
    for kind in ("gradient_explosion", "loss_spike"):
        if not report.counted.get(kind) and kind not in report.anomalies:
            continue
        first = _first(report, kind)
        at = None if first is None or first.step is None else bisect_left(report.steps, first.step, key=attrgetter("step"))
        rate = {} if at is None else _rate(report.steps, min(at, len(report.steps) - 1))
        # single ones are ordinary, unless the learning rate explains them
        judged = _judged(report, kind, explained=bool(rate))
        values: dict[str, Any] = {}
        if first is not None:
            values = {name: first.attributes.get(name) for name in ("layer", "layer_norm", "layer_usual")}
            values |= {"first_step": first.step, "first_value": first.number("value"), "first_usual": first.number("baseline")}
        values["again"] = judged["number"] - 1 or None if first is not None else None
        yield _newest(report, kind, **judged, **values, **rate)
    if report.counted.get("nonfinite_loss"):
        measured = [step for step in report.steps if step.loss is not None]
        recovered = bool(measured) and (not report.partial or measured[-1].step >= report.last_step)
        judged = _judged(report, "nonfinite_loss")
        yield finding("nonfinite_loss_passed", losses=judged["number"], recovered=recovered, **judged)


def _first(report: RankView, kind: str) -> Event | None:
    """Return the event of the first anomaly of a kind that the file still has."""
    return next((fact for fact in report.events_named(catalog.EVENT_ANOMALY) if fact.text("kind") == kind), None)


def _newest(report: RankView, kind: str, **values: Any) -> Finding:
    """Return a finding on an anomaly, with the step and the values of the newest of its kind."""
    newest = from_events(report.events).get(kind) or finding(kind)
    return newest._replace(values={**newest.values, **values})


def _origin(origin: Finding, report: RankView, *, spoiled: bool, is_lost: bool) -> Finding:
    """Return the origin of a NaN with the severity of its consequences.

    A warning while loss and gradients are finite again; past once the training has recovered from all of its kinds.
    """
    kinds = {kind for kind in ("nonfinite_loss", "nonfinite_gradient") if report.counted.get(kind)}
    if _is_scaled(report):
        kinds.discard("nonfinite_gradient")  # part of normal loss scaling
    healthy = min((report.past.get(kind, 0) for kind in kinds), default=0)
    if healthy and not spoiled:
        return origin._replace(values={**origin.values, "healthy": healthy})
    is_now = is_lost or spoiled or "nonfinite_gradient" in report.anomalies or not report.up
    return origin if is_now else origin._replace(values={**origin.values, "severity": Severity.WARNING})


def _is_scaled(report: RankView) -> bool:
    """Return whether a loss scaler skips steps with gradients that are not finite."""
    return bool(report.values(catalog.AMP_SCALE) or report.value(catalog.AMP_STEPS_SKIPPED))


def _nonfinite_gradients(report: RankView) -> Iterator[Finding]:
    """Yield the layers where gradients first became non-finite, and since when they are."""
    kind = "nonfinite_gradient"
    events = report.events_named(catalog.EVENT_NONFINITE_GRADIENT)
    done = {step.step for step in report.steps if not step.skipped}  # divided by a scale near 0 they turn infinite unseen
    events = [event for event in events if event.step in done] or events
    scaled, values = _is_scaled(report) and not any(event.step in done for event in events), dict[str, Any]()
    if not events and (scaled or (not report.counted.get(kind) and kind not in report.anomalies)):
        return
    judged = _judged(report, kind, explained=True)
    judged["number"] = max(judged["number"], 1)  # those of a step that did not end are not counted
    if scaled:
        judged["severity"] = Severity.INFO
    # where no norm was measured, a loss that is not finite shows it, or the derivative that was found
    origin = from_events(report.events).get(ORIGIN)
    born = origin.step if origin is not None and origin.kind == "nonfinite_origin_backward" else None
    lost = [step.step == born or not isfinite(step.loss or 0.0) for step in report.steps]
    norms = [nan if bad and step.grad_norm is None else step.grad_norm for bad, step in zip(lost, report.steps, strict=True)]
    begun = onset(norms) if judged["now"] else None
    if begun is not None and not _is_older(report.steps, norms[:begun]):
        values["since"] = report.steps[begun].step
    if (first := events[0] if events else _first(report, kind)) is not None:
        values |= {
            "first_step": first.step,
            "kinds": first.text("kinds").replace("nan", "NaN").replace("inf", "infinite"),
            "layers": first.texts("layers"),
            "layers_affected": first.count("layers_affected"),
            "last": first.attributes.get("measured") is False,
        }
    values["steps"] = None if values.get("last") else report.count(catalog.GRAD_NONFINITE_STEPS) or None
    yield _newest(report, kind, scaled=scaled, **values, **judged)


def _vanished(report: RankView) -> Iterator[Finding]:
    kind = "gradient_vanishing"
    count, norms = report.counted.get(kind, 0), report.readings.distribution(catalog.GRAD_NORM_DISTRIBUTION)
    if count or kind in report.anomalies:
        measured, zero = max(report.measured_norms, count), report.value(catalog.GRAD_ZERO) or None
        yield _newest(report, kind, vanished=count, measured=measured, zero=zero, **_judged(report, kind))
    elif norms and norms.greatest == 0.0 and report.measured_norms == sum(norms.counts) >= LEAST_ZEROS:
        yield finding("zero_gradients", measured=report.measured_norms)


def _skips(report: RankView, collapsed: Finding | None) -> Iterator[Finding]:
    """Yield that a loss scaler skips every step, also at the end of a run, or many."""
    skipped, steps = report.count(catalog.AMP_STEPS_SKIPPED), report.count(catalog.STEPS)
    streak = report.value(catalog.AMP_SKIP_STREAK)
    if streak is None and collapsed is not None:
        yield collapsed
    elif is_stuck(streak or 0, report.scale):
        if report.scale is not None and report.scale < 1:
            yield finding("amp_scale_collapsed", scale=report.scale)
        else:
            yield finding("amp_skips", streak=int(streak or 0), up=report.up)
    elif skipped >= max(LEAST_SKIPPED, _MANY_SKIPPED * steps):
        yield finding("amp_many_skips", skipped=skipped, steps=steps)


def zero_learning_rate(zero_rate: ZeroRate) -> Finding:
    """Return the finding on a learning rate that is zero, or almost, in all parameter groups."""
    kind, everything = "tiny_learning_rate" if zero_rate.highest else "zero_learning_rate", zero_rate.first == 1
    rates: dict[str, Any] = {"rate": NEGLIGIBLE * zero_rate.highest, "highest": zero_rate.highest}
    since, before = None if everything else zero_rate.first, zero_rate.is_begun_before
    return finding(kind, all=everything, since=since, before=before, steps=zero_rate.steps, **rates)


def _diverged(report: RankView) -> Iterator[Finding]:
    """Yield that the loss has left its start for good (``detect.spikes``), or had left it and has come back."""
    kind = "diverged"
    judged = _judged(report, kind)
    if not judged["now"] and not judged["number"]:
        return
    steps = report.steps[model_begins(report.steps, len(report.steps) - 1) :] if report.steps else ()
    is_start = bool(steps) and (steps[0].step == 1 or steps[0].new_model)
    newest = _newest(report, kind, **judged)
    last = next((step for step in reversed(report.steps) if step.loss is not None), None)
    highest = max((step.learning_rate for step in steps[:WARM_UP] if step.learning_rate), default=None)
    values = {
        "back": not judged["now"],
        "start": newest.values.get("baseline"),
        "left": LEFT,
        "warm_up": WARM_UP,
        "last_step": last.step if last else None,
        "last_value": last.loss if last else None,
        "highest": highest if is_start else None,
    }
    yield newest._replace(values={**newest.values, **values})
