"""Findings on where values that are not finite were born. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torchobs import catalog
from torchobs.diagnosis.health import ERROR, INFO, Finding
from torchobs.diagnosis.rank_report import Fact, RankReport
from torchobs.diagnosis.status import summary_of

_INSIDE = "Its operators keep nothing by name: torchobs.debug.trace_nan(model, batch) runs them one by one, and names one."
_NAMES_OPERATOR = 'torchobs.debug.context("step", anomaly="warn") around a step names the operator and the line.'
_LIKELY = "most likely: "
"""How a note begins that is known by the graph's structure alone (``probes.nonfinite.causes.LIKELY``)"""
_INFINITE = {
    "at 0": {"sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "xlogy", "special_xlogy", "hypot"},
    "at 0, if its exponent is below 1": {"pow"},
    "at 1 and -1": {"acos", "asin", "atanh"},
    "at 1": {"acosh"},
    "at -1": {"log1p"},
    "at 0 and 1": {"logit", "special_logit"},
    "where its divisor is 0": {"div"},
}
"""Operators by where their derivative is infinite, or undefined"""
_WITHIN_STEP = "an optimizer had stepped in this step already"
"""Note on a parameter that this optimizer may have spoiled (``probes.nonfinite.origin.WITHIN_STEP``)"""
_REFUSED = "refused by torch, in a forward pass without a graph"
"""Note on a variable (``probes.nonfinite.origin.REFUSED``)"""
_UNNAMED = "unnamed"
"""A parameter that neither a module nor a variable holds (``probes.nonfinite.origin.UNNAMED``)"""
_REGIONS = {"compiled_function": "a compiled region", "checkpoint_function": "a checkpointed region"}
"""Nodes of the graph that stand for many operators (``probes.nonfinite.operators.OPAQUE``)"""


def origins(report: RankReport, past: Mapping[str, int]) -> Iterator[Finding]:
    """Yield where values that are not finite were born. ``past``: kinds of anomalies that the training has recovered from."""
    kinds = {kind for kind in ("nonfinite_loss", "nonfinite_gradient") if report.value(catalog.ANOMALIES, kind)}
    if report.value(catalog.AMP_STEPS_SKIPPED):
        kinds.discard("nonfinite_gradient")  # part of normal loss scaling
    is_past = bool(kinds) and kinds <= past.keys() and not summary_of(report.events).spoiled
    healthy = healthy_since(min(past[kind] for kind in kinds)) if is_past else ""
    for fact in report.events_named(catalog.EVENT_NONFINITE_ORIGIN)[:3]:
        yield Finding(INFO if is_past else ERROR, "nonfinite_origin", _sentences(fact) + healthy)


def healthy_since(steps: int | None) -> str:
    """Return in words that an anomaly is past; empty if it is not."""
    return f" It is past: the last {steps:,} steps were healthy." if steps else ""


def source(ranks: Sequence[RankReport]) -> RankReport | None:
    """Return the rank from which others had a NaN or infinity in averaged gradients, and which knows where it was born."""
    first = [(report, report.events_named(catalog.EVENT_NONFINITE_ORIGIN)[:1]) for report in ranks]
    origins_of = {report.rank: fact.text("origin") for report, facts in first for fact in facts}
    if "rank" not in origins_of.values():
        return None
    return next((report for report in ranks if origins_of.get(report.rank, "rank") != "rank"), None)


def _sentences(fact: Fact) -> str:
    origin, operator, name = fact.text("origin"), fact.text("operator", 80), fact.text("parameter", 120)
    step = f" of step {fact.step:,}" if fact.step is not None else ""
    if origin == "rank":
        return f"The NaN or infinity{step} came, in averaged gradients, from {fact.text('note', 80)}."
    if origin == "unknown" and name:
        names = f"{name} {fact.text('note', 80)}"
        return f"Parameters ({names}) were NaN or infinite before step {fact.step or 0:,}; what made them so was not seen."
    if origin == "backward" and name and not operator:
        return f"The NaN or infinity{step} came with the gradient of {name}: {fact.text('note', 200)}. {_NAMES_OPERATOR}"
    if origin == "overflow":
        return _overflow(name, fact.text("note", 80), step)
    if origin == "optimizer":
        why = fact.text("note", 120)
        return f"The NaN or infinity{step} was made by the optimizer ({operator}), of finite gradients, in {name}: {why}."
    return _born(fact, step, operator, name)


def _born(fact: Fact, step: str, operator: str, name: str) -> str:
    """Return the operator, or what went into it, where they were born."""
    origin, module, line = fact.text("origin"), fact.text("module", 120), fact.text("location", 200)
    made_by = _REGIONS.get(operator, operator)
    where = f"{made_by} in {module}" if module else f"{made_by}, outside of any module"
    at = f" ({line})" if line else ""
    if origin == "unknown":
        why = fact.text("note", 120)
        return f"Where the NaN or infinity{step} began was not found: it passed {where}{at}{f'; {why}' if why else ''}."
    sample = f", in sample {fact.count('sample')}" if "sample" in fact.attributes else ""
    parameter = "a parameter of no module" if name == _UNNAMED else f"the parameter {name}"
    note = fact.text("note", 300)
    is_likely = note.startswith(_LIKELY) or (origin == "backward" and bool(note))  # of a node seen at work there is no note
    likely, why = "most likely " if is_likely else "", note.removeprefix(_LIKELY)
    told = {
        "input": f"in the input{f' {name}' if name else ''}{sample}; it went into {where}",
        "parameter": f"in {parameter}, before {'this loss' if fact.text('note') == _WITHIN_STEP else 'the step'}",
        "backward": f"in the derivative of {where}",
    }.get(origin, f"in {where}")
    text = f"The NaN or infinity{step} was {likely}born {told}{at}."
    if fact.text("note") == _REFUSED:
        seen = f"{name}{sample}{at}, the outermost variable that held it"
        text = f"The NaN or infinity{step} was seen in {seen}; {operator} refused what came of it."
    if origin == "backward":
        infinite = next((where for where, operators in _INFINITE.items() if operator in operators), "")
        return f"{text} That derivative is infinite {infinite}." if infinite else text
    if origin != "operator":
        return text
    if operator in _REGIONS:
        return f"{text} {_INSIDE}"
    return f"{text[:-1]}: {why}{'' if why.endswith('?') else '.'}" if why else text


def _overflow(name: str, note: str, step: str) -> str:
    """Return the sentence on gradients that did not fit into float16, with the remedy."""
    where = f"{name} {note}" if note else name
    cause = "the largest number there is 65,504, and no loss scaler was used"
    remedy = "Scale the loss (torch.amp.GradScaler, with weights in float32), or train in bfloat16."
    return f"The NaN or infinity{step} is most likely gradients that overflowed in float16, in {where}: {cause}. {remedy}"
