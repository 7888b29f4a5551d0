"""How ranks ended and which failed first, who is slow and who fell behind: the sentences, from numbers alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.diagnosis_files import PHASES, START_S, fact, facts, step, steps, told
from torchobs import catalog
from torchobs.catalog import RANK_STATES
from torchobs.cli.run import summary_lines
from torchobs.diagnosis.diagnosis import diagnose, diagnose_run
from torchobs.diagnosis.endings import compare, first_failed
from torchobs.flight.metrics.throughput import Throughput
from torchobs.ranks.state import MemoryUse

if TYPE_CHECKING:
    from torchobs.diagnosis.rank_report import RankReport, Step

NAN = math.nan
PART = "(its steps are not in this part of the file)"
ODD = fact(catalog.EVENT_ANOMALY, 2.0, 20, kind="nonfinite_loss", value=NAN, baseline=2.0)
UNKNOWN = "The loss was not finite in 21 steps, and whether it recovered is not in this part of the file."
RECOVERED = "The loss was not finite in 21 steps, and recovered."
WRONG = [step(number, NAN) for number in range(20, 41)]


def test_a_healthy_run_that_finished_has_one_sentence() -> None:
    """Nothing is said where there is nothing to say."""
    (only,) = diagnose(facts(steps(300), state="finished", reason="finished"))
    assert only.long == "Rank 0 finished in order after step 300; it ran for 30 s since init()."
    assert only.severity == "info"


def test_a_run_without_a_step_is_told_what_is_seen() -> None:
    """A loop that updates parameters by hand looks like that; the sentence says how it would be seen."""
    (only,) = diagnose(facts([], state="finished", reason="finished"))
    assert "without a step: no optimizer of torch's stepped; where steps are made otherwise, torchobs.step()" in only.long
    assert "processes that it started are recorded if they join a process group" in only.long


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
    assert diagnose(facts([], state="lost", reason=reason, partial=True))[0].long.startswith(said)
    counted = diagnose(facts([], state="lost", reason=reason, partial=True, values={catalog.STEPS: 40}))[0].long
    assert "after step 40" in counted
    assert "not in this part" not in counted


def test_of_a_part_without_its_live_words_the_end_is_not_known() -> None:
    """Nor which rank failed first, nor whether it stood still, nor how old its checkpoint was."""
    values = {catalog.CHECKPOINT_TIMESTAMP: START_S + 1, catalog.STEPS: 50}
    part = facts(steps(50), reason="", partial=True, end_known=False, last_s=START_S + 3600, values=values)
    (only,) = diagnose(part)
    assert (only.kind, only.severity) == ("end_unknown", "warning")
    assert only.long == "How rank 0 ended is not in this part of the file; it had come to step 50 at least."
    assert diagnose(facts([], reason="", partial=True, end_known=False))[0].long.endswith("; nor are its steps.")
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
    assert first.long == (
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
    assert first.long == (
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
    assert diagnose(report)[0].long == (
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
    assert only.long.startswith(f"Rank 0 {said}, in the phase")
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
    assert thread.long == (
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
    assert diagnose_run([run]).verdict.long.startswith("Worth a look. ")
    assert any("in no optimizer: nothing was learned there" in line for line in summary_lines([run], []))


def test_a_run_that_a_person_interrupted_is_no_trouble() -> None:
    """Ctrl-C is what was wanted."""
    alone = {"world_size": 1, "local_world_size": 1}
    run = facts(steps(192), state="failed", reason="interrupted", exit_code=130, resource=alone)
    assert diagnose_run([run]).verdict.long.startswith("All well. Interrupted by Ctrl-C after 19 s: 1 rank, 192 steps")


def test_left_out_parameters_are_taken_back() -> None:
    """The last event says which are left, if any."""
    left = {"parameters": ["actor.weight"], "parameters_affected": 1, "optimizer": "Adam"}
    events = [fact(catalog.EVENT_LEFT_OUT_PARAMETERS, 4.0, 400, **left)]
    assert "had not stepped by step 400" in told(facts(steps(900), events=events))["left_out"]
    events.append(fact(catalog.EVENT_LEFT_OUT_PARAMETERS, 7.0, 700, parameters=[], parameters_affected=0, optimizer="Adam"))
    assert "left_out" not in told(facts(steps(900), events=events))


def rank(number: int, *, phases: dict[str, float] | None = None, count: int = 100, **given: object) -> RankReport:
    """One of four ranks."""
    history = [step(n, phase_s=phases or PHASES) for n in range(1, count + 1)]
    given = {"pace": pace_of(phases or PHASES), **given}
    return facts(history, resource={"rank": number, "local_world_size": 2, "world_size": 2}, **given)  # type: ignore[arg-type]


def pace_of(phases: dict[str, float]) -> Throughput:
    """As long as such steps take."""
    times = tuple(phases.get(phase, 0.0) for phase in catalog.PHASES)
    return Throughput(100, sum(times), sum(times), times, 10.0, 10.0, None, None)


def compared(*ranks: RankReport) -> dict[str, str]:
    """What is said of them, by kind."""
    return {finding.kind: finding.long for finding in compare(ranks)}


def test_a_single_rank_is_compared_with_nobody() -> None:
    """Nothing is said."""
    assert compare([rank(0)]) == []


def test_the_rank_whose_own_phases_are_longest_is_the_slowest() -> None:
    """The others wait for it within backward, which is no sign of slowness."""
    slow = {**PHASES, "data": 0.21}
    waits = {**PHASES, "backward": 0.25}
    text = compared(rank(0, phases=waits), rank(1, phases=slow))["slowest_rank"]
    assert text == (
        "Rank 1 was 3.0 times slower than the others in data. It took 210 ms a step for data, and the others 10 ms, who waited."
    )


def test_the_times_told_are_those_of_the_rank_that_is_told() -> None:
    """A rank that has ended was slower still, in another phase; those that live wait for rank 1."""
    ended = rank(3, phases={**PHASES, "forward": 0.9})
    alive = [
        rank(number, phases=phases, state="alive", reason="", up=True)
        for number, phases in enumerate(({**PHASES, "backward": 0.25}, {**PHASES, "data": 0.21}, {**PHASES, "backward": 0.25}))
    ]
    text = compared(*alive, ended)["slowest_rank"]
    assert text.startswith("Rank 1 is ")
    assert text.endswith(" in data. It took 210 ms a step for data, and the others 10 ms, who waited.")


def test_small_differences_have_no_slowest_rank() -> None:
    """Somebody is always last: by less than a tenth of a step it is noise."""
    assert "slowest_rank" not in compared(rank(0), rank(1, phases={**PHASES, "data": 0.0149}))
    short = {"data": 1e-4, "forward": 1e-3}, {"data": 1e-3, "forward": 1e-3}
    assert "slowest_rank" not in compared(*(rank(number, phases=phases) for number, phases in enumerate(short)))


def test_the_first_to_fail_is_told_when_times_are_exact() -> None:
    """Exceptions have dates; the others fail because of it."""
    first = rank(
        1, state="failed", reason="exception", last_s=START_S + 12,
        events=[fact(catalog.EVENT_EXCEPTION, 10.0, 100, exception__type="builtins.ValueError", location="a.py:1 in f")],
    )  # fmt: skip
    second = rank(
        0, state="failed", reason="exception", last_s=START_S + 11,
        events=[fact(catalog.EVENT_EXCEPTION, 10.2, 100, exception__type="torch.DistBackendError", location="b.py:2 in g")],
    )  # fmt: skip
    assert compared(second, first)["first_failed"] == "Rank 1 failed first, 200 ms before rank 0: look there for the cause."


def test_ranks_that_vanished_within_a_heartbeat_have_no_first() -> None:
    """A heartbeat comes every half second: what is closer cannot be told."""
    assert (
        "which was first cannot be told"
        in compared(rank(0, last_s=START_S + 10), rank(1, last_s=START_S + 10.3))["first_failed"]
    )
    assert "Rank 0 failed first" in compared(rank(0, last_s=START_S + 10), rank(1, last_s=START_S + 12))["first_failed"]


def test_one_that_failed_alone_is_named() -> None:
    """The others finished, or run on."""
    alive = rank(0, state="alive", reason="", up=True)
    assert compared(alive, rank(1))["first_failed"].startswith("Only rank 1 failed, at ")


def test_ranks_out_of_step_and_missing_ranks_are_told() -> None:
    """By the step each had come to, and by the size that the launcher gave."""
    assert compared(rank(0), rank(1, count=97))["out_of_step"] == (
        "Rank 1 ended after step 97, the furthest after step 100. 1 rank behind."
    )
    assert "out_of_step" not in compared(rank(0), rank(1))
    many = [facts(steps(10), resource={"rank": n, "local_world_size": 8}) for n in range(6)]
    assert compared(*many)["ranks_missing"].startswith("6 of the 8 ranks of this machine are here")


def raised(number: int, seconds: float, location: str, **attributes: str) -> RankReport:
    """A rank that an exception ended."""
    event = fact(
        catalog.EVENT_EXCEPTION, seconds, 100, exception__type="builtins.RuntimeError", location=location, **attributes
    )
    joined = fact(catalog.EVENT_DISTRIBUTED, 0.1, world_size=2)
    return rank(number, state="failed", reason="exception", last_s=START_S + seconds, events=[joined, event])


def test_a_rank_that_vanished_is_likely_first_when_its_peers_raised_in_collectives() -> None:
    """What the end of a peer looks like: an error of torch.distributed, or of DDP, within backward or as it copies buffers."""
    for location in (
        "torch/autograd/graph.py:979 in _engine_run_backward",
        "torch/nn/parallel/distributed.py:2363 in _distributed_broadcast_coalesced",
        "torch/distributed/distributed_c10d.py:83 in wrapper",
    ):
        pair = [raised(0, 10.1, location), rank(1, last_s=START_S + 9.9)]
        assert compared(*pair)["first_failed"].startswith("Rank 1 vanished, and within 500 ms the others raised in collective")
        found, _ = first_failed(pair)
        assert found is pair[1]


def test_what_became_of_the_others_is_told_as_it_was() -> None:
    """Promise: ranks that the launcher told to end have raised nothing in a collective."""
    ended = rank(0, state="failed", reason="terminated", last_s=START_S + 10.1)
    pair = [ended, rank(1, last_s=START_S + 9.9)]
    assert compared(*pair)["first_failed"] == (
        "Rank 1 vanished, and within 500 ms the others were told to end: it was likely first."
    )
    assert first_failed(pair)[0] is pair[1]


def test_a_rank_whose_last_steps_may_not_be_written_is_not_told_to_be_behind() -> None:
    """Promise: on a disk, what a killed rank did in its last moments is missing; what it would have done long before is not."""
    killed: dict[str, Any] = {"unwritten": True, "count": 97, "last_s": START_S + 9.75}
    assert "out_of_step" not in compared(rank(0), rank(1, **killed))
    assert "out_of_step" in compared(rank(0), rank(1, **{**killed, "last_s": START_S + 9.85}))
    assert "out_of_step" in compared(rank(0), rank(1, **{**killed, "unwritten": False}))
    whole = [rank(number, **killed) for number in range(2)]
    assert diagnose_run(whole).verdict.long.startswith("Trouble. Ended: 2 ranks, 97 steps at least.")
    assert diagnose_run(whole).by_rank[0][0].long.startswith("Rank 0 vanished without a word after step 97 at least, ")
    none = diagnose_run([facts(unwritten=True)])
    assert none.verdict.long == "Trouble. Ended: 1 rank, no step written."
    assert none.by_rank[0][0].long.startswith("Rank 0 vanished without a word before one of its steps was written: ")


def test_a_rank_that_raised_in_its_own_code_is_likely_first_when_its_peers_vanished() -> None:
    """A launcher ends them by SIGTERM then, of which they leave no word."""
    pair = [rank(0, last_s=START_S + 9.9), raised(1, 10.1, "train.py:7 in batch")]
    assert compared(*pair)["first_failed"].startswith("Rank 1 raised in code of its own and the others ended within 500 ms")
    assert first_failed(pair)[0] is pair[1]


def test_ranks_that_raised_the_same_at_one_line_have_no_first() -> None:
    """Promise: milliseconds between them are chance, whoever of them was first; what torch calls from one line is one line."""
    pair = raised(1, 10.0, "train.py:7 in main"), raised(0, 10.003, "train.py:7 in main")
    text = "Both ranks raised RuntimeError at train.py:7, the first by 3 ms, which says nothing."
    assert compared(*pair)["first_failed"] == text
    some = [replace(one, header=replace(one.header, resource={**one.header.resource, "world_size": 16})) for one in pair]
    assert compared(*some)["first_failed"].startswith("Both ranks here raised RuntimeError")
    many = [
        raised(number, 10 + number / 100, "torch/nn/parallel/distributed.py:5 in f", caller="a.py:3 in g")
        for number in range(8)
    ]
    assert compared(*many)["first_failed"] == (
        "All 8 ranks raised RuntimeError at a.py:3, the first by 10 ms, which says nothing."
    )
    ended = rank(8, state="failed", reason="terminated", last_s=START_S + 10.02)
    assert compared(*many, ended)["first_failed"].startswith("8 of the 9 ranks raised RuntimeError at a.py:3, the first by")


def test_ranks_that_raised_the_same_more_than_a_step_apart_have_a_first() -> None:
    """Promise: what a collective or a step may take explains a difference, and no more."""
    history = [step(n, duration_s=2.0) for n in range(1, 101)]
    for seconds, begins in ((1.9, "Both ranks raised"), (2.5, "Rank 1 failed first, 2.5 s before rank 0")):
        pair = [raised(1, 10.0, "train.py:7 in main"), raised(0, 10 + seconds, "train.py:7 in main")]
        assert compared(*(replace(one, steps=tuple(history)) for one in pair))["first_failed"].startswith(begins)


def test_ranks_that_raised_at_different_lines_have_a_first() -> None:
    """Promise: the one whose exception the others' may have followed is named, by milliseconds, too."""
    pair = raised(1, 10.0, "train.py:7 in main"), raised(0, 10.003, "train.py:9 in main")
    assert compared(*pair)["first_failed"].startswith("Rank 1 failed first, 3 ms before rank 0")


