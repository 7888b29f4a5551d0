"""What is said of the learning rate: the sentences, from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.diagnosis_files import fact, facts, step
from torchobs import catalog
from torchobs.diagnosis.numerics import learning_rate
from torchobs.diagnosis.rank_report import Step


def told(history: Sequence[Step], **given: Any) -> dict[str, str]:
    """The findings by kind."""
    return {finding.kind: finding.text for finding in learning_rate(facts(history, **given))}


def with_losses(*losses: float, after: Sequence[float], **given: Any) -> list[Step]:
    """Steps with these losses."""
    return [step(number, loss, **given) for number, loss in enumerate([*losses, *after], 1)]


DIVERGED = {(catalog.ANOMALY_ACTIVE, "diverged"): 1.0}


def test_a_loss_that_left_its_start_for_good_is_told_with_the_rate() -> None:
    """As the fold found it; after another model's first steps the rate is that of the start, too."""
    history = with_losses(4.1, 60.0, 271.0, after=[100.0] * 100, learning_rate=1.0)
    events = [fact(catalog.EVENT_ANOMALY, 5.2, 52, kind="diverged", value=100.0, baseline=4.1)]
    text = "The loss rose from 4.1 to 10 times that or more within its first 20 steps, and has not come back: "
    assert told(history, values=DIVERGED, events=events) == {
        "diverged": f"{text}in step 103 it was 100. The learning rate, 1, is a suspect."
    }
    later = told(history[50:], values=DIVERGED, events=events)["diverged"]
    assert later == f"{text}in step 103 it was 100.", "the steps of the start are gone"
    assert "from its first value to" in told(history, values=DIVERGED)["diverged"]
    assert told(history, events=events) == {}, "it came back"


RAMPED = [min(12.0 * 1.5**number, 7e3) for number in range(45)]
"""The losses of a detector whose rate warms up to 1: 12, 18, 27 ..., and 7,000 in the end"""


def short(losses: Sequence[float], rate: float = 1.0, norm: float = 300.0) -> list[Step]:
    """The steps of a whole run."""
    return [step(number, loss, norm, learning_rate=rate) for number, loss in enumerate(losses, 1)]


def test_a_short_run_that_ended_away_from_its_start_is_told() -> None:
    """It has not the fifty losses that are waited for while it runs, and all well it was not."""
    text = "The loss rose from 12 to 10 times that or more within its first 20 steps, and has not come back: "
    expected = {"diverged": f"{text}in step 45 it was 7,000. The learning rate, 1, is a suspect."}
    assert told(short(RAMPED)) == expected
    warmed_up = [each._replace(learning_rate=min(1.0, 0.1 * each.step)) for each in short(RAMPED)]
    assert told(warmed_up) == expected, "it is not the first one that was too high"


@pytest.mark.parametrize(
    ("losses", "given"),
    [
        (RAMPED, {"reason": "", "state": "training"}),
        (RAMPED[:24], {}),
        ([*RAMPED[:40], *[20.0] * 5], {}),
        ([*RAMPED[:40], *[100.0] * 5], {}),
        ([*RAMPED[:40], math.nan], {}),
        ([12.0 * number for number in range(1, 45)], {}),
    ],
    ids=["it still runs", "too few", "it came back", "it comes back", "it turned NaN", "its weight is ramped up"],
)
def test_other_short_runs_are_not(losses: list[float], given: dict[str, Any]) -> None:
    """What may still come back, has, or grows as a weight does."""
    assert told(short(losses), **given) == {}


def test_a_short_run_of_short_steps_is_not_told() -> None:
    """A contrastive loss rises a thousandfold as its queue fills, and the weights hardly move."""
    assert told(short(RAMPED, rate=1e-3, norm=1.0)) == {}


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


@pytest.mark.parametrize("others", [1e-20, 1e-3])
def test_a_learning_rate_next_to_zero_is_told(others: float) -> None:
    """Halved in each step; its 24th half is the first that float32 rounds away. Not told while another group trains."""
    history = [step(number, learning_rate=1e-3 * 0.5**number) for number in range(301)]
    found = told(history, values={(catalog.LEARNING_RATE, "1"): others})
    text = "The learning rate was below 5.96e-11 from step 24 on, after 0.001: 277 steps may have changed next to nothing."
    hint = "Is a scheduler that counts epochs stepped in each batch?"
    assert found == ({"zero_learning_rate": f"{text} {hint}"} if others < 1e-10 else {})


def test_a_rate_is_next_to_zero_by_the_same_models_rates() -> None:
    """A linear probe at 30, and then fine-tuning at 1e-6; of the same model that would be next to zero."""
    probe, tuned = rates((30.0, 100)), rates((1e-6, 300), first=101)
    assert "zero_learning_rate" in told([*probe, *tuned])
    tuned[0] = tuned[0]._replace(new_model=True)
    assert told([*probe, *tuned]) == {}


def annealed(steps: int, power: int = 1) -> list[Step]:
    """A cosine to zero, or a power of it."""
    return [step(n, learning_rate=1e-3 * (0.5 + 0.5 * math.cos(math.pi * n / steps)) ** power) for n in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("history", "others"),
    [
        (annealed(100), {}),
        (annealed(4_000, 2), {}),
        (rates((1e-3, 900), (0.0, 40)), {}),
        (rates((1e-3, 100), (0.0, 10)), {}),
        (rates((0.0, 30), (1e-3, 100)), {}),
        (rates((None, 300)), {}),
        (rates((0.0, 300)), {"1": 1e-3}),
        (rates((0.0, 300)), {str(group): 0.0 for group in range(1, 8)}),
        ([], {}),
    ],
    ids=[
        "a cosine",
        "its square",
        "at its end",
        "few",
        "warm-up",
        "none",
        "of one group",
        "more groups than are recorded",
        "no steps",
    ],
)
def test_other_rates_are_not_called_zero(history: list[Step], others: dict[str, float]) -> None:
    """What schedules and frozen groups do as well."""
    assert told(history, values={(catalog.LEARNING_RATE, group): rate for group, rate in others.items()}) == {}
