"""Findings on the learning rate: too high from the start, or zero for a part of the run. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from torchobs import catalog
from torchobs.detect.spikes import LEAST_SCALE, WARM_UP
from torchobs.detect.zero_rates import OTHER_GROUPS, zero_rate
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import WARNING, Finding, zero_learning_rate
from torchobs.diagnosis.rank_report import RankReport, model_begins

_LEFT, _NEAR = 10.0, 2.0
"""Factors on the first loss, which is that of an untrained model: above the one, within the first steps, a loss has left its
start; below the other it has come back. A policy gradient's loss is as long as its episodes: it may leave its start, and comes
back with each short one."""
_LEAST_AFTER = 50
"""Steps after that without a return"""


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
    found = zero_rate([(step.step, step.learning_rate) for step in report.steps])
    others = {group: rate for group, rate in report.by_attribute(catalog.LEARNING_RATE).items() if group != "0"}
    if found is not None and len(others) < OTHER_GROUPS and not any(rate > 0 for rate in others.values()):
        yield zero_learning_rate(found)