def test_what_ended_otherwise_may_have_made_others_raise_the_same() -> None:
    """Promise: of ranks that all raised in a collective none is looked for where another vanished, or raised elsewhere."""
    alike = [raised(number, 10 + number / 1000, "torch/distributed/distributed_c10d.py:83 in wrapper") for number in (0, 1)]
    for cause, begins in (
        (rank(2, last_s=START_S + 10.2), "Rank 2 vanished, and within 500 ms the others raised in collective operations"),
        (raised(2, 10.1, "train.py:7 in batch"), "Rank 2 raised in code of its own and the others ended within 500 ms"),
    ):
        assert compared(*alike, cause)["first_failed"].startswith(begins)
        assert first_failed([*alike, cause])[0] is cause
    own = [raised(number, 10 + number / 1000, "train.py:7 in batch") for number in (0, 1)]
    victim = raised(2, 10.1, "torch/distributed/distributed_c10d.py:83 in wrapper")
    assert compared(*own, victim)["first_failed"].startswith("2 of the 3 ranks raised RuntimeError at train.py:7,")


def test_the_rank_from_which_a_nan_came_is_shown() -> None:
    """Promise: not the first, which has had it in averaged gradients and knows no more."""

    def shown(*origins: str) -> int:
        found = [[fact(catalog.EVENT_NONFINITE_ORIGIN, 5.0, 50, origin=origin)] if origin else [] for origin in origins]
        alive = [rank(n, state="finished", reason="finished", events=events) for n, events in enumerate(found)]
        return diagnose_run(alive).principal

    assert shown("unknown", "", "input") == 2
    assert shown("parameter", "unknown", "operator") == 2
    assert shown("unknown", "") == shown("backward", "backward") == 0


