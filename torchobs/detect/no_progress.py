"""Detect a loss that does not fall, where the hyperparameters explain it. Pure.

By itself a loss that stays as it is proves nothing: those of reinforcement learning and of a GAN's players do, and labels may
be noise. So it is a verdict with a cause only:

- *weight decay* that takes a percent of the weights or more in each step: for SGD ``lr * weight_decay / (1 - momentum)``,
  since momentum repeats what is taken; where decay is decoupled (AdamW, Lion, Muon) without the division;
- *steps that are too short* for the loss to fall: to first order a step of SGD lowers the loss by its length times the
  gradient's norm, ``lr / (1 - momentum) * min(norm, limit of clipping) * norm`` at most; Adam's moves no weight by more than
  about ``lr`` (Kingma & Ba 2015, section 2.1).

Of an optimizer of another class nothing is known, nor of one whose ``lr`` is a factor on a rate of its own (D-Adaptation).
A training that goes on from a checkpoint has no first loss of an untrained model, and its schedule may be at its end.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEAST_LOSSES = 100
FIRST_LOSSES = 10
"""Losses whose mean is that of the untrained model"""
LATE_SHARE = 0.25
"""The mean of the last losses has a memory of this share of all"""
FALLEN, RISEN = 0.95, 2.0
"""Factors on the first losses, between which a loss has not moved; above, it is another verdict"""
LEAST_DECAY = 0.01
"""Of the weights, in each step: half of them in 69"""
DECAYED = 3.0
"""Least steps, in those that weight decay alone takes to leave 1/e: 5 % are left"""
LEAST_MOVED = 1e-5
"""What no weight has moved further than by Adam, if all steps went the same way: less than rounding in float16 and bfloat16
makes of a weight of 0.02, which is what initialisations give"""
RISING = 1.5
"""Factor on the mean learning rate, above which it still rises, or did lately: after a linear warm-up it is twice the mean"""
STILL_RISING = 1.02
"""The same on the mean of about the last quarter, which a warm-up that began with a part of the rate exceeds, too: a tenth more
than at first makes 2 %, as it rises"""
SCHEDULED = 0.5
"""Share of the rate that a schedule was given (``initial_lr``): where no step has had so much, it has made them short"""
SGD, ADAPTIVE = "SGD", "adaptive"
_ADAPTIVE, _DECOUPLED = frozenset({"RMSprop", "Lion"}), frozenset({"Lion", "Muon"})
WEIGHT_DECAY, SHORT_STEPS, CLIPPED, SMALL_RATE = "weight_decay", "short_steps", "clipped", "small_rate"


class Course(NamedTuple):
    """A model's training since its first step."""

    losses: int
    """number of finite ones; 0 if one was not above zero, or the first are not known"""
    first: float
    late: float
    steps: int
    rate: float
    """mean learning rate; 0 if unknown"""
    last_rate: float
    late_rate: float
    """mean of about the last quarter of learning rates"""
    top_rate: float
    norm: float | None
    """mean gradient norm, if it was measured"""
    square: float
    """mean of its square"""


class Rule(NamedTuple):
    """What is known of how an optimizer makes its steps."""

    name: str = ""
    """``SGD``, ``ADAPTIVE`` or, where the length of its steps is not known, empty"""
    decoupled: bool = False
    """Whether weight decay takes its share of the weights by itself, and not by way of the gradient"""
    dampening: float = 0.0
    """Share of the gradient that does not go into SGD's momentum"""


class Hyperparameters(NamedTuple):
    """Of the optimizer's first parameter group; ``None`` where it has none."""

    rule: Rule = Rule()
    weight_decay: float | None = None
    momentum: float | None = None
    max_norm: float | None = None
    """limit of clipping"""
    other_rates: float = 0.0
    """highest learning rate of the other groups"""
    initial_rate: float | None = None
    """highest one that a schedule was given"""
    resumed: bool = False
    """whether the optimizer had a state before its first step here"""

    @property
    def repeats(self) -> float:
        """How often momentum repeats what a step of SGD does; 1 for other optimizers, whose momentum averages."""
        momentum = self.momentum or 0.0
        return (1.0 - self.rule.dampening) / (1.0 - momentum) if self.rule.name == SGD and 0.0 < momentum < 1.0 else 1.0


def rule_of(classes: Sequence[str], group: Mapping[str, object]) -> Rule:
    """Return an optimizer's rule by the names of its class and those it inherits from, and a group."""
    names, dampening = set(classes), group.get("dampening")
    if "d" in group:  # D-Adaptation's and Prodigy's own rate
        return Rule()
    name = SGD if classes[0] == "SGD" else ADAPTIVE if names & _ADAPTIVE or any("Adam" in name for name in names) else ""
    decoupled = (
        bool(names & _DECOUPLED) or any("AdamW" in name for name in names) or group.get("decoupled_weight_decay") is True
    )
    return Rule(name, decoupled, float(dampening) if isinstance(dampening, (int, float)) else 0.0)


class Cause(NamedTuple):
    """Why the loss does not fall. ``amount``: of the weights in each step; of the loss, or of a weight, in all steps."""

    kind: str
    amount: float


def cause_of(course: Course, given: Hyperparameters) -> Cause | None:
    """Return why the loss has not fallen; ``None`` if it has, or if nothing explains it."""
    if given.resumed or course.losses < LEAST_LOSSES or not FALLEN * course.first <= course.late <= RISEN * course.first:
        return None
    return _weight_decay(course, given) or _short_steps(course, given)


def _weight_decay(course: Course, given: Hyperparameters) -> Cause | None:
    if given.rule.name != SGD and not given.rule.decoupled:
        return None
    taken = course.rate * (given.weight_decay or 0.0) * given.repeats
    return Cause(WEIGHT_DECAY, taken) if taken >= LEAST_DECAY and course.steps * taken >= DECAYED else None


def _short_steps(course: Course, given: Hyperparameters) -> Cause | None:
    if not course.rate or _may_get_longer(course, given):
        return None  # another finding, or a schedule
    if given.other_rates > RISING * course.rate:
        return None  # what is trained is trained there
    if given.rule.name == ADAPTIVE:
        moved = course.rate * course.steps
        return Cause(SMALL_RATE, moved) if moved < LEAST_MOVED else None
    if course.norm is None or given.rule.name != SGD:
        return None
    limit = given.max_norm or inf
    lowered = course.rate * given.repeats * course.steps * min(course.square, limit * course.norm)
    if lowered >= (1.0 - FALLEN) * course.first:
        return None
    return Cause(CLIPPED if course.norm > limit else SHORT_STEPS, lowered)


def _may_get_longer(course: Course, given: Hyperparameters) -> bool:
    """Return True during a warm-up, or where a schedule has not reached the rate that it was given, or is past it."""
    rises = course.last_rate > min(RISING * course.rate, STILL_RISING * course.late_rate)
    return rises or (given.initial_rate is not None and course.top_rate < SCHEDULED * given.initial_rate)
