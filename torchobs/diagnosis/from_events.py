"""Findings that an event makes: mistakes of the loop, origins of NaN and infinity, outputs of layers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torchobs import catalog
from torchobs.catalog.findings import Finding
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import ERROR, INFO, UNTIL_A_STEP, WARNING, stated
from torchobs.diagnosis.rank_report import Fact, RankReport
from torchobs.diagnosis.status import mistakes_of, summary_of

_NAMED = 3
_HOW = {
    "gradients_kept": "Gradients were never set to zero (optimizer.zero_grad()): each step used the sum of all before it.",
    "evaluation_mode": "From step {step} or earlier on it trained in evaluation mode, without dropout, and batch normalisation "
    "as it was: model.train() was not called again.",
    "never_stepped": "There were {passes} backward passes or more, and no step of the optimizer ({optimizer}): "
    "optimizer.step() is missing.",
    "clipped_late": "Gradients were clipped after the optimizer's step, which had used them as they were, and were then set to "
    "zero: nothing was clipped. clip_grad_norm_ belongs between backward() and step().",
    "losses_kept": "Losses were kept with their graphs (losses.append(loss), total += loss), or outputs were: memory grows "
    "with each step. Keep loss.item() or loss.detach().",
    "same_order": "After step {step} an epoch had the samples in the order of those before it, and each rank the same part of "
    "them: the DistributedSampler is to shuffle, and its set_epoch(epoch) was not called before the epoch.",
}
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
"""Nodes of the graph that stand for many operators (``tensors.graph.OPAQUE``)"""
_WHY = {
    "compiled": "in a module that torch.compile has compiled",
    "silent": "not called as modules: in a compiled function, or of a model that is not trained any more",
    "left_out": "more than have series",
}


def loop_mistakes(report: RankReport) -> Iterator[Finding]:
    """Yield what is wrong with the loop."""
    known = {*mistakes_of(report.events)} - (UNTIL_A_STEP if report.last_step else set())
    for fact in report.events_named(catalog.EVENT_LOOP_MISTAKE):
        text = _HOW.get(fact.text("kind"))
        if text is not None and fact.text("kind") in known:
            said = text.format(
                step=f"{fact.step or 0:,}",
                optimizer=fact.text("optimizer", 80),
                passes=f"{fact.count('backward_passes'):,}",
            )
            yield stated(WARNING, fact.text("kind"), said)
    for fact in report.events_named(catalog.EVENT_LEFT_OUT_PARAMETERS)[-1:]:
        if not fact.count("parameters_affected"):
            break  # trained since then
        are = "is" if fact.count("parameters_affected") == 1 else "are"
        optimizer = fact.text("optimizer", 80)
        where = (
            f"of an optimizer ({optimizer}) that had not stepped by step {fact.step or 0:,}" if optimizer else "in no optimizer"
        )
        question = " Is its step() missing?" if optimizer else ""
        text = f"{_parameters(fact)} got gradients but {are} {where}: nothing was learned there.{question}"
        yield stated(WARNING, "left_out", text)
    for fact in report.events_named(catalog.EVENT_OTHER_THREAD)[:1]:
        thread = fact.text("thread", 40)
        text = f"Two threads trained at the same time: steps of thread {thread} are not recorded, nor in any number here."
        yield stated(WARNING, "other_thread", text)


def _parameters(fact: Fact) -> str:
    """Return the number of parameters that an event is about, and the names of the first."""
    count, names = fact.count("parameters_affected"), fact.texts("parameters", _NAMED, 80)
    more = f" and {count - len(names):,} more" if count > len(names) else ""
    return text_format.plural(count, "parameter") + (f" ({', '.join(names)}{more})" if names else "")


def origins(report: RankReport, past: Mapping[str, int]) -> Iterator[Finding]:
    """Yield where values that are not finite were born. ``past``: kinds of anomalies that the training has recovered from."""
    kinds = {kind for kind in ("nonfinite_loss", "nonfinite_gradient") if report.value(catalog.ANOMALIES, kind)}
    if report.value(catalog.AMP_STEPS_SKIPPED):
        kinds.discard("nonfinite_gradient")  # part of normal loss scaling
    is_past = bool(kinds) and kinds <= past.keys() and not summary_of(report.events).spoiled
    healthy = healthy_since(min(past[kind] for kind in kinds)) if is_past else ""
    for fact in report.events_named(catalog.EVENT_NONFINITE_ORIGIN)[:3]:
        yield stated(INFO if is_past else ERROR, "nonfinite_origin", _sentences(fact) + healthy)


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


def activations(report: RankReport) -> Iterator[Finding]:
    """Yield which layers were not looked at, and those with dead units."""
    for fact in report.events_named(catalog.EVENT_ACTIVATIONS)[-1:]:
        missing = {name: fact.count(name) for name in _WHY if fact.count(name)}
        every = fact.count("layers") + sum(missing.values())
        if missing:
            why = text_format.joined([f"{count:,} {_WHY[name]}" for name, count in missing.items()])
            text = f"What {sum(missing.values()):,} of {every:,} layers put out was not looked at: {why}."
            yield stated(INFO, "activations_unread", text)
    dead = report.events_named(catalog.EVENT_DEAD_UNITS)
    if dead:
        layers = [f"{each.count('units_dead'):,} of {each.count('units'):,} units of {each.text('layer')}" for each in dead]
        steps = text_format.plural(max(each.count("steps") for each in dead), "step")
        text = f"Dead units: {text_format.joined(layers, 3)} gave zero for every sample of up to {steps}, and learn nothing."
        yield stated(WARNING, "dead_units", text)
