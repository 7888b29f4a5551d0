"""What is said of a dead run first: the sentences, from numbers alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.diagnosis_files import PHASES, START_S, fact, facts, step, steps
from torchobs import catalog
from torchobs.catalog import RANK_STATES
from torchobs.diagnosis.compare import first_failed
from torchobs.diagnosis.diagnosis import diagnose, worst
from torchobs.diagnosis.rank_report import RankReport, Step
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks.state import MemoryUse

NAN = math.nan


def told(of: RankReport) -> dict[str, str]:
    """The diagnosis by kind."""
    return {finding.kind: finding.text for finding in diagnose(of)}


def test_a_healthy_run_that_finished_has_one_sentence() -> None:
    """Nothing is said where there is nothing to say."""
    (only,) = diagnose(facts(steps(300), state="finished", reason="finished"))
    assert only.text == "Rank 0 finished in order after step 300; it ran for 30 s."
    assert only.severity == "info"


def test_a_run_without_a_step_is_told_what_is_seen() -> None:
    """A loop that updates parameters by hand looks like that; the sentence says how it would be seen."""
    (only,) = diagnose(facts([], state="finished", reason="finished"))
    hint = "no gradient was cleared after a change of the parameters by hand (torchobs.step() says where steps end)."
    assert only.text.endswith(f", without a step: no optimizer of torch's stepped, and {hint}")


@pytest.mark.parametrize("count", [0, 3])
def test_an_optimizer_that_never_stepped_is_told_unless_it_did_later(count: int) -> None:
    """The event is from before the first step, which may have come after hundreds of micro-batches."""
    event = fact(catalog.EVENT_LOOP_MISTAKE, 1.0, kind="never_stepped", optimizer="SGD", backward_passes=1_234)
    found = told(facts(steps(count), state="finished", reason="finished", events=[event]))
    said = "There were 1,234 backward passes or more, and no step of the optimizer (SGD): optimizer.step() is missing."
    assert found.get("never_stepped") == (None if count else said)


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("log", "born in log in blocks.3 (train.py:9)."),
        ("compiled_function", "torchobs.debug.trace_nan(model, batch) runs them one by one, and names one."),
    ],
)
def test_a_region_of_which_no_operator_is_known_is_told_as_that(operator: str, said: str) -> None:
    """With the call that names it."""
    event = fact(
        catalog.EVENT_NONFINITE_ORIGIN, 1.0, origin="operator", operator=operator, module="blocks.3", location="train.py:9"
    )
    found = told(facts(steps(3), events=[event]))
    assert found["nonfinite_origin"].endswith(said)
    assert ("born in a compiled region in blocks.3 (train.py:9)" in found["nonfinite_origin"]) == (operator != "log")


def test_a_step_that_took_very_long_is_told_though_the_run_went_on() -> None:
    """A stopped process, a file system that came back: the long step of a run that finished; an evaluation is none."""
    stood = step(150, duration_s=160.1, phase_s={**PHASES, "forward": 160.0})
    evaluated = step(160, duration_s=300.0)
    history = [*steps(149), stood, *steps(300)[150:159], evaluated, *steps(300)[160:]]
    text = told(facts(history, state="finished", reason="finished"))["held_up"]
    assert text == "Step 150 took 2 min 40 s, where 100 ms was usual, most of it in the phase forward."


SINCE_WHEN = "The loss turned NaN in step 100, where 2.5 was usual. It trained on for 9,900 steps with it."
GONE = "The loss has been NaN since step 9,000 or before: older steps are gone from the file."


@pytest.mark.parametrize(("counted", "said"), [(9_901, SINCE_WHEN), (500, GONE), (30_000, GONE)])
def test_a_loss_that_turned_nan_long_ago_is_dated_by_its_event(counted: int, said: str) -> None:
    """The steps of that time are gone from the file; a NaN that had recovered in between is not taken for the beginning."""
    history = [step(number, NAN, NAN) for number in range(9_000, 10_001)]
    event = fact(catalog.EVENT_ANOMALY, 10.1, 100, kind="nonfinite_loss", value=NAN, baseline=2.5)
    found = told(facts(history, events=[event], values={(catalog.ANOMALIES, "nonfinite_loss"): counted}))
    assert found["nonfinite_loss"] == said


def test_a_loss_that_turned_nan_is_told_with_the_gradient_before_it_and_the_rate() -> None:
    """The step, what the gradient norm did before, the learning rate, and how much was wasted."""
    history = [*steps(808), step(809, 2.0, 40.0), step(810, 3.0), step(811, 4.0), *(step(n, NAN, NAN) for n in range(812, 822))]
    text = told(facts(history))["nonfinite_loss"]
    assert text == (
        "The loss turned NaN in step 812, 3 steps after the gradient norm rose 40-fold (from 1 to 40); the learning rate was "
        "0.001. It trained on for 9 steps with it."
    )


PART = "(its steps are not in this part of the file)"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("finished", "Rank 0 finished in order after 0 s; its steps are not in this part of the file."),
        ("lost", f"Rank 0 vanished without a word {PART}: killed (SIGKILL), os._exit or"),
        ("exit_code", f"Rank 0 left with exit status 0, {PART}."),
    ],
)
def test_of_a_part_without_steps_it_is_not_said_that_there_were_none(reason: str, said: str) -> None:
    """They may be in what is missing; by the totals it is known how far it came."""
    assert diagnose(facts([], state="lost", reason=reason, partial=True))[0].text.startswith(said)
    counted = diagnose(facts([], state="lost", reason=reason, partial=True, values={catalog.STEPS: 40}))[0].text
    assert "after step 40" in counted
    assert "not in this part" not in counted


def test_of_a_part_without_its_live_words_the_end_is_not_known() -> None:
    """Nor which rank failed first, nor whether it stood still, nor how old its checkpoint was."""
    values = {catalog.CHECKPOINT_TIMESTAMP: START_S + 1, catalog.STEPS: 50}
    part = facts(steps(50), reason="", partial=True, end_known=False, last_s=START_S + 3600, values=values)
    (only,) = diagnose(part)
    assert (only.kind, only.severity) == ("end_unknown", "warning")
    assert only.text == "How rank 0 ended is not in this part of the file; it had come to step 50 at least."
    assert diagnose(facts([], reason="", partial=True, end_known=False))[0].text.endswith("; nor are its steps.")
    assert first_failed([part]) == (None, "")


ODD = fact(catalog.EVENT_ANOMALY, 2.0, 20, kind="nonfinite_loss", value=NAN, baseline=2.0)
UNKNOWN = "The loss was not finite in 21 steps, and whether it recovered is not in this part of the file."
RECOVERED = "The loss was not finite in 21 steps, and recovered."
WRONG = [step(number, NAN) for number in range(20, 41)]


@pytest.mark.parametrize(
    ("history", "counted", "said"),
    [
        ([], 40, UNKNOWN),
        (steps(19), 40, UNKNOWN),
        ([*steps(19), *WRONG, *steps(45)[40:]], 60, RECOVERED),
        ([*steps(19), *WRONG[4:], *steps(45)[40:]], 60, UNKNOWN),
        (steps(60)[50:], 60, RECOVERED),
    ],
)
def test_of_a_part_a_loss_is_said_to_have_recovered_only_where_that_is_seen(
    history: list[Step], counted: int, said: str
) -> None:
    """A finite loss after the last one that was not, or in the last step of all."""
    values = {(catalog.ANOMALIES, "nonfinite_loss"): 21, catalog.STEPS: counted}
    part = facts(history, state="finished", reason="finished", partial=True, values=values, events=[ODD])
    assert told(part)["nonfinite_loss"] == said


def test_of_a_part_without_the_newest_steps_no_stall_is_told() -> None:
    """The hour after the last step that is here may have been full of steps; where the newest one is here, it was not."""
    last_s = START_S + 3600
    assert "stalled" not in told(facts(steps(50), values={catalog.STEPS: 36_000}, partial=True, last_s=last_s))
    assert "stalled" not in told(facts(steps(50), partial=True, last_s=last_s))
    assert "stalled" in told(facts(steps(50), values={catalog.STEPS: 50}, partial=True, last_s=last_s))


def test_of_a_part_without_its_totals_no_checkpoint_is_missed() -> None:
    """They would have told of it."""
    assert "no_checkpoint" not in told(facts(steps(50), partial=True, last_s=START_S + 3600))


def test_a_gradient_that_was_not_finite_first_is_named_before_a_norm_that_rose() -> None:
    """The weights took it over: the loss of the step after it is the first to show it."""
    history = [*steps(100), step(101, 2.5, math.inf), step(102, NAN, NAN)]
    assert "1 step after its gradient was not finite while the loss still was 2.5" in told(facts(history))["nonfinite_loss"]


@pytest.mark.parametrize(
    ("unmeasured", "said"),
    [
        (0, " without a warning in the gradient norm;"),
        (9, ", 10 steps after the gradient norm was last measured (1);"),
        (60, "The loss turned NaN in step 161;"),
    ],
)
def test_of_norms_that_were_not_measured_no_silence_is_told(unmeasured: int, said: str) -> None:
    """They may have grown, step by step."""
    history = [*steps(100), *(step(100 + number, 2.0, None) for number in range(1, unmeasured + 1))]
    assert said in told(facts([*history, step(101 + unmeasured, NAN, NAN)]))["nonfinite_loss"]


def test_a_vanished_gradient_is_told_with_the_steps_that_were_measured() -> None:
    """Eight of twelve are most, eight of thousands of steps are none."""
    values = {
        (catalog.ANOMALIES, "gradient_vanishing"): 8,
        catalog.GRAD_NORM_DISTRIBUTION: Distribution((12, 0), 0.0, 0.0, 0.0),
    }
    text = told(facts(steps(100), values=values))["gradient_vanishing"]  # type: ignore[arg-type]
    assert text == "The gradient norm was vanishingly small, or zero, in 8 steps of the 12 measured."


def test_a_step_that_the_scaler_skipped_is_no_cause() -> None:
    """Its gradient never reached the weights."""
    history = [*steps(100), step(101, 2.5, math.inf, skipped=True), step(102, NAN, NAN)]
    assert "not finite while" not in told(facts(history))["nonfinite_loss"]


def test_a_learning_rate_that_leapt_is_told() -> None:
    """What a person asks first."""
    history = [*steps(100), step(101, 2.0, 1.0, learning_rate=1.0), step(102, NAN, NAN, learning_rate=1.0)]
    assert "The learning rate had risen 1,000-fold (from 0.001 to 1) in step 101." in told(facts(history))["nonfinite_loss"]


@pytest.mark.parametrize("turns", [NAN, 1.5e10], ids=["nan", "finite"])
def test_a_learning_rate_that_was_wrong_from_the_start_is_a_suspect(turns: float) -> None:
    """Too few norms for a median are no reason to say that there was no warning in them."""
    values = [(2.3, 2.18), (90.0, 61.2), (4e8, 8.2e29), (turns, 1e30)]
    history = [step(number, *each, learning_rate=10.0) for number, each in enumerate(values, 1)]
    events = [fact(catalog.EVENT_ANOMALY, 0.3, 3, kind="loss_spike", value=4e8, baseline=2.3)] if turns > 0 else []
    found = told(facts(history, events=events, values={(catalog.ANOMALIES, "loss_spike"): 1}))
    text = found["nonfinite_loss" if turns != turns else "loss_spike"]  # noqa: PLR0124  # NaN
    assert "It diverged within its first 20 steps: the learning rate, 10, is a suspect." in text
    assert "without a warning" not in text
    if turns != turns:  # noqa: PLR0124  # as above
        assert "1 step after the gradient norm rose" in text


def test_a_learning_rate_is_no_suspect_where_nothing_grew() -> None:
    """A first batch with a NaN in it, or a run that went wrong long after."""
    assert "suspect" not in told(facts([*steps(5), step(6, NAN, NAN)]))["nonfinite_loss"]
    assert "suspect" not in told(facts([*steps(60), step(61, 1e9, 1e9), step(62, NAN, NAN)]))["nonfinite_loss"]


def test_a_warm_up_is_no_leap() -> None:
    """A rate that climbs from nearly nothing in the first steps is a schedule."""
    history = [*(step(n, learning_rate=1e-3 * n / 100) for n in range(1, 101)), step(101, NAN, NAN)]
    assert "had risen" not in told(facts(history))["nonfinite_loss"]


def test_a_loss_that_recovered_is_no_error() -> None:
    """The last one was finite."""
    history = [*steps(100), step(101, NAN, NAN), *(step(n) for n in range(102, 200))]
    found = diagnose(facts(history, state="finished", reason="finished", values={(catalog.ANOMALIES, "nonfinite_loss"): 1}))
    assert [(finding.kind, finding.severity) for finding in found] == [("finished", "info"), ("nonfinite_loss", "warning")]


@pytest.mark.parametrize(
    ("first", "said"), [(1, "The loss was NaN from the first step on"), (900, "since step 900 or before: older steps are gone")]
)
def test_a_loss_that_never_was_finite(first: int, said: str) -> None:
    """From the first step on, or from before the ring's oldest step: both are said."""
    assert said in told(facts([step(n, NAN, NAN) for n in range(first, first + 20)]))["nonfinite_loss"]


