"""Several ranks side by side: who failed first, who is slow and in what, who fell behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnosis_files import PHASES, START_S, fact, facts, step, steps
from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.diagnosis.endings import compare, first_failed
from torchobs.diagnosis.rank_report import RankReport
from torchobs.flight.metrics.throughput import Throughput


def rank(number: int, *, phases: dict[str, float] | None = None, count: int = 100, **given: object) -> RankReport:
    """One of four ranks."""
    history = [step(n, phase_s=phases or PHASES) for n in range(1, count + 1)]
    given = {"pace": pace_of(phases or PHASES), **given}
    return facts(history, resource={"rank": number, "local_world_size": 2, "world_size": 2}, **given)  # type: ignore[arg-type]


def pace_of(phases: dict[str, float]) -> Throughput:
    """As long as such steps take."""
    times = tuple(phases.get(phase, 0.0) for phase in catalog.PHASES)
    return Throughput(100, sum(times), sum(times), times, 10.0, 10.0, None, None)


def told(*ranks: RankReport) -> dict[str, str]:
    """What is said of them, by kind."""
    return {finding.kind: finding.text for finding in compare(ranks)}


def test_a_single_rank_is_compared_with_nobody() -> None:
    """Nothing is said."""
    assert compare([rank(0)]) == []


def test_the_rank_whose_own_phases_are_longest_is_the_slowest() -> None:
    """The others wait for it within backward, which is no sign of slowness."""
    slow = {**PHASES, "data": 0.21}
    waits = {**PHASES, "backward": 0.25}
    text = told(rank(0, phases=waits), rank(1, phases=slow))["slowest_rank"]
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
    text = told(*alive, ended)["slowest_rank"]
    assert text.startswith("Rank 1 is ")
    assert text.endswith(" in data. It took 210 ms a step for data, and the others 10 ms, who waited.")


def test_small_differences_have_no_slowest_rank() -> None:
    """Somebody is always last: by less than a tenth of a step it is noise."""
    assert "slowest_rank" not in told(rank(0), rank(1, phases={**PHASES, "data": 0.0149}))
    short = {"data": 1e-4, "forward": 1e-3}, {"data": 1e-3, "forward": 1e-3}
    assert "slowest_rank" not in told(*(rank(number, phases=phases) for number, phases in enumerate(short)))


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
    assert told(second, first)["first_failed"] == "Rank 1 failed first, 200 ms before rank 0: look there for the cause."


def test_ranks_that_vanished_within_a_heartbeat_have_no_first() -> None:
    """A heartbeat comes every half second: what is closer cannot be told."""
    assert (
        "which was first cannot be told" in told(rank(0, last_s=START_S + 10), rank(1, last_s=START_S + 10.3))["first_failed"]
    )
    assert "Rank 0 failed first" in told(rank(0, last_s=START_S + 10), rank(1, last_s=START_S + 12))["first_failed"]


def test_one_that_failed_alone_is_named() -> None:
    """The others finished, or run on."""
    alive = rank(0, state="alive", reason="", up=True)
    assert told(alive, rank(1))["first_failed"].startswith("Only rank 1 failed, at ")


def test_ranks_out_of_step_and_missing_ranks_are_told() -> None:
    """By the step each had come to, and by the size that the launcher gave."""
    assert told(rank(0), rank(1, count=97))["out_of_step"] == (
        "Rank 1 ended after step 97, the furthest after step 100. 1 rank behind."
    )
    assert "out_of_step" not in told(rank(0), rank(1))
    many = [facts(steps(10), resource={"rank": n, "local_world_size": 8}) for n in range(6)]
    assert told(*many)["ranks_missing"].startswith("6 of the 8 ranks of this machine are here")


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
        assert told(*pair)["first_failed"].startswith("Rank 1 vanished, and within 500 ms the others raised in collective")
        found, _ = first_failed(pair)
        assert found is pair[1]


def test_what_became_of_the_others_is_told_as_it_was() -> None:
    """Promise: ranks that the launcher told to end have raised nothing in a collective."""
    ended = rank(0, state="failed", reason="terminated", last_s=START_S + 10.1)
    pair = [ended, rank(1, last_s=START_S + 9.9)]
    assert told(*pair)["first_failed"] == (
        "Rank 1 vanished, and within 500 ms the others were told to end: it was likely first."
    )
    assert first_failed(pair)[0] is pair[1]


def test_a_rank_whose_last_steps_may_not_be_written_is_not_told_to_be_behind() -> None:
    """Promise: on a disk, what a killed rank did in its last moments is missing; what it would have done long before is not."""
    killed: dict[str, Any] = {"unwritten": True, "count": 97, "last_s": START_S + 9.75}
    assert "out_of_step" not in told(rank(0), rank(1, **killed))
    assert "out_of_step" in told(rank(0), rank(1, **{**killed, "last_s": START_S + 9.85}))
    assert "out_of_step" in told(rank(0), rank(1, **{**killed, "unwritten": False}))
    whole = [rank(number, **killed) for number in range(2)]
    assert diagnose_run(whole).verdict.text.startswith("Trouble. Ended: 2 ranks, 97 steps at least.")
    assert diagnose_run(whole).by_rank[0][0].text.startswith("Rank 0 vanished without a word after step 97 at least, ")
    none = diagnose_run([facts(unwritten=True)])
    assert none.verdict.text == "Trouble. Ended: 1 rank, no step written."
    assert none.by_rank[0][0].text.startswith("Rank 0 vanished without a word before one of its steps was written: ")


def test_a_rank_that_raised_in_its_own_code_is_likely_first_when_its_peers_vanished() -> None:
    """A launcher ends them by SIGTERM then, of which they leave no word."""
    pair = [rank(0, last_s=START_S + 9.9), raised(1, 10.1, "train.py:7 in batch")]
    assert told(*pair)["first_failed"].startswith("Rank 1 raised in code of its own and the others ended within 500 ms")
    assert first_failed(pair)[0] is pair[1]


def test_ranks_that_raised_the_same_at_one_line_have_no_first() -> None:
    """Promise: milliseconds between them are chance, whoever of them was first; what torch calls from one line is one line."""
    pair = raised(1, 10.0, "train.py:7 in main"), raised(0, 10.003, "train.py:7 in main")
    text = "Both ranks raised RuntimeError at train.py:7, the first by 3 ms, which says nothing."
    assert told(*pair)["first_failed"] == text
    some = [replace(one, header=replace(one.header, resource={**one.header.resource, "world_size": 16})) for one in pair]
    assert told(*some)["first_failed"].startswith("Both ranks here raised RuntimeError")
    many = [
        raised(number, 10 + number / 100, "torch/nn/parallel/distributed.py:5 in f", caller="a.py:3 in g")
        for number in range(8)
    ]
    assert told(*many)["first_failed"] == ("All 8 ranks raised RuntimeError at a.py:3, the first by 10 ms, which says nothing.")
    ended = rank(8, state="failed", reason="terminated", last_s=START_S + 10.02)
    assert told(*many, ended)["first_failed"].startswith("8 of the 9 ranks raised RuntimeError at a.py:3, the first by")


def test_ranks_that_raised_the_same_more_than_a_step_apart_have_a_first() -> None:
    """Promise: what a collective or a step may take explains a difference, and no more."""
    history = [step(n, duration_s=2.0) for n in range(1, 101)]
    for seconds, begins in ((1.9, "Both ranks raised"), (2.5, "Rank 1 failed first, 2.5 s before rank 0")):
        pair = [raised(1, 10.0, "train.py:7 in main"), raised(0, 10 + seconds, "train.py:7 in main")]
        assert told(*(replace(one, steps=tuple(history)) for one in pair))["first_failed"].startswith(begins)


def test_ranks_that_raised_at_different_lines_have_a_first() -> None:
    """Promise: the one whose exception the others' may have followed is named, by milliseconds, too."""
    pair = raised(1, 10.0, "train.py:7 in main"), raised(0, 10.003, "train.py:9 in main")
    assert told(*pair)["first_failed"].startswith("Rank 1 failed first, 3 ms before rank 0")


