"""What is said of a dead run first: the sentences, from numbers alone."""

from __future__ import annotations

import math

import pytest

from tests.diagnosis_files import START_S, fact, facts, step, steps, told
from torchobs import catalog
from torchobs.catalog import RANK_STATES
from torchobs.cli.run import summary_lines
from torchobs.diagnosis.diagnosis import diagnose, diagnose_run
from torchobs.diagnosis.endings import first_failed
from torchobs.diagnosis.rank_report import Step
from torchobs.ranks.state import MemoryUse

NAN = math.nan
PART = "(its steps are not in this part of the file)"
ODD = fact(catalog.EVENT_ANOMALY, 2.0, 20, kind="nonfinite_loss", value=NAN, baseline=2.0)
UNKNOWN = "The loss was not finite in 21 steps, and whether it recovered is not in this part of the file."
RECOVERED = "The loss was not finite in 21 steps, and recovered."
WRONG = [step(number, NAN) for number in range(20, 41)]


def test_a_healthy_run_that_finished_has_one_sentence() -> None:
    """Nothing is said where there is nothing to say."""
    (only,) = diagnose(facts(steps(300), state="finished", reason="finished"))
    assert only.text == "Rank 0 finished in order after step 300; it ran for 30 s since init()."
    assert only.severity == "info"


def test_a_run_without_a_step_is_told_what_is_seen() -> None:
    """A loop that updates parameters by hand looks like that; the sentence says how it would be seen."""
    (only,) = diagnose(facts([], state="finished", reason="finished"))
    hint = "no gradient was cleared after a change of the parameters by hand (torchobs.step() says where steps end)."
    assert only.text.endswith(f", without a step: no optimizer of torch's stepped, and {hint}")


@pytest.mark.parametrize("count", [0, 3])
def test_what_a_run_without_a_step_lacks_is_told_unless_it_stepped_later(count: int) -> None:
    """The event is from before the first step, which may have come after hundreds of micro-batches."""
    event = fact(catalog.EVENT_LOOP_MISTAKE, 1.0, kind="never_stepped", optimizer="SGD", backward_passes=1_234)
    found = told(facts(steps(count), state="finished", reason="finished", events=[event]))
    said = "There were 1,234 backward passes or more, and no step of the optimizer (SGD): optimizer.step() is missing."
    assert found.get("never_stepped") == (None if count else said)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("finished", "Rank 0 finished in order after 0 s since init(); its steps are not in this part of the file."),
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


def test_an_exception_is_told_with_its_message_and_the_parameters_that_it_means() -> None:
    """Promise: what ended a rank is in one sentence, and the names that torch gives as indices are in another."""
    raised = fact(
        catalog.EVENT_EXCEPTION, 5.0, 50, exception__type="builtins.RuntimeError", exception__message="bad shape",
        location="net.py:7 in f", unused=["head.weight", "head.bias"], unused_count=9, unused_of="Net",
    )  # fmt: skip
    report = facts(steps(50), state="failed", reason="exception", events=[raised])
    assert diagnose(report)[0].text == (
        'Rank 0 ended by RuntimeError "bad shape" at net.py:7 in f, after step 50. '
        "Parameters of Net without a gradient: head.weight, head.bias and 7 more."
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (143, "was told to end (SIGTERM: by the scheduler, the launcher or a person) after step 50"),
        (129, "was terminated by SIGHUP after step 50"),
        (152, "was terminated by SIGXCPU after step 50"),
    ],
)
def test_a_signal_that_ended_a_rank_is_named(code: int, said: str) -> None:
    """Who sent it, and what for, is not asserted but for SIGTERM."""
    (only,) = diagnose(facts(steps(50), state="failed", reason="terminated", exit_code=code))
    assert only.text.startswith(f"Rank 0 {said}, in the phase")
    assert only.severity == "warning"


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


def test_a_second_training_thread_is_told() -> None:
    """Its steps are in no number: a run of which half is missing is not well."""
    events = [fact(catalog.EVENT_OTHER_THREAD, 1.0, thread="ThreadPoolExecutor-0_1")]
    said = told(facts(steps(400), state="finished", reason="finished", events=events))["other_thread"]
    assert "steps of thread ThreadPoolExecutor-0_1 are not recorded" in said


def test_what_cost_the_training_is_a_warning_and_stands_in_the_summary() -> None:
    """Nothing was learned in parameters that no optimizer has: such a run was not all well."""
    left = fact(catalog.EVENT_LEFT_OUT_PARAMETERS, 4.0, 400, parameters=["actor.weight"], parameters_affected=1)
    run = facts(steps(900), state="finished", reason="finished", events=[left])
    assert diagnose_run([run]).verdict.text.startswith("Worth a look. ")
    assert any("in no optimizer: nothing was learned there" in line for line in summary_lines([run], []))


def test_a_run_that_a_person_interrupted_is_no_trouble() -> None:
    """Ctrl-C is what was wanted."""
    alone = {"world_size": 1, "local_world_size": 1}
    run = facts(steps(192), state="failed", reason="interrupted", exit_code=130, resource=alone)
    assert diagnose_run([run]).verdict.text.startswith("All well. Interrupted by Ctrl-C after 19 s: 1 rank, 192 steps")


def test_left_out_parameters_are_taken_back() -> None:
    """The last event says which are left, if any."""
    left = {"parameters": ["actor.weight"], "parameters_affected": 1, "optimizer": "Adam"}
    events = [fact(catalog.EVENT_LEFT_OUT_PARAMETERS, 4.0, 400, **left)]
    assert "had not stepped by step 400" in told(facts(steps(900), events=events))["left_out"]
    events.append(fact(catalog.EVENT_LEFT_OUT_PARAMETERS, 7.0, 700, parameters=[], parameters_affected=0, optimizer="Adam"))
    assert "left_out" not in told(facts(steps(900), events=events))
