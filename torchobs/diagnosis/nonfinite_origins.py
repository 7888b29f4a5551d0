"""Findings on where values that are not finite were born. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torchobs import catalog
from torchobs.diagnosis.health import ERROR, INFO, Finding
from torchobs.diagnosis.rank_report import Fact, RankReport
from torchobs.diagnosis.status import summary_of

_RUN_TRACE = "Run `debug.trace_nan(model, batch)`."
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
_OTHER_RANKS = "on this rank or another: gradients are averaged"
"""Note on a likely operator (``probes.nonfinite.origin.OTHER_RANKS``)"""
_UNNAMED = "unnamed"
"""A parameter that neither a module nor a variable holds (``probes.nonfinite.origin.UNNAMED``)"""
_REGIONS = {"compiled_function": "compiled region", "checkpoint_function": "checkpointed region"}
"""Nodes of the graph that stand for many operators (``probes.nonfinite.graph.OPAQUE``)"""


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
    """Return the rank that saw first where a NaN or infinity was born: averaged gradients bring it to all of them.

    A rank that found it in its parameters, or nowhere, has not seen it.
    """
    first = [(facts[0], report) for report in ranks if (facts := report.events_named(catalog.EVENT_NONFINITE_ORIGIN))]
    seen = [(fact.step or 0, report) for fact, report in first if fact.text("origin") not in {"unknown", "parameter"}]
    return min(seen, key=lambda pair: pair[0])[1] if seen else None


def _sentences(fact: Fact) -> str:
    origin, operator, name = fact.text("origin"), fact.text("operator", 80), fact.text("parameter", 120)
    step = f" of step {fact.step:,}" if fact.step is not None else ""
    if origin == "unknown" and name:
        names, when = f"{name} {fact.text('note', 80)}".rstrip(), f" in step {fact.step:,}" if fact.step is not None else ""
        return f"Parameters ({names}) were NaN or infinite already{when}; what made them so was not seen."
    if origin == "parameter":
        parameter = "A parameter of no module" if name == _UNNAMED else f"The parameter {name}"
        return f"{parameter} held the NaN or infinity{step} already; what made it so was not seen."
    if origin == "overflow":
        return _overflow(name, fact.text("note", 80), step)
    return _born(fact, step, operator, name)


def _born(fact: Fact, step: str, operator: str, name: str) -> str:
    """Return the operator, or what went into it, where they were born."""
    origin, module, line = fact.text("origin"), fact.text("module", 120), fact.text("location", 200)
    where = f"{operator} in {module}" if module else f"{operator}, outside of any module"
    at = f" ({line})" if line else ""
    if operator in _REGIONS and origin in {"unknown", "backward"}:
        within = "the backward pass of " if origin == "backward" else ""
        later = " or a later one" if origin == "unknown" and fact.text("note", 120) else ""
        region = f"{within}{_REGIONS[operator]} {module}".rstrip()
        return f"The NaN or infinity{step} appeared inside {region}{at}{later}. {_RUN_TRACE}"
    if origin == "unknown" and fact.text("note") == _OTHER_RANKS:
        return f"Where the NaN or infinity{step} began was not found: perhaps in the derivative of {where}{at}, {_OTHER_RANKS}."
    if origin == "unknown":
        why = fact.text("note", 120)
        return f"Where the NaN or infinity{step} began was not found: it passed {where}{at}{f'; {why}' if why else ''}."
    sample = f", in sample {fact.count('sample')}" if "sample" in fact.attributes else ""
    note = fact.text("note", 300)
    likely = "most likely " if origin == "backward" and note else ""  # of a node seen at work there is no note
    told = {
        "input": f"in the input{f' {name}' if name else ''}{sample}; it went into {where}",
        "backward": f"in the derivative of {where}",
    }.get(origin, f"in {where}")
    text = f"The NaN or infinity{step} was {likely}born {told}{at}."
    if origin == "backward":
        infinite = next((where for where, operators in _INFINITE.items() if operator in operators), "")
        return f"{text} That derivative is infinite {infinite}." if infinite else text
    if origin != "operator":
        return text
    return f"{text[:-1]}: {note}{'' if note.endswith('?') else '.'}" if note else text


def _overflow(name: str, note: str, step: str) -> str:
    """Return the sentence on gradients that did not fit into float16, with the remedy."""
    where = f"{name} {note}" if note else name
    cause = "the largest number there is 65,504, and no loss scaler was used"
    remedy = "Scale the loss (torch.amp.GradScaler, with weights in float32), or train in bfloat16."
    return f"The NaN or infinity{step} is most likely gradients that overflowed in float16, in {where}: {cause}. {remedy}"
