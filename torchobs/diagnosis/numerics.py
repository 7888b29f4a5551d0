"""Findings on loss, gradients and learning rate. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, isfinite, isnan
from statistics import median
from typing import NamedTuple

from torchobs import catalog
from torchobs.catalog.findings import Finding
from torchobs.detect.learning import NEGLIGIBLE, OTHER_GROUPS, is_stuck
from torchobs.detect.spikes import (
    LEAST_NORM_EXCESS,
    LEAST_RATES,
    LEAST_SCALE,
    LEFT,
    RATE_MEMORY,
    RATE_ROSE,
    START,
    WARM_UP,
    leaves_start,
)
from torchobs.diagnosis import text_format
from torchobs.diagnosis.from_events import activations, healthy_since, loop_mistakes, origins
from torchobs.diagnosis.health import ERROR, INFO, LEAST_NOTABLE, WARNING, stated, zero_learning_rate
from torchobs.diagnosis.rank_report import Fact, RankReport, Step, model_begins, zero_rate_of
from torchobs.diagnosis.status import StuckLayers, past_in, stuck_layers_in, stuck_layers_of

_BEFORE = RATE_MEMORY
"""Steps before a bad loss that are searched for its cause."""
_BASELINE = 200
_ALL_SINCE = 0.99
"""Tolerance, as the last steps may be counted and not in the file, or the other way round."""
_LEAST_BASELINE = LEAST_RATES
_GREW = 10.0
"""Growth of loss or norm within a run's first steps that counts as divergence: an order of magnitude."""
_MANY_SKIPPED = 0.05
"""Share of all steps. A healthy scaler doubles its scale every 2,000 steps, and skips one if that was too much."""

_STUCK = {
    "dead_units": "nothing but zeros comes into {at}, the units before it are dead{names}",
    "cut_off": "no gradient at all comes back to {at}, because of saturated or dead units behind it, or a part that is cut off "
    "from the loss{names}",
    "vanishing": "the gradient is tiny on its way back to {at}{names}",
    "no_gradient": "from step {step} on the optimizer gets no gradient for {at}{names}. The loss is cut off from the model "
    "(detach, item, no_grad, a new tensor of its value), or zero_grad() comes after backward(), or backward() is not called, "
    "or the model was copied or replaced after the optimizer was made, which has the old one's parameters",
}
"""Why layers learn nothing"""


class Rise(NamedTuple):
    """A value that rose in one step above its baseline."""

    step: int
    usual: float
    value: float

    @property
    def factor(self) -> float:
        """New value divided by the baseline."""
        return self.value / self.usual


def numerics(report: RankReport) -> Iterator[Finding]:
    """Yield numerical problems, the loss first."""
    lost, past = _onset(report.steps), past_in(report)
    if lost is not None:
        yield _nonfinite_loss(report, lost)
    elif any(report.value(catalog.ANOMALIES, kind) for kind in ("gradient_explosion", "loss_spike", "nonfinite_loss")):
        yield from _spikes(report, past)
    yield from learning_rate(report)
    yield from origins(report, past)
    yield from _layers(report, past)
    yield from _vanished(report, past)
    yield from _unmoved(report)
    yield from _scaler(report)
    yield from _scheduler(report)
    yield from loop_mistakes(report)
    yield from activations(report)
    for fact in report.events_named(catalog.EVENT_DEVICE_UNREAD)[:1]:
        kind = fact.text("device_type")
        yield stated(INFO, "device_unread", f"Loss and gradient norm were not recorded: torch copies no value from {kind}.")


def _onset(steps: Sequence[Step]) -> int | None:
    """Return the index of the step from which on all losses are non-finite; ``None`` if the last one is finite."""
    onset = None
    for index in range(len(steps) - 1, -1, -1):
        loss = steps[index].loss
        if loss is not None and isfinite(loss):
            break
        onset = index if loss is not None else onset
    return onset


