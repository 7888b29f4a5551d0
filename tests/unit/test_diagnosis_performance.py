"""What is said of time, data and checkpoints of a dead run: the sentences, from numbers alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diagnosis_files import PHASES, START_S, fact, facts, step, steps, told
from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose


def test_a_step_that_took_very_long_is_told_though_the_run_went_on() -> None:
    """A stopped process, a file system that came back: the long step of a run that finished; an evaluation is none."""
    stood = step(150, duration_s=160.1, phase_s={**PHASES, "forward": 160.0})
    evaluated = step(160, duration_s=300.0)
    history = [*steps(149), stood, *steps(300)[150:159], evaluated, *steps(300)[160:]]
    text = told(facts(history, state="finished", reason="finished"))["held_up"]
    assert text == "Step 150 took 2 min 40 s, where 100 ms was usual, most of it in the phase forward."


@pytest.mark.parametrize(
    ("streak", "severity", "more"),
    [(2.0, "error", ". The last one that was is of step 20."), (0.0, "info", "; a later one was."), (None, "warning", ".")],
)
def test_checkpoints_that_could_not_be_saved_are_told(streak: float | None, severity: str, more: str) -> None:
    """An error while none was saved later, nothing to look at once one was; neither is asserted of a damaged file."""
    said = {"exception.type": "builtins.OSError", "saved_step": 20}
    events = [fact(catalog.EVENT_CHECKPOINT_FAILED, at, at * 10, **said) for at in (3, 6)]
    values: dict[Any, Any] = {(catalog.CHECKPOINTS, "failed"): 2, catalog.CHECKPOINT_FAILURE_STREAK: streak}
    found = diagnose(facts(steps(90), state="finished", reason="finished", events=events, values=values))
    (one,) = (finding for finding in found if finding.kind == "checkpoint_failed")
    assert (one.long, one.severity) == (f"2 checkpoints could not be saved (OSError){more}", severity)


@pytest.mark.parametrize(
    ("free", "more"),
    [(1 << 20, ": 1 MiB were left on the file system, a checkpoint takes 8 MiB"), (1 << 30, ""), (None, "")],
)
def test_a_full_file_system_is_told_as_the_cause(free: int | None, more: str) -> None:
    """Torch's writer raises a ``RuntimeError`` about a position; and of no checkpoint at all it is said, too."""
    said = {"exception.type": "builtins.RuntimeError", "saved_step": 0, "needed": 8 << 20}
    event = fact(catalog.EVENT_CHECKPOINT_FAILED, 6, 60, **said, **({} if free is None else {"free": free}))
    values: dict[Any, Any] = {(catalog.CHECKPOINTS, "failed"): 1, catalog.CHECKPOINT_FAILURE_STREAK: 1}
    found = diagnose(facts(steps(90), state="finished", reason="finished", events=[event], values=values))
    (one,) = (finding for finding in found if finding.kind == "checkpoint_failed")
    assert one.long == f"1 checkpoint could not be saved (RuntimeError{more}). None was before."


def test_what_is_lost_since_the_last_checkpoint_is_told() -> None:
    """In steps and in time; of a run without one that all of it is."""
    saved = facts(steps(100), values={catalog.CHECKPOINT_TIMESTAMP: START_S + 7.05})
    assert told(saved)["checkpoint_age"] == (
        "The last checkpoint was complete 2.95 s before the end: 30 steps must be done again."
    )
    late = facts(steps(100), values={catalog.CHECKPOINT_TIMESTAMP: START_S + 10.0377})
    assert told(late)["checkpoint_age"] == "The last checkpoint was complete at the end: no step must be done again."
    assert "all of its 10 min" in told(facts(steps(100), last_s=START_S + 600))["no_checkpoint"]


def test_steps_that_became_slow_name_the_phase() -> None:
    """For ten seconds at least, whatever the steps' number: ten steps of a second are as good as a thousand of 10 ms."""
    slow = {"data": 0.21, "forward": 0.02, "backward": 0.05, "optimizer": 0.01, "other": 0.01}
    history = [*steps(600), *(step(n, duration_s=0.3, phase_s=slow) for n in range(601, 635))]
    assert told(facts(history))["slowdown"] == (
        "Its last 34 steps (10.2 s) took 300 ms each, usual was 100 ms; 100 % of the difference is data."
    )
    assert "slowdown" not in told(facts(history[:-10]))


def test_waiting_for_data_is_told_from_a_fifth_of_the_time_on() -> None:
    """With what the workers had ready."""
    values = {
        (catalog.STEP_PHASE_TIME, "data"): 30.0,
        (catalog.STEP_PHASE_TIME, "forward"): 70.0,
        catalog.DATA_BATCHES_READY: 0.0,
    }
    assert told(facts(steps(100), values=values))["data"].startswith(
        "Training waited for its data: 30 % of the time of its steps. Its workers"
    )
    assert "data" not in told(facts(steps(100), values={**values, (catalog.STEP_PHASE_TIME, "data"): 10.0}))


def test_one_long_wait_for_data_is_not_called_a_lack_of_workers() -> None:
    """A worker that slept, or a file system that hung: the step is named, and more workers would not help."""
    values = {
        (catalog.STEP_PHASE_TIME, "data"): 40.0,
        (catalog.STEP_PHASE_TIME, "forward"): 10.0,
        catalog.DATA_BATCHES_READY: 0.0,
    }
    stalled = step(101, duration_s=40.0, phase_s={**PHASES, "data": 39.5})
    assert told(facts([*steps(100), stalled], values=values))["data"] == (
        "Training waited for its data: 80 % of the time of its steps. Most of it was one wait of 39.5 s, in step 101: "
        "something stalled there."
    )


def test_what_was_not_watched_is_told() -> None:
    """A diagnosis that is blind says so."""
    values = {
        (catalog.PROBE_DISABLED, "gradients"): 1.0,
        (catalog.PROBE_DISABLED, "loss"): 0.0,
        (catalog.FLIGHT_DROPPED, "event"): 3,
    }
    found = told(facts(steps(100), values=values))
    assert found["probes_off"] == "Not watched, because the probe failed: gradients."
    assert found["dropped"] == "Did not fit the file: 3 events."