def test_an_infinite_loss_is_not_called_nan() -> None:
    """They have different causes."""
    assert "turned infinite in step 51" in told(facts([*steps(50), step(51, math.inf)]))["nonfinite_loss"]


def test_the_layers_of_the_first_nonfinite_gradient_are_named() -> None:
    """Three of them, and how many more."""
    event = fact(
        catalog.EVENT_NONFINITE_GRADIENT, 8.1, 81, layers=["h.0", "h.1", "h.2", "h.3"], layers_affected=5, kinds=["nan"]
    )
    text = told(facts(steps(90), events=[event], values={catalog.GRAD_NONFINITE_STEPS: 2}))["nonfinite_gradient"]
    assert text == "Gradients were NaN first in step 81, in layers h.0, h.1, h.2 and 2 more; in 2 measured steps in all."


def test_a_nonfinite_gradient_is_not_called_the_first_after_steps_without_a_measurement() -> None:
    """Of a fast run every hundredth step is measured: the gradients may have been NaN for ninety-nine."""
    event = fact(catalog.EVENT_NONFINITE_GRADIENT, 8.1, 81, layers=["h.0"], layers_affected=1, kinds=["nan"])
    history = [step(number, 2.0, None) for number in range(1, 91)]
    text = told(facts(history, events=[event], values={catalog.GRAD_NONFINITE_STEPS: 1}))["nonfinite_gradient"]
    assert text == (
        "Gradients were NaN in step 81, in layer h.0; in 1 measured step in all. The steps before it were not measured."
    )


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
    assert (one.text, one.severity) == (f"2 checkpoints could not be saved (OSError){more}", severity)


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
    assert one.text == f"1 checkpoint could not be saved (RuntimeError{more}). None was before."


