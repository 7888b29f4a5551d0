"""A loss that does not fall is told where the hyperparameters explain it, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests import flights
from tests.diagnosis_files import fact, facts
from torchobs import catalog
from torchobs.detect.no_progress import Course, Hyperparameters, Rule, cause_of, rule_of
from torchobs.diagnosis.no_progress import no_progress
from torchobs.flight.format.step_record import StepFlag, StepRecord
from torchobs.flight.metrics.fold import fold
from torchobs.flight.metrics.loss_course import course

HEADER = flights.header()
SHORT = "steps are too short for more than"
SGD, MOMENTUM = Hyperparameters(Rule("SGD"), momentum=0.0), Hyperparameters(Rule("SGD"), momentum=0.9)
ADAM = Hyperparameters(Rule("adaptive", decoupled=True), momentum=0.9)
DAMPENED = MOMENTUM._replace(rule=Rule("SGD", dampening=0.9))
ALL = StepFlag.LOSS | StepFlag.GRAD_NORM | StepFlag.LEARNING_RATE


def record(number: int, loss: float, rate: float = 0.1, norm: float = 0.5, flags: int = ALL) -> StepRecord:
    """One step."""
    return flights.step_record(HEADER, number, step=number, loss=loss, grad_norm=norm, learning_rate=rate, flags=flags)


def flat(rate: float, count: int = 400, *, first: int = 1, flags: int = ALL) -> list[StepRecord]:
    """Steps whose loss is that of guessing among ten classes."""
    return [record(number, 2.3 + 0.01 * (number % 3), rate, flags=flags) for number in range(first, first + count)]


def course_of(records: Sequence[StepRecord], batch: int = 64) -> Course:
    """What the fold keeps of them."""
    totals = flights.totals(HEADER)
    for begin in range(0, len(records), batch):
        fold(totals, records[begin : begin + batch])
    return course(totals)


@pytest.mark.parametrize(
    ("history", "given", "kind", "amount"),
    [
        (flat(0.1), SGD._replace(weight_decay=0.5), "weight_decay", 0.05),
        (flat(0.01), MOMENTUM._replace(weight_decay=0.9), "weight_decay", 0.09),
        (flat(0.01), ADAM._replace(weight_decay=10.0), "weight_decay", 0.1),
        (flat(0.1), DAMPENED._replace(weight_decay=0.5), "weight_decay", 0.05),
        (flat(0.1), SGD._replace(max_norm=1e-4), "clipped", 0.002),
        (flat(1e-6), MOMENTUM._replace(max_norm=1.0), "short_steps", 0.001),
        (flat(1e-9), ADAM, "small_rate", 4e-7),
        ([record(n, 2.3, 2e-7 + 2e-8 * min(n, 40)) for n in range(1, 401)], SGD._replace(initial_rate=1e-6),
         "short_steps", 9.61e-5),
        ([*flat(0.1, 50), *flat(0.0, 350, first=51)], SGD._replace(weight_decay=0.9), "weight_decay", 0.01125),
        ([record(n, 0.1, flags=ALL | (StepFlag.NEW_MODEL if n == 51 else 0)) for n in range(1, 51)]
         + [record(n, 2.3, flags=ALL | (StepFlag.NEW_MODEL if n == 51 else 0)) for n in range(51, 300)],
         SGD._replace(weight_decay=0.5), "weight_decay", 0.05),
    ],
    ids=[
        "decay", "decay with momentum", "decay of Adam", "decay with dampening", "clipped", "rate", "rate of Adam",
        "long after a warm-up", "the rate's mean", "second model",
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 64])
def test_the_cause_is_found(history: list[StepRecord], given: Hyperparameters, kind: str, amount: float, batch: int) -> None:
    """However the records are cut."""
    found = cause_of(course_of(history, batch), given)
    assert found is not None
    assert found.kind == kind
    assert found.amount == pytest.approx(amount)


class Lars(torch.optim.SGD):
    """One whose steps are as long as the weights are large."""


@pytest.mark.parametrize(
    ("optimizer", "options", "rule"),
    [
        (torch.optim.SGD, {}, ("SGD",)), (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, ("SGD", False, 0.5)),
        (torch.optim.Adam, {}, ("adaptive",)), (torch.optim.AdamW, {}, ("adaptive", True)),
        (torch.optim.RMSprop, {}, ("adaptive",)),
        (torch.optim.NAdam, {"decoupled_weight_decay": True}, ("adaptive", True)), (Lars, {}, ()),
        (torch.optim.Adafactor, {}, ()), (torch.optim.Rprop, {}, ()),
    ],
)  # fmt: skip
def test_formulas_are_those_of_the_optimizer_s_class(optimizer: Any, options: dict[str, Any], rule: tuple[Any, ...]) -> None:
    """Of others none is taken, nor where the learning rate is a factor on the optimizer's own."""
    made = optimizer([torch.nn.Parameter(torch.ones(2, 2))], lr=1.0, **options)
    classes = [kind.__name__ for kind in type(made).__mro__]
    assert rule_of(classes, made.param_groups[0]) == Rule(*rule)
    assert rule_of(classes, {**made.param_groups[0], "d": 1e-6}) == Rule()


