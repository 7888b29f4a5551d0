"""How fast a rank is, and how long it will still take."""

from __future__ import annotations

from math import inf, nan

import pytest

from torchobs.flight.format.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.metrics.throughput import LEAST_STEPS, RECORDS, pace, speed, time_left_s


def record(seq: int, *, end_s: float, duration_s: float = 0.5, flags: int = 0, **fields: object) -> StepRecord:
    """A step's record."""
    phases = (0.1,) * 5 + (0.0,) * 3
    made = StepRecord(seq, seq, round(end_s * 1e9), RecordKind.STEP, flags, 0, duration_s, 0.0, 0.0, 0.0, phases, 10, 1, 1.0)
    return made._replace(**fields)  # type: ignore[arg-type]  # what a test wants


def test_the_pace_is_that_of_the_clock() -> None:
    """What lies between two steps counts for the speed, and not for the step time."""
    found = pace([record(1, end_s=1.0), record(2, end_s=1.5), record(3, end_s=4.0)])
    assert found is not None
    assert (found.steps, found.step_s) == (3, 0.5)
    assert (found.per_s, found.tokens_per_s) == pytest.approx((2 / 3, 20 / 3))
    assert found.shares == pytest.approx((0.2,) * 5)


def test_no_pace_of_what_has_no_time() -> None:
    """The first step's start is unknown, and a late value is no step."""
    assert pace([record(1, end_s=1.0, flags=StepFlag.UNTIMED), record(9, end_s=1.0, kind=RecordKind.LATE)]) is None
    (only,) = [pace([record(1, end_s=1.0)])]
    assert only is not None
    assert only.per_s is None


def evenly(count: int, every_s: float) -> list[StepRecord]:
    """Steps that end so many seconds apart."""
    return [record(number, end_s=number * every_s) for number in range(1, count + 1)]


@pytest.mark.parametrize(("count", "every_s", "steps"), [(1000, 0.001, RECORDS), (200, 1.0, 61), (50, 100.0, LEAST_STEPS)])
def test_the_window_is_a_minute_where_that_is_neither_too_long_nor_too_short(count: int, every_s: float, steps: int) -> None:
    """However many records somebody has read."""
    found = pace(evenly(count, every_s))
    assert found is not None
    assert found.steps == steps
    assert found.per_s == pytest.approx(1 / every_s)
    assert found.window_s == pytest.approx((steps - 1) * every_s)
    assert pace(evenly(count, every_s)[-RECORDS:]) == found


def test_what_was_long_ago_is_not_the_speed_of_now() -> None:
    """After a pause of an hour the steps before it do not count, once there are enough behind it."""
    later = [one._replace(end_ns=one.end_ns + 3600 * 10**9) for one in evenly(20, 0.5)]
    found = pace([*evenly(100, 0.1), *later])
    assert found is not None
    assert found.steps == 20
    assert found.per_s == pytest.approx(2.0)


def test_programs_are_told_what_the_speed_is_over() -> None:
    """And nothing where there is none."""
    assert speed(pace(evenly(11, 0.5))) == {
        "steps_per_s": pytest.approx(2.0), "tokens_per_s": pytest.approx(20.0), "samples_per_s": pytest.approx(2.0),
        "steps": 11, "window_s": pytest.approx(5.0),
    }  # fmt: skip
    assert speed(None) is None
    assert speed(pace(evenly(1, 0.5))) is None


def test_the_time_left_is_that_of_the_steps_to_come_and_of_the_evaluations_between_them() -> None:
    """A hundred steps of half a second, of which each had cost a tenth more in evaluations."""
    found = pace(evenly(20, 0.5))
    assert time_left_s(found, 20, 120, 0.0) == pytest.approx(50.0)
    assert time_left_s(found, 20, 120, 2.0) == pytest.approx(60.0)


@pytest.mark.parametrize(("done", "total"), [(20, 0), (0, 100), (100, 100), (150, 100), (20, inf), (20, nan)])
def test_where_no_end_is_in_sight_nothing_is_said(done: int, total: float) -> None:
    """No total, no step, or more steps than were announced."""
    assert time_left_s(pace(evenly(20, 0.5)), done, total, 0.0) is None
    assert time_left_s(pace(evenly(1, 0.5)), 1, 100, 0.0) is None
    assert time_left_s(None, 20, 100, 0.0) is None