def test_an_explosion_is_told_once_with_its_rate() -> None:
    """A loss that rose with it repeats neither."""
    history = [*steps(100), *(step(n, 9.0, 80.0, learning_rate=1.0) for n in range(101, 104))]
    events = [
        fact(catalog.EVENT_ANOMALY, 10.1, 101, kind="loss_spike", value=9.0, baseline=2.0),
        fact(catalog.EVENT_ANOMALY, 10.1, 101, kind="gradient_explosion", value=80.0, baseline=1.0),
    ]
    values = {(catalog.ANOMALIES, "loss_spike"): 1, (catalog.ANOMALIES, "gradient_explosion"): 3}
    found = told(facts(history, events=events, values=values))
    assert found["gradient_explosion"].startswith("The gradient norm rose in step 101 to 80, usual was 1; so it did in 2 more")
    assert "had risen 1,000-fold" in found["gradient_explosion"]
    assert found["loss_spike"] == "The loss rose in step 101 to 9, usual was 2."


def test_what_rose_again_is_counted_among_the_steps_that_were_measured() -> None:
    """A norm is measured in one step of ten, a loss in each: 12 of the one and 108 of the other are the same divergence."""
    history = [*steps(100), *(step(n, 9.0, 80.0 if n % 10 == 1 else None) for n in range(101, 231))]
    events = [
        fact(catalog.EVENT_ANOMALY, 10.1, 101, kind="loss_spike", value=9.0, baseline=2.0),
        fact(catalog.EVENT_ANOMALY, 10.1, 101, kind="gradient_explosion", value=80.0, baseline=1.0),
    ]
    values = {(catalog.ANOMALIES, "loss_spike"): 109, (catalog.ANOMALIES, "gradient_explosion"): 13}
    found = told(facts(history, events=events, values=values))
    assert "; so it did in 12 more of the 12 later steps with a measured gradient norm." in found["gradient_explosion"]
    assert "; so it did in 108 more of the 129 later steps with a measured loss." in found["loss_spike"]
    cut = told(facts(history[150:], events=events, values=values))  # the older ones are gone: of how many is not known
    assert "; so it did in 12 more later steps with a measured gradient norm." in cut["gradient_explosion"]