def test_what_ended_otherwise_may_have_made_others_raise_the_same() -> None:
    """Promise: of ranks that all raised in a collective none is looked for where another vanished, or raised elsewhere."""
    alike = [raised(number, 10 + number / 1000, "torch/distributed/distributed_c10d.py:83 in wrapper") for number in (0, 1)]
    for cause, begins in (
        (rank(2, last_s=START_S + 10.2), "Rank 2 vanished, and within 500 ms the others raised in collective operations"),
        (raised(2, 10.1, "train.py:7 in batch"), "Rank 2 raised in code of its own and the others ended within 500 ms"),
    ):
        assert told(*alike, cause)["first_failed"].startswith(begins)
        assert first_failed([*alike, cause])[0] is cause
    own = [raised(number, 10 + number / 1000, "train.py:7 in batch") for number in (0, 1)]
    victim = raised(2, 10.1, "torch/distributed/distributed_c10d.py:83 in wrapper")
    assert told(*own, victim)["first_failed"].startswith("2 of the 3 ranks raised RuntimeError at train.py:7,")


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
        assert "first_failed" not in told(*pair)
        assert first_failed(pair)[0] is pair[0]


def test_one_rank_that_was_told_to_end_while_others_go_on_is_named() -> None:
    """Whoever ended it did not end the run: the others wait for it."""
    alone, alive = rank(3, state="failed", reason="terminated"), rank(0, state="alive", reason="", up=True)
    assert told(alive, alone)["first_failed"].startswith("Only rank 3 failed, at ")
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
    assert told(averaged(0), averaged(1), averaged(2, 1.5))["ranks_disagree"] == (
        "Ranks do not agree: DDP averages the gradient, and its norm in step 30 is not the same (rank 2: 46.5, and 31 on the "
        "others). They do not train one model: is the last backward of a step within no_sync(), or model.module called?"
    )