def _nonfinite_loss(report: RankReport, onset: int) -> Finding:
    steps, step = report.steps, report.steps[onset]
    first = all(before.loss is None for before in steps[:onset])
    name = "NaN" if step.loss is None or isnan(step.loss) else "infinite"
    if first and step.step > 1:
        return stated(ERROR, "nonfinite_loss", _long_ago(report, step, name))
    if first:
        return stated(ERROR, "nonfinite_loss", f"The loss was {name} from the first step on{_with_rate(step)}.")
    text, note = f"The loss turned {name} in step {step.step:,}{_cause(steps, onset)}", _rate_note(steps, onset)
    text += "." if note else f"{_with_rate(step)}."
    wasted = steps[-1].step - step.step
    after = f" It trained on for {text_format.plural(wasted, 'step')} with it." if wasted else ""
    return stated(ERROR, "nonfinite_loss", f"{text}{note}{after}")


def _long_ago(report: RankReport, step: Step, name: str) -> str:
    """Return since when, if the steps of that time are no longer in the file."""
    told = (fact for fact in report.events_named(catalog.EVENT_ANOMALY) if fact.text("kind") == "nonfinite_loss")
    first, count = next(told, None), report.value(catalog.ANOMALIES, "nonfinite_loss") or 0
    since = report.last_step - first.step + 1 if first is not None and first.step is not None else 0
    # all losses since the first event have to have been so
    if first is None or first.step is None or not _ALL_SINCE * count <= since <= count / _ALL_SINCE:
        return f"The loss has been {name} since step {step.step:,} or before: older steps are gone from the file."
    usual, wasted = text_format.number(first.number("baseline")), text_format.plural(report.last_step - first.step, "step")
    return f"The loss turned {name} in step {first.step:,}, where {usual} was usual. It trained on for {wasted} with it."


def _cause(steps: Sequence[Step], onset: int) -> str:
    """Return how the gradient behaved before the loss became non-finite."""
    begin = max(model_begins(steps, onset), onset - _BEFORE)
    step, before = steps[onset], steps[begin:onset]
    odd = next(
        (item for item in before if item.grad_norm is not None and not isfinite(item.grad_norm) and not item.skipped), None
    )
    if odd is not None:
        ago = text_format.plural(step.step - odd.step, "step")
        return f", {ago} after its gradient was not finite while the loss still was {text_format.number(odd.loss)}"
    if (rise := norm_rise(steps, onset)) is not None:
        later = step.step - rise.step
        when = f"{text_format.plural(later, 'step')} after" if later else "as"
        return f", {when} the gradient norm rose {_from_to(rise)}"
    measured = [item for item in steps[begin : onset + 1] if item.grad_norm is not None and isfinite(item.grad_norm)]
    if not measured:
        return ""
    since = step.step - measured[-1].step
    if since <= 1:
        return " without a warning in the gradient norm"
    return f", {since:,} steps after the gradient norm was last measured ({text_format.number(measured[-1].grad_norm)})"


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


def _rate_note(steps: Sequence[Step], end: int) -> str:
    rise = rate_rise(steps, end)
    if rise is None:
        return _suspect(steps, end)
    return f" The learning rate had risen {_from_to(rise)} in step {rise.step:,}."


def _suspect(steps: Sequence[Step], end: int) -> str:
    """Return that the learning rate may have been wrong from the start, if values diverged within the first steps."""
    begin = model_begins(steps, end)
    first = steps[begin : end + 1]
    rate = max((step.learning_rate for step in first if step.learning_rate), default=None)  # a warm-up begins near 0
    if rate is None or first[0].step != 1 or len(first) > WARM_UP or not (_grew(first, "loss") or _grew(first, "grad_norm")):
        return ""
    return f" It diverged within its first {WARM_UP} steps: the learning rate, {text_format.number(rate)}, is a suspect."