def test_an_exception_of_a_worker_is_told_with_the_worker_and_who_waited_for_it() -> None:
    """Its place is in the worker's code."""
    event = fact(
        catalog.EVENT_EXCEPTION, 5.0, 50, exception__type="builtins.KeyError", location="data.py:7 in load",
        origin="DataLoader worker process 1", reraised="train.py:10 in main",
    )  # fmt: skip
    first = diagnose(facts(steps(50), state="failed", reason="exception", events=[event]))[0]
    assert first.text == (
        "Rank 0 ended by KeyError at data.py:7 in load, in DataLoader worker process 1, awaited at train.py:10 in main, after "
        "step 50."
    )


def test_an_exception_is_told_with_its_place_and_its_root() -> None:
    """Of the main thread: one of another did not end the rank."""
    events = [
        fact(
            catalog.EVENT_EXCEPTION, 5.0, 50, exception__type="builtins.ValueError", location="net.py:7 in f",
            caller="train.py:88 in main", cause__type="builtins.KeyError", cause__location="data.py:3 in get",
        ),
        fact(catalog.EVENT_EXCEPTION, 6.0, 60, exception__type="builtins.OSError", location="x.py:1 in g", thread="watchdog"),
    ]  # fmt: skip
    first = diagnose(facts(steps(50), state="failed", reason="exception", exit_code=1, events=events))[0]
    assert first.text == (
        "Rank 0 ended by ValueError at net.py:7 in f, called at train.py:88 in main, after step 50. At its root was KeyError "
        "at data.py:3 in get."
    )


