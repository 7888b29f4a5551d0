"""A loss that does not fall is told where the hyperparameters explain it, and only there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.diagnosis_files import facts, step
from torchobs import catalog
from torchobs.diagnosis.no_progress import no_progress
from torchobs.diagnosis.rank_report import Step

SGD = {catalog.OPTIMIZER_MOMENTUM: 0.0}
SHORT = "steps are too short for more than"
ADAM = {catalog.OPTIMIZER_MOMENTUM: 0.9, catalog.OPTIMIZER_BETA2: 0.999}


def flat(count: int = 400, *, first: int = 1, norm: float | None = 0.5, **given: Any) -> list[Step]:
    """Steps whose loss is that of guessing among ten classes."""
    return [step(number, 2.3 + 0.01 * (number % 3), norm, **given) for number in range(first, first + count)]


def told(history: Sequence[Step], hyperparameters: Mapping[Any, float], limit: float | None = None) -> str:
    """What is said of it, after the numbers of the loss."""
    values = {(metric, "0"): value for metric, value in hyperparameters.items()}
    clip = {catalog.GRAD_CLIP_MAX_NORM: limit} if limit is not None else {}
    found = list(no_progress(facts(history, values={**values, **clip})))
    assert all(finding.kind == "no_progress" for finding in found)
    return " ".join(finding.text.partition(": ")[2] for finding in found)


@pytest.mark.parametrize(
    ("history", "hyperparameters", "limit", "cause"),
    [
        (
            flat(learning_rate=0.1), {**SGD, catalog.OPTIMIZER_WEIGHT_DECAY: 0.5}, None,
            "weight decay takes 5% of the weights in each step (weight_decay 0.5 at a learning rate of 0.1).",
        ),
        (
            flat(learning_rate=0.01), {catalog.OPTIMIZER_MOMENTUM: 0.9, catalog.OPTIMIZER_WEIGHT_DECAY: 0.9}, None,
            "weight decay takes 9% of the weights in each step (weight_decay 0.9 at a learning rate of 0.01).",
        ),
        (
            flat(learning_rate=0.01), {**ADAM, catalog.OPTIMIZER_WEIGHT_DECAY: 10.0}, None,
            "weight decay takes 10% of the weights in each step (weight_decay 10 at a learning rate of 0.01).",
        ),
        (
            flat(learning_rate=1.0), {**SGD, catalog.OPTIMIZER_WEIGHT_DECAY: 2.0}, None,
            "weight decay takes all of the weights in each step (weight_decay 2 at a learning rate of 1).",
        ),
        (
            flat(learning_rate=0.1), SGD, 1e-4,
            f"{SHORT} 0.002 of it in all. The learning rate is 0.1, and gradients of a norm of 0.5 are clipped to 0.0001.",
        ),
        (
            flat(learning_rate=1e-6), {catalog.OPTIMIZER_MOMENTUM: 0.9}, 1.0,
            f"{SHORT} 0.001 of it in all. The learning rate is 1e-06.",
        ),
        (
            flat(learning_rate=1e-9), ADAM, None,
            "no weight has moved by more than about 4e-7 in all, by a learning rate of 1e-09.",
        ),
    ],
    ids=["decay", "decay with momentum", "decay of Adam", "decay of all", "clipped", "rate", "rate of Adam"],
)  # fmt: skip
def test_the_cause_is_told(history: list[Step], hyperparameters: Mapping[Any, float], limit: float | None, cause: str) -> None:
    """With its numbers."""
    assert told(history, hyperparameters, limit) == cause


DECAY = {**SGD, catalog.OPTIMIZER_WEIGHT_DECAY: 0.5}


@pytest.mark.parametrize(
    ("history", "hyperparameters", "limit"),
    [
        (flat(learning_rate=0.1), SGD, None),
        (flat(learning_rate=1e-3), ADAM, 1e-4),
        (flat(learning_rate=0.1), {**SGD, catalog.OPTIMIZER_WEIGHT_DECAY: 5e-4}, None),
        (flat(learning_rate=0.1), {catalog.OPTIMIZER_WEIGHT_DECAY: 0.0}, 1e-4),
        (flat(learning_rate=0.0), SGD, None),
        (flat(learning_rate=None), DECAY, None),
        (flat(learning_rate=1e-6, norm=None), SGD, None),
        (flat(90, learning_rate=0.1), DECAY, None),
        (flat(learning_rate=0.1, first=1_000), DECAY, None),
        ([step(n, 2.3 / (1 + n / 100), learning_rate=0.1) for n in range(1, 400)], DECAY, None),
        ([step(n, 2.3 if n < 50 else 9.0, learning_rate=0.1) for n in range(1, 400)], DECAY, None),
        ([step(n, (-1.0) ** n, learning_rate=0.1) for n in range(1, 400)], DECAY, None),
    ],
    ids=[
        "labels may be noise", "Adam's steps do not shrink with the gradient", "usual decay", "another optimizer",
        "no rate: another finding", "rate not known", "no norms", "too early", "its begin is gone", "falls", "rises",
        "of both signs",
    ],
)  # fmt: skip
def test_without_a_cause_nothing_is_told(
    history: list[Step], hyperparameters: Mapping[Any, float], limit: float | None
) -> None:
    """Losses that stay as they are prove nothing by themselves."""
    assert told(history, hyperparameters, limit) == ""