def test_ranks_that_were_all_told_to_end_have_not_failed() -> None:
    """Promise: a scheduler, a launcher at a person's Ctrl-C or a timeout ends them together, and none is the cause."""
    for reasons in (("terminated", "terminated"), ("interrupted", "terminated")):
        pair = [rank(n, state="failed", reason=reason, last_s=START_S + 10 + n) for n, reason in enumerate(reasons)]
        assert "first_failed" not in compared(*pair)
        assert first_failed(pair)[0] is pair[0]


def test_one_rank_that_was_told_to_end_while_others_go_on_is_named() -> None:
    """Whoever ended it did not end the run: the others wait for it."""
    alone, alive = rank(3, state="failed", reason="terminated"), rank(0, state="alive", reason="", up=True)
    assert compared(alive, alone)["first_failed"].startswith("Only rank 3 failed, at ")
    assert first_failed([alone]) == (alone, "")


def test_nobody_failed_first_where_nobody_failed() -> None:
    """A run that is well has no such sentence."""
    assert first_failed([rank(0, state="alive", reason="", up=True), rank(1, state="finished", reason="finished")]) == (
        None,
        "",
    )


def averaged(number: int, factor: float = 1.0, shards: float = 1.0, count: int = 30, **resource: int) -> RankReport:
    """One of three ranks of DDP, with a gradient so many times that of the others."""
    history = [step(n, norm=factor * (1.0 + n)) for n in range(1, count + 1)]
    values: dict[Any, float] = {(catalog.DISTRIBUTED_INFO, "gloo", "ddp", ""): 1.0, catalog.GRAD_NORM_RANKS: shards}
    return facts(history, resource={"rank": number, "local_world_size": 3, "world_size": 3, **resource}, values=values)