@pytest.mark.parametrize("reason", ["exception", "lost", "exit_code", "out_of_memory"])
def test_a_thread_that_ended_by_an_exception_is_told_beside_the_end(reason: str) -> None:
    """A prefetch thread fails, and a minute later the main thread, which waits for it, or somebody who kills it."""
    events = [
        fact(catalog.EVENT_EXCEPTION, 2.0, 20, exception__type="builtins.OSError", location="q.py:3 in log", thread="log"),
        fact(
            catalog.EVENT_EXCEPTION, 3.1, 31, exception__type="builtins.ValueError", location="q.py:7 in pre", thread="prefetch"
        ),
        fact(catalog.EVENT_EXCEPTION, 61.1, 31, exception__type="_queue.Empty", location="q.py:12 in <module>"),
    ]
    state = "lost" if reason in {"lost", "out_of_memory"} else "failed"
    found = diagnose(facts(steps(31), state=state, reason=reason, events=events, last_s=START_S + 61.1))
    (thread,) = [finding for finding in found if finding.kind == "thread_exception"]
    assert thread.severity == "warning"
    assert thread.text == (
        "Thread 'prefetch' ended by ValueError at q.py:7 in pre, after step 31, 58 s before the end. So did 1 other "
        "thread before."
    )
    assert found[0].kind != "thread_exception"
    fine = diagnose(facts(steps(31), state="finished", reason="finished", events=events))
    assert "thread_exception" not in {finding.kind for finding in fine}


