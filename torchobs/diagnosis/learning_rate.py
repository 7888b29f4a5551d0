"""Findings on the learning rate: too high from the start, or zero for a part of the run. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from torchobs import catalog
from torchobs.detect.spikes import LEAST_SCALE, WARM_UP
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import WARNING, Finding
from torchobs.diagnosis.rank_report import RankReport, Step, model_begins

_LEFT, _NEAR = 10.0, 2.0
"""Factors on the first loss, which is that of an untrained model: above the one, within the first steps, a loss has left its
start; below the other it has come back. A policy gradient's loss is as long as its episodes: it may leave its start, and comes
back with each short one."""
_LEAST_AFTER = 50
"""Steps after that without a return"""
_LEAST_ZEROS, _ZEROS_SHARE = 20, 0.05
"""Steps, and their share of all, with a rate of zero at the end: a schedule may end there, and its last steps are few"""
_OTHER_GROUPS = 7
"""Most parameter groups of which the rate is recorded, besides the first (``catalog.GROUP``): there may be more"""


def learning_rate(report: RankReport) -> Iterator[Finding]:
    """Yield what is wrong with the learning rate."""
    yield from _too_high(report)
    yield from _zero(report)


def _too_high(report: RankReport) -> Iterator[Finding]:
    """Yield a loss that rose tenfold within the first steps of the model, and never came near its first value again."""
    steps = report.steps[model_begins(report.steps, len(report.steps) - 1) :]
    told = [step for step in steps if step.loss is not None]
    if not told or not (steps[0].step == 1 or steps[0].new_model):
        return
    start = max(abs(told[0].loss or 0.0), LEAST_SCALE)
    left = next((index for index, step in enumerate(told[:WARM_UP]) if (step.loss or 0.0) >= _LEFT * start), None)
    after = told[left + 1 :] if left is not None else []
    if left is None or len(after) < _LEAST_AFTER or not all(_NEAR * start <= (step.loss or 0.0) < inf for step in after):
        return
    values = [text_format.number(step.loss) for step in (told[0], told[left], told[-1])]
    rose = f"The loss rose from {values[0]} in step {told[0].step:,} to {values[1]} in step {told[left].step:,}"
    text = f"{rose}, and never came back: in step {told[-1].step:,} it was {values[2]}."
    rate = next((step.learning_rate for step in told[: left + 1] if step.learning_rate), None)
    suspect = f" The learning rate, {text_format.number(rate)}, is a suspect." if rate is not None else ""
    yield Finding(WARNING, "diverged", f"{text}{suspect}")


def _zero(report: RankReport) -> Iterator[Finding]:
    """Yield that the learning rate of all parameter groups is zero since some step."""
    begins = _zero_since(report.steps)
    if begins is None:
        return
    count = report.steps[-1].step - report.steps[begins].step + 1
    others = {group: rate for group, rate in report.by_attribute(catalog.LEARNING_RATE).items() if group != "0"}
    if len(others) >= _OTHER_GROUPS or any(rate > 0 for rate in others.values()):
        return
    if count < _LEAST_ZEROS or (begins and count < _ZEROS_SHARE * report.last_step):
        return
    first = report.steps[begins].step
    or_before = " or before" if begins == 0 and first > 1 else ""
    since = "in all steps" if first == 1 else f"from step {first:,}{or_before} on"
    text = f"The learning rate was 0 {since}: {text_format.plural(count, 'step')} changed nothing."
    yield Finding(WARNING, "zero_learning_rate", text)


def _zero_since(steps: Sequence[Step]) -> int | None:
    """Return the index of the first of the last steps whose learning rate is zero; ``None`` if the last one's is not."""
    found = None
    for index in range(len(steps) - 1, -1, -1):
        rate = steps[index].learning_rate
        if rate:
            break
        found = index if rate is not None else found
    return found