def test_replica_groups_and_a_second_process_of_a_rank_train_for_themselves() -> None:
    """Their gradients and numbers of steps are their own; within a group they are compared."""
    first = [averaged(n, replica_group=0) for n in range(3)]
    second = [averaged(n, 1.5, count=20, replica_group=1) for n in range(3)]
    assert told(*first, *second).keys().isdisjoint({"ranks_disagree", "out_of_step"})
    odd = averaged(2, 2.0, count=20, replica_group=1)
    assert "rank 2-g1: 42, and 31.5 on the others" in told(*first, *second[:2], odd)["ranks_disagree"]
    own = [averaged(n) for n in range(3)]
    claimed = [replace(averaged(n, 1.5, count=20), suffix=f"-{n}f9a12bc") for n in range(3)]
    assert told(*own, *claimed).keys().isdisjoint({"ranks_disagree", "out_of_step"})


def test_no_rank_of_another_replica_group_is_the_cause() -> None:
    """Of slow steps, of a hang, of a timeout, of an end: each group waits for its own ranks, who are named."""

    def grouped(number: int, group: int, **given: Any) -> RankReport:
        one = rank(number, **given)
        resource = {**one.header.resource, "replica_group": group}
        return replace(one, header=replace(one.header, resource=resource))

    late = {**PHASES, "data": 0.21}
    assert "slowest_rank" not in told(grouped(0, 0), grouped(1, 0), grouped(0, 1, phases=late))
    waits = {**PHASES, "backward": 0.25}
    slow = told(grouped(0, 0), grouped(1, 0), grouped(0, 1, phases=late), grouped(1, 1, phases=waits))["slowest_rank"]
    assert slow.startswith("Rank 0-g1 was 3.0 times slower than the others in data.")
    hung: dict[str, Any] = {"state": "hung", "reason": "", "up": True, "phase": "backward"}
    lives: dict[str, Any] = {"state": "alive", "reason": "", "up": True, "phase": "data", "count": 20}
    assert "waited_for" not in told(grouped(0, 0, **hung), grouped(1, 0, **hung), grouped(0, 1, **lives))
    fetches = {**hung, "phase": "data"}
    named = told(grouped(0, 0, **hung), grouped(1, 0, **fetches), grouped(0, 1, **lives))["waited_for"]
    assert named == "Rank 1-g0 fetches data of step 101, and the other rank waits in backward of step 101."
    failed: dict[str, Any] = {"state": "failed", "reason": "exit_code"}
    apart = [grouped(0, group, last_s=START_S + 100 + 50 * group, **failed) for group in range(2)]
    assert "first_failed" not in told(*apart)
    assert told(*apart, grouped(1, 1, last_s=START_S + 190, **failed))["first_failed"].startswith("Rank 0-g1 failed first")


def test_ranks_whose_gradients_need_not_be_the_same_do_not_disagree() -> None:
    """They agree, hold shards, or have no DDP that averages."""
    assert "ranks_disagree" not in told(averaged(0), averaged(1))
    assert "ranks_disagree" not in told(averaged(0, shards=2.0), averaged(1, 1.5, shards=2.0))
    assert "ranks_disagree" not in told(rank(0), averaged(1, 1.5))