def test_a_kill_for_memory_is_told_with_its_evidence() -> None:
    """Both kinds: the kernel's count, and how full it was."""
    dead = facts(
        steps(50), reason="out_of_memory", memory=MemoryUse(0.98, 0.5, 4.0), values={catalog.CGROUP_MEMORY_LIMIT: 4.0 * 2**30}
    )
    assert told(dead)["out_of_memory"] == (
        "Rank 0 was likely killed for memory after step 50, in the phase forward: the kernel killed a process of its cgroup 4 "
        "s before its last sign of life and 98 % of its cgroup's memory was taken (limit 4 GiB)."
    )


def test_what_was_reported_shortly_before_the_end_is_told_beside_it() -> None:
    """A worker that was killed a second before; not one of an hour ago, and nothing after an end in order."""
    worker = fact(catalog.EVENT_WORKER_DIED, 9.0, 90, pid=77, code=0, signal="SIGKILL")
    dead = facts(steps(100), state="failed", reason="exception", events=[worker])
    assert told(dead)["data.worker_died"] == "A data loader's worker (pid 77) was ended by SIGKILL, 1 s before the end."
    assert "data.worker_died" not in told(facts(steps(100), state="finished", reason="finished", events=[worker]))
    assert "data.worker_died" not in told(facts(steps(100), events=[worker], last_s=START_S + 3600))


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


def test_a_collapsed_loss_scale_is_an_error() -> None:
    """No scale helps where gradients are NaN."""
    events = [fact(catalog.EVENT_AMP_SCALE_COLLAPSED, 5.0, 50, scaler="0", scale=0.5)]
    values = {(catalog.AMP_SCALE, "0"): 0.25, catalog.STEPS: 100, catalog.AMP_STEPS_SKIPPED: 60}
    found = diagnose(facts(steps(100), events=events, values=values))
    assert worst(found) == "error"
    assert "it ended at 0.25" in told(facts(steps(100), events=events, values=values))["amp_scale_collapsed"]


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


@pytest.mark.parametrize("state", [state for state in RANK_STATES if state in {"alive", "hung", "unresponsive"}])
def test_a_rank_that_lives_is_not_called_dead(state: str) -> None:
    """The report is asked for at any time."""
    (first, *_) = diagnose(facts(steps(50), state=state, reason="", up=True, last_s=START_S + 70))
    assert first.kind == state
    assert (first.severity == "error") == (state != "alive")


def test_every_exit_reason_has_its_sentence() -> None:
    """None falls through to another's."""
    kinds = {reason: diagnose(facts(steps(5), reason=reason))[0].kind for reason in catalog.EXIT_REASONS}
    assert kinds == {reason: reason for reason in catalog.EXIT_REASONS}


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308, 5e-324])
def test_no_number_is_too_odd(value: float | None) -> None:
    """A forged record can hold anything; whatever is said of it, it is said."""
    odd = [step(n, value, value, learning_rate=value, duration_s=value) for n in range(1, 60)]
    assert diagnose(facts([*odd, *steps(3)]))
    assert diagnose(facts([*steps(30), *odd]))


