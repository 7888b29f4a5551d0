"""What is said of the learning rate: the sentences, from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.diagnosis_files import facts, step, steps
from torchobs import catalog
from torchobs.diagnosis.learning_rate import learning_rate
from torchobs.diagnosis.rank_report import Step


def told(history: Sequence[Step], **given: Any) -> dict[str, str]:
    """The findings by kind."""
    return {finding.kind: finding.text for finding in learning_rate(facts(history, **given))}


def with_losses(*losses: float, after: Sequence[float], **given: Any) -> list[Step]:
    """Steps with these losses."""
    return [step(number, loss, **given) for number, loss in enumerate([*losses, *after], 1)]


def test_a_loss_that_leaves_its_start_for_good_is_told_with_the_rate() -> None:
    """Twenty times the first loss is no spike by its past, which is too short."""
    found = told(with_losses(4.1, 60.0, 271.0, after=[100.0] * 100, learning_rate=1.0))
    assert found == {
        "diverged": "The loss rose from 4.1 in step 1 to 60 in step 2, and never came back: in step 103 it was 100. "
        "The learning rate, 1, is a suspect."
    }


@pytest.mark.parametrize(
    "history",
    [
        steps(300),
        with_losses(4.1, 271.0, after=[100.0] * 20),
        with_losses(4.1, 271.0, after=[100.0] * 90 + [5.0] + [100.0] * 10),
        with_losses(4.1, 5.0, after=[5.0 + number for number in range(300)]),
        with_losses(0.01, 0.9, after=[1.9] * 200),
        with_losses(-4.0, 50.0, after=[-3.0, 60.0] * 60),
        with_losses(*[2.0] * 30, after=[200.0] * 100),
        [step(number + 100, loss) for number, loss in enumerate([4.1, 271.0, *[100.0] * 99])],
        with_losses(4.1, 271.0, after=[*[100.0] * 90, math.nan, *[100.0] * 10]),
    ],
    ids=[
        "healthy", "too early to say", "came back once", "grows", "begins near zero", "both signs", "later",
        "the start is gone", "not finite: another finding",
    ],
)  # fmt: skip
def test_other_losses_are_not_called_diverged(history: list[Step]) -> None:
    """What an odd or heavy-tailed loss does as well."""
    assert told(history) == {}


def test_of_two_models_the_last_one_is_judged_by_its_own_start() -> None:
    """Another fold begins anew."""
    first = with_losses(0.5, after=[0.1] * 99)
    second = [step(101, 2.3, new_model=True), *(step(number, 90.0) for number in range(102, 200))]
    assert "from 2.3 in step 101 to 90 in step 102" in told([*first, *second])["diverged"]
    assert told([*second[:1], *first[1:]]) == {}


def rates(*runs: tuple[float | None, int], first: int = 1) -> list[Step]:
    """Steps in runs of one learning rate each."""
    every = [rate for rate, count in runs for _ in range(count)]
    return [step(number, learning_rate=rate) for number, rate in enumerate(every, first)]


@pytest.mark.parametrize(
    ("history", "since"),
    [
        (rates((1e-3, 100), (0.0, 500)), "from step 101 on: 500 steps"),
        (rates((0.0, 300)), "in all steps: 300 steps"),
        (rates((0.0, 300), first=9_000), "from step 9,000 or before on: 300 steps"),
    ],
    ids=["ended early", "from the start", "as far as is known"],
)
def test_a_learning_rate_of_zero_is_told(history: list[Step], since: str) -> None:
    """A schedule for fewer steps than there are, or one that nobody steps."""
    found = told(history, values={(catalog.LEARNING_RATE, "1"): 0.0})
    assert found == {"zero_learning_rate": f"The learning rate was 0 {since} changed nothing."}


@pytest.mark.parametrize(
    ("history", "others"),
    [
        (rates((1e-3, 900), (0.0, 40)), {}),
        (rates((1e-3, 100), (0.0, 10)), {}),
        (rates((0.0, 30), (1e-3, 100)), {}),
        (rates((None, 300)), {}),
        (rates((0.0, 300)), {"1": 1e-3}),
        (rates((0.0, 300)), {str(group): 0.0 for group in range(1, 8)}),
        ([], {}),
    ],
    ids=["at its end", "few", "warm-up", "none", "of one group", "more groups than are recorded", "no steps"],
)
def test_other_rates_are_not_called_zero(history: list[Step], others: dict[str, float]) -> None:
    """What schedules and frozen groups do as well."""
    assert told(history, values={(catalog.LEARNING_RATE, group): rate for group, rate in others.items()}) == {}