def _grew(steps: Sequence[Step], field: str) -> bool:
    """Return True if a value grew to ten times its first."""
    values = [value for step in steps if (value := getattr(step, field)) is not None and isfinite(value)]
    return bool(values) and max(values) >= _GREW * max(abs(values[0]), LEAST_SCALE)


def _from_to(rise: Rise) -> str:
    return f"{text_format.fold(rise.factor)} (from {text_format.number(rise.usual)} to {text_format.number(rise.value)})"


def _with_rate(step: Step) -> str:
    return "" if step.learning_rate is None else f"; the learning rate was {text_format.number(step.learning_rate)}"


def _spikes(report: RankReport, past: Mapping[str, int]) -> Iterator[Finding]:
    """Yield loss spikes and explosions, with their causes, if the last loss was finite."""
    told, told_of_rate = report.events_named(catalog.EVENT_ANOMALY), ""
    for kind, what in (("gradient_explosion", "The gradient norm"), ("loss_spike", "The loss")):
        count = int(report.value(catalog.ANOMALIES, kind) or 0)
        first = next((fact for fact in told if fact.text("kind") == kind), None)
        if not count or first is None or first.step is None:
            continue
        value, usual = text_format.number(first.number("value")), text_format.number(first.number("baseline"))
        again = _again(report, first.step, count - 1, "grad_norm" if kind == "gradient_explosion" else "loss")
        note = _rate_note(report.steps, _index(report.steps, first.step))
        known = "" if note == told_of_rate else note
        told_of_rate = note
        # single ones are ordinary, unless the learning rate explains them
        severity = WARNING if (note or count >= LEAST_NOTABLE[kind]) and kind not in past else INFO
        text = f"{what} rose in step {first.step:,} to {value}, usual was {usual}{again}.{_layer(first)}{known}"
        yield stated(severity, kind, text + healthy_since(past.get(kind)))
    count = int(report.value(catalog.ANOMALIES, "nonfinite_loss") or 0)
    if count:
        then = "and recovered" if _recovered(report, count) else "and whether it recovered is not in this part of the file"
        text = f"The loss was not finite in {text_format.plural(count, 'step')}, {then}."
        severity = INFO if "nonfinite_loss" in past else WARNING
        yield stated(severity, "nonfinite_loss", text + healthy_since(past.get("nonfinite_loss")))


def _layer(fact: Fact) -> str:
    """Return the layer whose gradient had grown most in that step, if it is known."""
    layer = fact.text("layer")
    norms = text_format.number(fact.number("layer_norm")), text_format.number(fact.number("layer_usual"))
    return f" The gradient of layer {layer} grew most: {norms[0]}, usual was {norms[1]}." if layer else ""


def _recovered(report: RankReport, count: int) -> bool:
    """Return True if the last loss was finite, as far as known: records may be missing."""
    if not report.partial:
        return True
    seen = [step for step in report.steps if step.loss is not None]
    odd = sum(step.loss is not None and not isfinite(step.loss) for step in seen)
    return bool(seen) and (seen[-1].step >= report.last_step or odd >= count)


def _again(report: RankReport, step: int, more: int, field: str) -> str:
    """Return in how many later steps it recurred, of those with a measurement: fewer have a norm than a loss."""
    if not more:
        return ""
    later = [each for each in report.steps if each.step > step]
    measured = sum(getattr(each, field) is not None for each in later)
    whole = bool(report.steps) and report.steps[0].step <= step + 1 and more <= measured and not report.partial
    of = f"of the {measured:,} later steps" if whole else "later steps"
    what = "a measured gradient norm" if field == "grad_norm" else "a measured loss"
    return f"; so it did in {more:,} more {of} with {what}"


def _index(steps: Sequence[Step], number: int) -> int:
    return next((index for index, step in enumerate(steps) if step.step >= number), len(steps) - 1)


