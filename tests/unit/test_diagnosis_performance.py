"""What is said of time, data and checkpoints of a dead run: from numbers alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diagnosis_files import PHASES, START_S, fact, facts, step, steps, told
from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose

STARVED: dict[Any, float] = {
    (catalog.STEP_PHASE_TIME, "data"): 40.0, (catalog.STEP_PHASE_TIME, "forward"): 60.0, catalog.DATA_BATCHES_READY: 0.0,
}  # fmt: skip


def test_a_step_that_took_very_long_is_told_though_the_run_went_on() -> None:
    """A stopped process, a file system that came back: the long step of a run that finished; an evaluation is none."""
    stood = step(150, duration_s=160.1, phase_s={**PHASES, "forward": 160.0})
    history = [*steps(149), stood, *steps(300)[150:159], step(160, duration_s=300.0), *steps(300)[160:]]
    text = told(facts(history, state="finished", reason="finished"))["held_up"]
    assert text == "Step 150 took 2 min 40 s, where 100 ms was usual, most of it in the phase forward."


@pytest.mark.parametrize(
    ("streak", "free", "kind", "said"),
    [
        (
            2.0,
            None,
            "checkpoint_failed",
            "2 checkpoints could not be saved (OSError), and none was since. The last one that was",
        ),
        (
            2.0,
            1 << 20,
            "checkpoint_failed",
            "(OSError: 1 MiB were left on the file system, a checkpoint takes 8 MiB), and none",
        ),
        (0.0, 1 << 30, "checkpoint_failed_once", "2 checkpoints could not be saved (OSError); a later one was."),
    ],
)
def test_checkpoints_that_could_not_be_saved_are_told(streak: float, free: int | None, kind: str, said: str) -> None:
    """An error while none was saved later, nothing to look at once one was; with the cause, if there was no room."""
    given = {"exception.type": "builtins.OSError", "saved_step": 20, "needed": 8 << 20, **({"free": free} if free else {})}
    events = [fact(catalog.EVENT_CHECKPOINT_FAILED, at, at * 10, **given) for at in (3, 6)]
    values: dict[Any, Any] = {(catalog.CHECKPOINTS, "failed"): 2, catalog.CHECKPOINT_FAILURE_STREAK: streak}
    found = diagnose(facts(steps(90), state="finished", reason="finished", events=events, values=values))
    (one,) = (finding for finding in found if finding.kind.startswith("checkpoint_failed"))
    assert (one.kind, said in one.long, one.severity) == (kind, True, "error" if streak else "info")


def test_what_is_lost_since_the_last_checkpoint_is_told() -> None:
    """In steps and in time; without one nothing, for something unseen may have saved."""
    saved = facts(steps(100), values={catalog.CHECKPOINT_TIMESTAMP: START_S + 7.05})
    text = "The last checkpoint was complete 2.95 s before the end: 30 steps must be done again."
    assert told(saved)["checkpoint_age"] == text
    late = facts(steps(100), values={catalog.CHECKPOINT_TIMESTAMP: START_S + 10.0377})
    assert told(late)["checkpoint_age"] == "The last checkpoint was complete at the end: nothing has to be done again."
    assert "checkpoint_age" not in told(facts(steps(100), last_s=START_S + 600))


def test_steps_that_became_slow_name_the_phase() -> None:
    """For ten seconds at least, whatever the steps' number: ten steps of a second are as good as a thousand of 10 ms."""
    slow = {"data": 0.21, "forward": 0.02, "backward": 0.05, "optimizer": 0.01, "other": 0.01}
    history = [*steps(600), *(step(n, duration_s=0.3, phase_s=slow) for n in range(601, 635))]
    text = "The last 34 steps (10.2 s) took 300 ms each, usual was 100 ms; 100 % of the difference is data."
    assert told(facts(history))["slowdown"] == text
    assert "slowdown" not in told(facts(history[:-10]))


def test_steps_that_are_compiled_again_and_again_have_become_slow() -> None:
    """Compilation is no part of a step's duration; the run is slower by it all the same."""
    history = [*steps(600), *(step(n, duration_s=0.1, phase_s={**PHASES, "compile": 0.9}) for n in range(601, 611))]
    assert told(facts(history))["slowdown"] == (
        "The last 10 steps (10 s) took 1 s each, usual was 100 ms; 100 % of the difference is compile."
    )


def test_waiting_for_data_is_told_from_a_fifth_of_the_time_on() -> None:
    """With what the workers had ready; one long wait is not called a lack of workers."""
    found = told(facts(steps(100), values=STARVED))["data"]
    assert found.startswith("Training waited for its data: 40 % of the time of its steps. Its workers had no batch ready")
    assert "data" not in told(facts(steps(100), values={**STARVED, (catalog.STEP_PHASE_TIME, "data"): 10.0}))
    stalled = step(101, duration_s=40.0, phase_s={**PHASES, "data": 39.5})
    found = told(facts([*steps(100), stalled], values=STARVED))["data"]
    assert found.endswith(" Most of it was one wait of 39.5 s, in step 101: something stalled there.")


def test_what_was_not_watched_is_told() -> None:
    """A diagnosis that is blind says so."""
    off = {(catalog.PROBE_DISABLED, "gradients"): 1.0, (catalog.PROBE_DISABLED, "loss"): 0.0}
    found = told(facts(steps(100), values={**off, (catalog.FLIGHT_DROPPED, "event"): 3}))
    assert found["probes_off"] == "Not watched, because the probe failed: gradients."
    assert found["dropped"] == "Did not fit the flight file: 3 events."


def test_a_leak_leads_with_what_grew_how_much_and_where() -> None:
    """The tensors, else the line, else that it is not Python's."""
    attributes = {"space": "host", "grown": 195 << 20, "steps": 40}
    tensors, lines = ["244 tensors float32[200000] on cpu, 186 MiB"], ["train.py:23 2,000 more, 95 MiB"]

    def words(**rows: list[str]) -> str:
        return told(facts(steps(90), events=[fact(catalog.EVENT_MEMORY_LEAK, 6.0, 60, **attributes, **rows)]))["memory_leak"]

    grew = "It grew by 195 MiB in 40 steps."
    assert words(tensors=tensors, lines=lines) == f"Host memory leaks: {tensors[0]}, made at train.py:23. {grew}"
    assert words(lines=lines) == f"Host memory leaks: train.py:23 2,000 more, 95 MiB. {grew}"
    assert "no object of Python's became more, look at native code" in words()