def test_what_an_earlier_model_did_is_no_measure_of_a_later_one() -> None:
    """A second fold begins with a rate and a norm far above those that the first one ended with, and is slower: no findings."""
    first = [step(number, 0.01, 1e-3, learning_rate=1e-6, duration_s=0.1) for number in range(1, 101)]
    later = [step(number, 2.0, 1.0, duration_s=0.3, new_model=number == 101) for number in range(101, 112)]
    lost = step(112, NAN, NAN, duration_s=0.3)
    event = fact(catalog.EVENT_MODEL_CHANGE, 10.1, 101, changes=1, steps_before=100)
    found = told(facts([*first, *later, lost], events=[event], values={catalog.MODEL_CHANGES: 1}))
    assert "slowdown" not in found
    assert found["nonfinite_loss"] == (
        "The loss turned NaN in step 112 without a warning in the gradient norm; the learning rate was 0.001."
    )
    assert found["model_changes"] == (
        "It trained 2 models one after the other, the last one from step 101 on: each is judged by its own past."
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"layers": ["a", "b", "c", "d"], "layers_affected": 12, "layers_measured": 25, "cause": "vanishing", "at": "l"},
            "12 of 25 layers learned nothing (a, b, c and 9 more): the gradient vanishes on its way back to l.",
        ),
        (
            {"layers": ["a", "b"], "layers_affected": 2, "layers_measured": 3, "cause": "dead_units", "at": "b"},
            "2 of 3 layers learned nothing (a, b): nothing but zeros comes into b, the units before it are dead.",
        ),
    ],
)
def test_layers_that_learned_nothing_are_named(given: dict[str, object], said: str) -> None:
    """How many, which, and why."""
    told_of = fact(catalog.EVENT_UNMOVED_LAYERS, 5.0, 200, **given)
    assert told(facts(steps(300), events=[told_of]))["unmoved_layers"] == said


@pytest.mark.parametrize(("left_out", "counted"), [(7, 7), (math.nan, 0), (-1, 0), (1 << 80, 0), ("7", 0), (None, 0)])
def test_what_a_damaged_file_says_was_left_out_is_a_count_or_nothing(left_out: object, counted: int) -> None:
    """JSON admits NaN, and numbers of any length."""
    assert fact(catalog.EVENT_ANOMALY, 1.0, left_out=left_out).count("left_out") == counted


def test_a_second_training_thread_is_told() -> None:
    """Its steps are in no number: a run of which half is missing is not well."""
    events = [fact(catalog.EVENT_OTHER_THREAD, 1.0, thread="ThreadPoolExecutor-0_1")]
    said = told(facts(steps(400), state="finished", reason="finished", events=events))["other_thread"]
    assert "steps of thread ThreadPoolExecutor-0_1 are not recorded" in said


def test_left_out_parameters_are_taken_back() -> None:
    """The last event says which are left, if any."""
    left = {"parameters": ["actor.weight"], "parameters_affected": 1, "optimizer": "Adam"}
    events = [fact(catalog.EVENT_LEFT_OUT_PARAMETERS, 4.0, 400, **left)]
    assert "had not stepped by step 400" in told(facts(steps(900), events=events))["left_out"]
    events.append(fact(catalog.EVENT_LEFT_OUT_PARAMETERS, 7.0, 700, parameters=[], parameters_affected=0, optimizer="Adam"))
    assert "left_out" not in told(facts(steps(900), events=events))


@pytest.mark.parametrize("kind", ["no_gradients", "gradients_stopped"])
def test_an_optimizer_that_gets_gradients_after_all(kind: str) -> None:
    """A later event of the same kind about no parameter takes it back."""
    before = fact(catalog.EVENT_LOOP_MISTAKE, 4.0, 40, kind=kind, parameters=["weight"], parameters_affected=1, optimizer="SGD")
    after = fact(catalog.EVENT_LOOP_MISTAKE, 9.0, 90, kind=kind, parameters=[], parameters_affected=0, optimizer="SGD")
    assert kind in told(facts(steps(90), events=[before]))
    assert kind not in told(facts(steps(90), events=[before, after]))
