"""Findings on the learning rate: too high from the start, or zero for a part of the run. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import fmean

from torchobs import catalog
from torchobs.detect.divergence import LEFT, are_long, ended_away
from torchobs.detect.spikes import WARM_UP
from torchobs.detect.zero_rates import NEGLIGIBLE, OTHER_GROUPS
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import WARNING, Finding, zero_learning_rate
from torchobs.diagnosis.rank_report import RankReport, Step, model_begins, zero_rate_of


def learning_rate(report: RankReport) -> Iterator[Finding]:
    """Yield what is wrong with the learning rate."""
    yield from _too_high(report)
    yield from _zero(report)


def _too_high(report: RankReport) -> Iterator[Finding]:
    """Yield that the loss has left its start for good (``detect.divergence``), or did until the run's end."""
    steps = report.steps[model_begins(report.steps, len(report.steps) - 1) :] if report.steps else ()
    is_start = bool(steps) and (steps[0].step == 1 or steps[0].new_model)
    if report.value(catalog.ANOMALY_ACTIVE, "diverged"):
        told = [fact for fact in report.events_named(catalog.EVENT_ANOMALY) if fact.text("kind") == "diverged"]
        first = text_format.number(told[-1].number("baseline")) if told else "its first value"
    elif is_start and report.reason and _ended_away(steps):
        first = text_format.number(steps[0].loss)
    else:
        return
    text = f"The loss rose from {first} to {LEFT:g} times that or more within its first {WARM_UP} steps, and has not come back"
    last = next((step for step in reversed(report.steps) if step.loss is not None), None)
    value = f": in step {last.step:,} it was {text_format.number(last.loss)}" if last is not None else ""
    rate = max((step.learning_rate for step in steps[:WARM_UP] if step.learning_rate), default=None) if is_start else None
    suspect = f" The learning rate, {text_format.number(rate)}, is a suspect." if rate is not None else ""
    yield Finding(WARNING, "diverged", f"{text}{value}.{suspect}")


def _ended_away(steps: Sequence[Step]) -> bool:
    """Return True for all steps of a model if their losses ended far from the first, and the steps were long enough for it."""
    losses = [step.loss for step in steps if step.loss is not None]
    if len(losses) < len(steps) or not all(map(isfinite, losses)) or not ended_away(losses):
        return False
    rates = [step.learning_rate for step in steps if step.learning_rate is not None]
    norms = [step.grad_norm for step in steps if step.grad_norm is not None]
    late = norms[-max(1, len(norms) // 4) :]
    square = fmean(norm * norm for norm in late) if late else None
    return are_long(losses[-1], fmean(rates) if rates else None, square)


def _zero(report: RankReport) -> Iterator[Finding]:
    """Yield that the learning rate of all parameter groups is zero, or next to it, since some step."""
    found = zero_rate_of(report)
    others = {group: rate for group, rate in report.by_attribute(catalog.LEARNING_RATE).items() if group != "0"}
    if found is not None and len(others) < OTHER_GROUPS and all(rate <= NEGLIGIBLE * found.highest for rate in others.values()):
        yield zero_learning_rate(found)