def test_the_rank_whose_averaged_gradient_differs_is_named() -> None:
    """Its norm and that of the others in the last step."""
    assert compared(averaged(0), averaged(1), averaged(2, 1.5))["ranks_disagree"] == (
        "Ranks do not agree: DDP averages the gradient, and its norm in step 30 is not the same (rank 2: 46.5, and 31 on the "
        "others). They do not train one model: is the last backward of a step within no_sync(), or model.module called?"
    )


def test_replica_groups_and_a_second_process_of_a_rank_train_for_themselves() -> None:
    """Their gradients and numbers of steps are their own; within a group they are compared."""
    first = [averaged(n, replica_group=0) for n in range(3)]
    second = [averaged(n, 1.5, count=20, replica_group=1) for n in range(3)]
    assert compared(*first, *second).keys().isdisjoint({"ranks_disagree", "out_of_step"})
    odd = averaged(2, 2.0, count=20, replica_group=1)
    assert "rank 2-g1: 42, and 31.5 on the others" in compared(*first, *second[:2], odd)["ranks_disagree"]
    own = [averaged(n) for n in range(3)]
    claimed = [replace(averaged(n, 1.5, count=20), suffix=f"-{n}f9a12bc") for n in range(3)]
    assert compared(*own, *claimed).keys().isdisjoint({"ranks_disagree", "out_of_step"})


