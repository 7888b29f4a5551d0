"""Finding on a loss that does not fall, where hyperparameters explain it. Pure function of a rank's report.

By itself a loss that stays as it is proves nothing: those of reinforcement learning and of a GAN's players do, and labels may
be noise. So it is told with a cause only:

- *weight decay* that takes a percent of the weights or more in each step: for SGD ``lr * weight_decay / (1 - momentum)``,
  since momentum repeats what is taken; for others without the division;
- *steps that are too short* for the loss to fall: to first order a step of SGD lowers the loss by its length times the
  gradient's norm, ``lr / (1 - momentum) * min(norm, limit of clipping) * norm`` at most; Adam's moves no weight by more than
  about ``lr`` (Kingma & Ba 2015, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isfinite
from statistics import fmean, median

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import WARNING, Finding
from torchobs.diagnosis.rank_report import RankReport, Step, model_begins

_LEAST_STEPS = 100
_FIRST = 10
"""Losses whose median is that of the untrained model"""
_FALLEN, _RISEN = 0.95, 2.0
"""Factors on that, between which a loss has not moved; above, it has another finding"""
_LEAST_DECAY = 0.01
"""Of the weights, in each step: half of them in 69"""
_DECAYED = 3.0
"""Least steps, in those that weight decay alone takes to leave 1/e: 5 % are left"""
_LEAST_MOVED = 1e-5
"""What no weight has moved further than by Adam, if all steps went the same way: less than rounding in float16 and bfloat16
makes of a weight of 0.02, which is what initialisations give"""


def no_progress(report: RankReport) -> Iterator[Finding]:
    """Yield that the loss has not fallen, and what of the hyperparameters explains it."""
    steps = report.steps[model_begins(report.steps, len(report.steps) - 1) :]
    if not steps or not (steps[0].step == 1 or steps[0].new_model):
        return
    losses = [step.loss for step in steps if step.loss is not None]
    if len(losses) < _LEAST_STEPS or not all(0.0 < loss < inf for loss in losses):
        return
    first, last = median(losses[:_FIRST]), median(losses[-len(losses) // 4 :])
    if not _FALLEN * first <= last <= _RISEN * first:
        return
    cause = _weight_decay(report, steps) or _short_steps(report, steps, (1.0 - _FALLEN) * first)
    if cause:
        from_to = f"from {text_format.number(first)} to {text_format.number(last)} in {text_format.plural(len(steps), 'step')}"
        yield Finding(WARNING, "no_progress", f"The loss did not fall ({from_to}): {cause}")


def _weight_decay(report: RankReport, steps: Sequence[Step]) -> str:
    decay, rate = report.value(catalog.OPTIMIZER_WEIGHT_DECAY, "0") or 0.0, _rate(steps)
    taken = rate * decay * _repeats(report)
    if taken < _LEAST_DECAY or len(steps) * taken < _DECAYED:
        return ""
    each = f"{taken:.0%}" if taken < 1.0 else "all"
    of = f"weight_decay {text_format.number(decay)} at a learning rate of {text_format.number(rate)}"
    return f"weight decay takes {each} of the weights in each step ({of})."


def _short_steps(report: RankReport, steps: Sequence[Step], fall: float) -> str:
    """Return what makes the steps too short for the loss to have fallen by so much; empty if they are not."""
    rate, norms = _rate(steps), [step.grad_norm for step in steps if step.grad_norm is not None and isfinite(step.grad_norm)]
    if not rate:
        return ""  # another finding
    if report.value(catalog.OPTIMIZER_BETA2, "0") is not None:
        moved = rate * len(steps)
        text = f"no weight has moved by more than about {text_format.number(moved)} in all, by a learning rate of {rate:.3g}."
        return text if moved < _LEAST_MOVED else ""
    if not norms or report.value(catalog.OPTIMIZER_MOMENTUM, "0") is None:
        return ""  # not SGD
    limit = report.value(catalog.GRAD_CLIP_MAX_NORM) or inf
    lowered = rate * _repeats(report) * len(steps) * fmean(min(norm, limit) * norm for norm in norms)
    if lowered >= fall:
        return ""
    usual = median(norms)
    clipped = f", and gradients of a norm of {text_format.number(usual)} are clipped to {limit:.3g}" if usual > limit else ""
    most = text_format.number(lowered)
    return f"steps are too short for more than {most} of it in all. The learning rate is {rate:.3g}{clipped}."


def _rate(steps: Sequence[Step]) -> float:
    """Return the mean learning rate; 0 if unknown."""
    return fmean([step.learning_rate for step in steps if step.learning_rate is not None] or [0.0])


def _repeats(report: RankReport) -> float:
    """Return how often momentum repeats what a step of SGD does; 1 for other optimizers, whose momentum averages."""
    momentum = report.value(catalog.OPTIMIZER_MOMENTUM, "0") or 0.0
    averages = report.value(catalog.OPTIMIZER_BETA2, "0") is not None
    return 1.0 if averages or not 0.0 <= momentum < 1.0 else 1.0 / (1.0 - momentum)
