"""Goodput on credit: what is shown of a step before its end, and what its record then adds."""

from __future__ import annotations

import pytest

from torchobs import catalog
from torchobs.flight.format.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.metrics import fold
from torchobs.flight.metrics.goodput import STATES, clear_credit, credit, credited
from torchobs.flight.metrics.totals import Totals, Word

SHARES = ("data", "forward", "backward", "optimizer", "other", "evaluation", "checkpoint", "compile")


def empty() -> Totals:
    """No step yet."""
    totals = Totals(bytearray(8 * 512))
    totals.clear(0)
    return totals


def step(number: int, **spent_s: float) -> StepRecord:
    """A step with these seconds."""
    phases = tuple(spent_s.get(name, 0.0) for name in SHARES)
    return StepRecord(number, number, number, RecordKind.STEP, 0, 0, sum(phases[:5]), 0.0, 0.0, 0.0, phases, 0, 0, 1.0)


def give(totals: Totals, after: int, whole_s: float, **seconds: float) -> None:
    """Credit so much of the step after that one."""
    credit(totals, after, [seconds.get(state, 0.0) for state in STATES], whole_s)


def goodput(totals: Totals) -> dict[str, float]:
    """What is not zero."""
    values = totals.floats[Word.GOODPUT : Word.GOODPUT + len(catalog.GOODPUT_STATES)]
    return {state: value for state, value in zip(catalog.GOODPUT_STATES, values, strict=True) if value}


def test_an_evaluation_is_shown_while_it_lasts_and_counted_once() -> None:
    """Ten seconds in, then twelve, then the step's record with fifteen: fifteen."""
    totals = empty()
    fold.fold(totals, [step(1, forward=1.0)])
    give(totals, 1, 10.0, evaluation=10.0)
    assert goodput(totals) == {"productive": 1.0, "evaluation": 10.0}
    give(totals, 1, 12.0, evaluation=12.0)
    give(totals, 1, 12.0, evaluation=11.0)
    assert goodput(totals)["evaluation"] == 12.0
    fold.fold(totals, [step(2, evaluation=15.0, forward=2.0)])
    assert goodput(totals) == {"productive": 3.0, "evaluation": 15.0}
    assert not any(credited(totals))
    fold.fold(totals, [step(3, forward=1.0)])
    assert goodput(totals) == {"productive": 4.0, "evaluation": 15.0}


def test_no_state_steps_back_and_the_whole_is_right_when_it_turns_out_otherwise() -> None:
    """What was shown as waiting for data was an evaluation: the data keeps it, the evaluation gets less."""
    totals = empty()
    give(totals, 0, 8.0, data=8.0)
    fold.fold(totals, [step(1, evaluation=9.0, forward=3.0)])
    assert goodput(totals) == pytest.approx({"data": 8.0, "evaluation": 3.0, "productive": 1.0})
    assert sum(goodput(totals).values()) == pytest.approx(12.0)


def test_idle_stays_idle_when_training_goes_on() -> None:
    """A step that stood still for a minute was not productive for it."""
    totals = empty()
    give(totals, 0, 60.0, idle=60.0)
    fold.fold(totals, [step(1, forward=61.0, backward=1.0)])
    assert goodput(totals) == pytest.approx({"idle": 60.0, "productive": 2.0})


def test_a_skipped_step_has_what_is_left_of_it() -> None:
    """Not what was shown as something else."""
    totals = empty()
    give(totals, 0, 2.0, data=2.0)
    fold.fold(totals, [step(1, data=2.0, forward=1.0)._replace(flags=StepFlag.SKIPPED)])
    assert goodput(totals) == {"data": 2.0, "skipped": 1.0}


def test_more_credit_than_a_step_had_is_the_next_one_s() -> None:
    """An end that was provisional: what was credited after it belongs to the step after."""
    totals = empty()
    give(totals, 0, 20.0, evaluation=19.0)
    fold.fold(totals, [step(1, forward=1.0)])
    assert goodput(totals) == {"evaluation": 19.0}
    fold.fold(totals, [step(2, evaluation=19.0, forward=2.0)])
    assert sum(goodput(totals).values()) == pytest.approx(22.0)
    assert sum(credited(totals)) == pytest.approx(0.0)


def test_never_more_than_has_passed() -> None:
    """Shown first as waiting for data, then as an evaluation: together what has passed."""
    totals = empty()
    give(totals, 0, 10.0, data=10.0)
    give(totals, 0, 12.0, evaluation=12.0)
    assert goodput(totals) == pytest.approx({"data": 10.0, "evaluation": 2.0})


def test_credit_for_a_step_that_has_ended_is_none() -> None:
    """The sampler looked before its record came."""
    totals = empty()
    fold.fold(totals, [step(1, forward=1.0)])
    give(totals, 0, 10.0, evaluation=10.0)
    assert goodput(totals) == {"productive": 1.0}


def test_credit_without_a_record_to_come_stays() -> None:
    """Hooks were off for a while: nothing is taken from the next step."""
    totals = empty()
    give(totals, 0, 5.0, idle=5.0)
    clear_credit(totals)
    fold.fold(totals, [step(1, forward=1.0)])
    assert goodput(totals) == {"idle": 5.0, "productive": 1.0}


@pytest.mark.parametrize("cut", range(1, 4))
def test_how_records_are_cut_into_batches_does_not_matter(cut: int) -> None:
    """To the last bit, as everything that is folded."""
    steps = [step(number, forward=0.1 * number, evaluation=0.3) for number in range(1, 5)]
    whole, parts = empty(), empty()
    for totals in (whole, parts):
        give(totals, 0, 0.7, evaluation=0.7)
    fold.fold(whole, steps)
    fold.fold(parts, steps[:cut])
    fold.fold(parts, steps[cut:])
    assert bytes(whole.buffer) == bytes(parts.buffer)