def test_no_rank_of_another_replica_group_is_the_cause() -> None:
    """Of slow steps, of a hang, of a timeout, of an end: each group waits for its own ranks, who are named."""

    def grouped(number: int, group: int, **given: Any) -> RankReport:
        one = rank(number, **given)
        resource = {**one.header.resource, "replica_group": group}
        return replace(one, header=replace(one.header, resource=resource))

    late = {**PHASES, "data": 0.21}
    assert "slowest_rank" not in compared(grouped(0, 0), grouped(1, 0), grouped(0, 1, phases=late))
    waits = {**PHASES, "backward": 0.25}
    slow = compared(grouped(0, 0), grouped(1, 0), grouped(0, 1, phases=late), grouped(1, 1, phases=waits))["slowest_rank"]
    assert slow.startswith("Rank 0-g1 was 3.0 times slower than the others in data.")
    hung: dict[str, Any] = {"state": "hung", "reason": "", "up": True, "phase": "backward"}
    lives: dict[str, Any] = {"state": "alive", "reason": "", "up": True, "phase": "data", "count": 20}
    assert "waited_for" not in compared(grouped(0, 0, **hung), grouped(1, 0, **hung), grouped(0, 1, **lives))
    fetches = {**hung, "phase": "data"}
    named = compared(grouped(0, 0, **hung), grouped(1, 0, **fetches), grouped(0, 1, **lives))["waited_for"]
    assert named == "Rank 1-g0 fetches data of step 101, and the other rank waits in backward of step 101."
    failed: dict[str, Any] = {"state": "failed", "reason": "exit_code"}
    apart = [grouped(0, group, last_s=START_S + 100 + 50 * group, **failed) for group in range(2)]
    assert "first_failed" not in compared(*apart)
    assert compared(*apart, grouped(1, 1, last_s=START_S + 190, **failed))["first_failed"].startswith("Rank 0-g1 failed first")


def test_ranks_whose_gradients_need_not_be_the_same_do_not_disagree() -> None:
    """They agree, hold shards, or have no DDP that averages."""
    assert "ranks_disagree" not in compared(averaged(0), averaged(1))
    assert "ranks_disagree" not in compared(averaged(0, shards=2.0), averaged(1, 1.5, shards=2.0))
    assert "ranks_disagree" not in compared(rank(0), averaged(1, 1.5))