DECAY = SGD._replace(weight_decay=0.5)
NO_RATE, NO_NORM = StepFlag.LOSS | StepFlag.GRAD_NORM, StepFlag.LOSS | StepFlag.LEARNING_RATE


@pytest.mark.parametrize(
    ("history", "given"),
    [
        (flat(0.1), SGD),
        (flat(1e-3), ADAM._replace(max_norm=1e-4)),
        (flat(0.1), SGD._replace(weight_decay=5e-4)),
        (flat(0.01), DAMPENED._replace(weight_decay=0.5)),
        (flat(0.1), Hyperparameters(weight_decay=0.0, max_norm=1e-4)),
        (flat(0.0), SGD),
        (flat(0.1, flags=NO_RATE), DECAY),
        (flat(1e-6, flags=NO_NORM), SGD),
        ([record(n, 2.3, 1e-6 * n) for n in range(1, 200)], SGD),
        ([record(n, 2.3, 2e-5 + 1e-7 * n) for n in range(1, 200)], SGD),
        ([record(n, 2.3, 1e-7 * n) for n in range(1, 100)] + [record(n, 2.3, 1e-5) for n in range(100, 150)], SGD),
        (flat(1e-6), SGD._replace(initial_rate=0.1)),
        ([record(n, 2.3, 1e-8 * (1_000 - n)) for n in range(1, 400)], SGD._replace(initial_rate=0.1)),
        (flat(1e-6), MOMENTUM._replace(resumed=True)),
        (flat(1e-9), ADAM._replace(resumed=True)),
        (flat(0.1), SGD._replace(weight_decay=0.5, resumed=True)),
        (flat(0.1, 90), DECAY),
        (flat(0.1, first=1_000), DECAY),
        ([record(n, 2.3 / (1 + n / 100)) for n in range(1, 400)], DECAY),
        ([record(n, 2.3 if n < 50 else 9.0) for n in range(1, 400)], DECAY),
        ([record(n, (-1.0) ** n) for n in range(1, 400)], DECAY),
        ([record(n, 2.3 if n != 50 else float("nan")) for n in range(1, 400)], DECAY),
    ],
    ids=[
        "labels may be noise", "Adam's steps do not shrink with the gradient", "usual decay", "dampened decay",
        "another optimizer", "no rate: another finding", "rate not known", "no norms", "warm-up",
        "warm-up from a part of the rate", "after a warm-up", "a schedule that waits", "a schedule's end", "resumed",
        "resumed with Adam", "resumed with decay", "too early",
        "its begin is not known", "falls", "rises", "of both signs", "not finite",
    ],
)  # fmt: skip
def test_without_a_cause_nothing_is_found(history: list[StepRecord], given: Hyperparameters) -> None:
    """Losses that stay as they are prove nothing by themselves."""
    assert cause_of(course_of(history), given) is None


@pytest.mark.parametrize(
    ("attributes", "cause"),
    [
        (
            {"cause": "weight_decay", "amount": 0.05, "weight_decay": 0.5, "learning_rate": 0.1},
            "weight decay takes 5% of the weights in each step (weight_decay 0.5 at a learning rate of 0.1).",
        ),
        (
            {"cause": "weight_decay", "amount": 2.0, "weight_decay": 2.0, "learning_rate": 1.0},
            "weight decay takes all of the weights in each step (weight_decay 2 at a learning rate of 1).",
        ),
        (
            {"cause": "clipped", "amount": 0.002, "learning_rate": 0.1, "grad_norm": 0.5, "max_norm": 1e-4},
            f"{SHORT} 0.002 of it in all. The learning rate is 0.1, and gradients of a norm of 0.5 are clipped to 0.0001.",
        ),
        (
            {"cause": "short_steps", "amount": 0.001, "learning_rate": 1e-6, "grad_norm": 0.5},
            f"{SHORT} 0.001 of it in all. The learning rate is 1e-06.",
        ),
        (
            {"cause": "small_rate", "amount": 4e-7, "learning_rate": 1e-9},
            "no weight has moved by more than about 4e-7 in all, by a learning rate of 1e-09.",
        ),
    ],
    ids=["decay", "decay of all", "clipped", "rate", "rate of Adam"],
)
def test_the_cause_is_told_with_its_numbers(attributes: dict[str, Any], cause: str) -> None:
    """As long as the loss has not fallen after all."""
    event = fact(catalog.EVENT_NO_PROGRESS, 40.0, 400, first=2.31, last=2.3, steps=400, **attributes)
    blocked = {(catalog.PROGRESS_BLOCKED, attributes["cause"]): 1.0}
    (found,) = no_progress(facts(events=[event], values=blocked))
    assert (found.kind, found.text) == ("no_progress", f"The loss did not fall (from 2.31 to 2.3 in 400 steps): {cause}")
    assert list(no_progress(facts(events=[event], values=dict.fromkeys(blocked, 0.0)))) == []