def _layers(report: RankReport, past: Mapping[str, int]) -> Iterator[Finding]:
    """Yield the layers where gradients first became non-finite."""
    told = report.events_named(catalog.EVENT_NONFINITE_GRADIENT)
    if not told:
        return
    first, scaled = told[0], bool(report.by_attribute(catalog.AMP_SCALE))
    affected = first.count("layers_affected")
    names = first.texts("layers", 3, 80)
    more = f" and {affected - len(names):,} more" if affected > len(names) else ""
    where = f", in {'layer' if affected == 1 else 'layers'} {', '.join(names)}{more}" if names else ""
    step = f" in step {first.step:,}" if first.step is not None else ""
    steps = int(report.value(catalog.GRAD_NONFINITE_STEPS) or 0)
    word = " first" if _measured(report.steps, first.step) else ""
    text = f"Gradients were {_kinds(first)}{word}{step}{where}; in {text_format.plural(steps, 'measured step')} in all."
    if first.attributes.get("measured") is False:
        text = f"Gradients were {_kinds(first)}{step}, the last that it began{where}."
    elif not word:
        text += " The steps before it were not measured."
    hint = " With a loss scaler a few such steps are ordinary: it skips them." if scaled else ""
    hint += healthy_since(past.get("nonfinite_gradient"))
    severity = INFO if scaled or "nonfinite_gradient" in past else WARNING
    yield stated(severity, "nonfinite_gradient", text + hint)


def _measured(steps: Sequence[Step], number: int | None) -> bool:
    """Return False if the steps just before that one have no gradient norm: it may have been the same in them."""
    before = [step for step in steps if step.step == (number or 0) - 1]
    return not before or before[0].grad_norm is not None


def _kinds(fact: Fact) -> str:
    return fact.text("kinds").replace("nan", "NaN").replace("inf", "infinite") or "not finite"


def _vanished(report: RankReport, past: Mapping[str, int]) -> Iterator[Finding]:
    count = int(report.value(catalog.ANOMALIES, "gradient_vanishing") or 0)
    zero = report.value(catalog.GRAD_ZERO) or 0.0
    if count:
        zeros = f" At the end {text_format.percent(zero)} of the parameters had gradients of exactly zero." if zero else ""
        zeros += " Is zero_grad(set_to_none=False) called after backward()?" if zero >= 1.0 else ""
        steps = text_format.plural(count, "step")
        of = f"the {report.norms:,} measured" if report.norms >= count else "those measured"
        text = f"The gradient norm was vanishingly small, or zero, in {steps} of {of}.{zeros}"
        severity = INFO if "gradient_vanishing" in past else WARNING
        yield stated(severity, "gradient_vanishing", text + healthy_since(past.get("gradient_vanishing")))


def _unmoved(report: RankReport) -> Iterator[Finding]:
    """Yield the layers that have not changed, by cause; as information those that may be unused on purpose."""
    for fact in report.events_named(catalog.EVENT_UNMOVED_LAYERS):
        if fact.text("cause") == "unused":
            unused = stuck_layers_in(fact)._replace(at="")
            layers = text_format.plural(unused.layers, "layer") + " of the optimizer"
            text = f"{layers} had got no gradient by step {fact.step or 0:,}{_names(unused)}"
            yield stated(INFO, "unmoved_layers", f"{text}: unused, or cut off from the loss (detach, no_grad).")
    stuck = stuck_layers_of(report.events)
    if not stuck:
        return
    causes = [_STUCK[one.cause].format(at=one.at, names=_names(one), step=f"{one.step or 0:,}") for one in stuck]
    count, total = sum(one.layers for one in stuck), max(one.total for one in stuck)
    text = f"{count:,} of {text_format.plural(total, 'layer')} learned nothing: {'; '.join(causes)}."
    yield stated(WARNING, "unmoved_layers", text)


def _names(stuck: StuckLayers) -> str:
    """Return the names of the first of these layers in parentheses, unless the sentence names them all."""
    more = f" and {stuck.layers - len(stuck.names):,} more" if stuck.layers > len(stuck.names) else ""
    return "" if stuck.names == (stuck.at,) else f" ({', '.join(stuck.names)}{more})"


