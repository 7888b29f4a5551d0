"""What is said of ranks that exchange nothing: the sentence, from numbers alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diagnosis_files import fact, facts, step, steps
from torchobs import catalog
from torchobs.diagnosis.compare import compare
from torchobs.diagnosis.rank_report import Fact, RankReport

ENDED: dict[str, Any] = {"state": "finished", "reason": "finished"}
LIVES: dict[str, Any] = {"state": "alive", "reason": "", "up": True}


def apart(number: int, count: int) -> Fact:
    """The event in that step, of so many steps without a collective."""
    return fact(catalog.EVENT_NO_COLLECTIVES, number / 10, number, steps=count, world_size=4)


def told(*ranks: RankReport) -> list[str]:
    """The sentences."""
    return [finding.text for finding in compare(ranks) if finding.kind == "no_exchange"]


def rank(number: int, *events: Fact, last: int = 400, **given: Any) -> RankReport:
    """A rank."""
    return facts(steps(last), events=events, resource={"rank": number}, **(given or ENDED))


def test_ranks_that_exchanged_nothing_until_their_end_are_told() -> None:
    """With the least number of steps among them; also by the file of one rank alone, where the others are elsewhere."""
    said = (
        "no collective was called, and each trains a model of its own, unless that is meant. Is the model wrapped (DDP, FSDP), "
    )
    assert told(rank(0, apart(210, 205)), rank(1, apart(230, 204))) == [
        f"The 4 ranks exchanged nothing in 374 steps: {said}and called as such?"
    ]
    assert told(rank(0, apart(210, 205)))


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0), rank(1)],
        [rank(0, apart(210, 205)), rank(1)],
        [rank(0, apart(210, 205), apart(300, 0)), rank(1, apart(210, 205), apart(300, 0))],
        [rank(0, apart(210, 205), **LIVES), rank(1, apart(210, 205), **LIVES)],
        [rank(0, apart(210, 205)), facts([step(n, None) for n in range(400)], events=[apart(210, 205)], **ENDED)],
    ],
    ids=["healthy", "one of them", "they did later", "too early to say", "a pipeline"],
)
def test_other_ranks_are_not(ranks: list[RankReport]) -> None:
    """Local SGD, and what cannot be known yet."""
    assert told(*ranks) == []


def test_a_run_that_lives_is_told_after_a_thousand_steps() -> None:
    """In which local SGD would have exchanged something."""
    assert told(rank(0, apart(1_005, 1_000), last=1_010, **LIVES), rank(1, apart(1_009, 1_001), last=1_010, **LIVES))
