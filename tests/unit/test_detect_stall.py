"""After how long without a step a rank's stacks are written."""

from __future__ import annotations

from bisect import bisect_left

from torchobs.catalog import SECONDS_BOUNDS
from torchobs.detect.stall import EARLY_FIRST_S, early_limit_s, usual_and_long_s
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks.state import hang_timeout_s


def limit_s(durations_s: list[float], survived: int = 0) -> float:
    """Of a run whose steps took so long."""
    return early_limit_s(counts(durations_s), SECONDS_BOUNDS, max(durations_s, default=0.0), survived)


def counts(durations_s: list[float]) -> list[int]:
    """Their histogram."""
    found = [0] * (len(SECONDS_BOUNDS) + 1)
    for duration_s in durations_s:
        found[bisect_left(SECONDS_BOUNDS, duration_s)] += 1
    return found


def test_short_steps_have_ten_seconds() -> None:
    """As long as people wait."""
    assert limit_s([0.02] * 40) == limit_s([0.3] * 5000) == 10.0


def test_long_steps_have_several_times_their_own() -> None:
    """Earlier than a rank is called hung, and never within a usual step."""
    for usual_s in (2.0, 7.0, 30.0, 400.0):
        durations_s = [usual_s] * 300
        found_s = limit_s(durations_s)
        of_hang_s = hang_timeout_s(Distribution(tuple(counts(durations_s)), sum(durations_s), usual_s, usual_s), SECONDS_BOUNDS)
        assert 5 * usual_s <= found_s <= of_hang_s / 3.9 + 10


def test_a_run_with_minutes_now_and_then_has_twice_those() -> None:
    """The first minibatch after a rollout; a single one is no habit."""
    assert limit_s([0.1] * 1000 + [60.0]) == 10.0
    assert limit_s([0.1] * 1000 + [60.0] * 2) >= 120.0


def test_a_stall_that_was_survived_doubles_it() -> None:
    """So that a run of a month writes a few at most, whatever it does."""
    assert [limit_s([0.1] * 500, survived) for survived in range(4)] == [10.0, 20.0, 40.0, 80.0]


def test_before_the_steps_are_known_it_is_long() -> None:
    """Data are loaded and models are compiled; but a collective may end the run by its own timeout."""
    assert limit_s([]) == limit_s([8.0]) == EARLY_FIRST_S


def test_a_cold_first_step_is_left_out_of_the_usual_of_a_few() -> None:
    """And allowed twice."""
    usual_s, long_s = usual_and_long_s(counts([8.0, *[0.02] * 30]), SECONDS_BOUNDS, 8.0)
    assert usual_s < 0.05
    assert long_s >= 8.0