def _scaler(report: RankReport) -> Iterator[Finding]:
    skipped = int(report.value(catalog.AMP_STEPS_SKIPPED) or 0)
    streak, steps = report.value(catalog.AMP_SKIP_STREAK) or 0, int(report.value(catalog.STEPS) or 0)
    least = min(report.by_attribute(catalog.AMP_SCALE).values(), default=None)
    if report.events_named(catalog.EVENT_AMP_SCALE_COLLAPSED):
        text = f"The loss scale collapsed (it ended at {text_format.number(least)}): no scale makes the gradients finite."
        yield stated(ERROR, "amp_scale_collapsed", text)
    elif is_stuck(streak, least):
        text = f"The loss scaler skipped the last {text_format.plural(int(streak), 'step')}: nothing was learned in them."
        yield stated(WARNING, "amp_skips", text)
    elif skipped and skipped >= _MANY_SKIPPED * steps:
        yield stated(WARNING, "amp_skips", f"The loss scaler skipped {text_format.plural(skipped, 'step')} of {steps:,}.")
    for fact in report.events_named(catalog.EVENT_AMP_CLIPPED_SCALED)[:1]:
        limit, scale = text_format.number(fact.number("limit")), text_format.number(fact.number("scale"))
        text = f"Gradients were clipped by norm before scaler.unscale_(optimizer): to {limit} over the loss scale, {scale}."
        yield stated(WARNING, "clipped_scaled", text)
    if report.events_named(catalog.EVENT_AMP_UNSCALED):
        yield stated(
            WARNING, "amp_unscaled", "It trained in float16 autocast without a GradScaler: small gradients became zero."
        )


def _scheduler(report: RankReport) -> Iterator[Finding]:
    how = {
        "before_optimizer": "was stepped before the optimizer, so that its first value was never used",
        "never_stepped": "was never stepped: the learning rate does not follow it",
        "idle_optimizer": "belongs to an optimizer that does not step",
    }
    for fact in report.events_named(catalog.EVENT_SCHEDULER_MISUSED)[:3]:
        text = how.get(fact.text("kind"), "was used wrongly")
        yield stated(WARNING, "scheduler_misused", f"A scheduler ({fact.text('scheduler') or 'unknown'}) {text}.")


def learning_rate(report: RankReport) -> Iterator[Finding]:
    """Yield what is wrong with the learning rate."""
    yield from _too_high(report)
    found = zero_rate_of(report)
    others = {group: rate for group, rate in report.by_attribute(catalog.LEARNING_RATE).items() if group != "0"}
    if found is not None and len(others) < OTHER_GROUPS and all(rate <= NEGLIGIBLE * found.highest for rate in others.values()):
        yield zero_learning_rate(found)


def _too_high(report: RankReport) -> Iterator[Finding]:
    """Yield that the loss has left its start for good (``detect.spikes``)."""
    if not report.value(catalog.ANOMALY_ACTIVE, "diverged"):
        return
    steps = report.steps[model_begins(report.steps, len(report.steps) - 1) :] if report.steps else ()
    is_start = bool(steps) and (steps[0].step == 1 or steps[0].new_model)
    told = [fact for fact in report.events_named(catalog.EVENT_ANOMALY) if fact.text("kind") == "diverged"]
    first = text_format.number(told[-1].number("baseline")) if told else "its first value"
    text = f"The loss rose from {first} to {LEFT:g} times that or more within its first {WARM_UP} steps, and has not come back"
    last = next((step for step in reversed(report.steps) if step.loss is not None), None)
    value = f": in step {last.step:,} it was {text_format.number(last.loss)}" if last is not None else ""
    rate = max((step.learning_rate for step in steps[:WARM_UP] if step.learning_rate), default=None) if is_start else None
    suspect = f" The learning rate, {text_format.number(rate)}, is a suspect." if rate is not None else ""
    yield stated(WARNING, "diverged", f"{text}{value}.{suspect}")
