"""What is sick is found, its culprit named, and nothing is said of what is not. `python -m tests.diagnosis`: as a table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.diagnosis.healthy_runs import HEALTHY, run_healthy
from tests.diagnosis.sicknesses import SICKNESSES
from tests.diagnosis.synthetic_series import LOSSES, STEPS, false_alarms
from tests.diagnosis.table import Result, enough, sick

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MILLION = 1_000_000


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that spin for each other make small steps take long where others work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's own, of trainings that are broken on purpose
@pytest.mark.parametrize("name", SICKNESSES)
def test_a_sickness_is_found_and_its_culprit_named(name: str, share_of: Callable[[int], int]) -> None:
    """Nineteen of twenty, and of the culprits as many; by default one of each, and where that is missed all twenty."""
    results: list[Result] = []
    for seed in range(100, 120):
        results.append(sick(name, seed))
        if len(results) >= share_of(20) and enough(results):
            break
    assert enough(results), [note for _, verdict, note in results if not verdict.found or verdict.culprit is False]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_said_of_many_healthy_runs(share_of: Callable[[int], int]) -> None:
    """All kinds, four times."""
    cases = [(name, seed) for seed in range(100, 104) for name in HEALTHY][:: max(1, 140 // share_of(140))]
    said = {case: told for case in cases if (told := run_healthy(*case).said())}
    assert said == {}


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
def test_a_million_healthy_steps_raise_one_false_alarm_at_most(name: str, share_of: Callable[[int], int]) -> None:
    """Of losses and of norms together; runs of 20,000 steps, each with parameters of its own."""
    alarms: Counter[str] = Counter()
    for seed in range(share_of(MILLION // STEPS)):
        alarms += false_alarms(name, seed)
    assert alarms.total() <= 1, alarms
