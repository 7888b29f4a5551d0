"""The live page's words about a run's health and its resources."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.diagnosis_files import fact
from tests.ui import Values, row, run
from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.detect.growth import NEAR_S
from torchobs.detect.hangs import Standstill
from torchobs.detect.learning import ZeroRate, zero_rate
from torchobs.detect.speed import SLOW, Slowness
from torchobs.diagnosis.health import findings, health
from torchobs.diagnosis.live import METRICS, RankView
from torchobs.diagnosis.rank_report import Fact
from torchobs.diagnosis.status import (
    Replicas,
    RunStatus,
    alike_norms,
    anomalies_of,
    completed,
    mistakes_of,
    recent_anomalies,
    summary_of,
)
from torchobs.document.live import NO_RANK, health_beside

EIGHT = [row(rank) for rank in range(8)]


def training(alive: int) -> str:
    """How it begins for a run that is under way."""
    return f"Training: {alive} of 8 ranks alive, step 12,400, loss 2.313, 1.90 steps/s. "


def but(*others: RankView) -> list[RankView]:
    """Eight ranks, of which some are otherwise."""
    changed = {other.rank: other for other in others}
    return [changed.get(rank.rank, rank) for rank in EIGHT]


def saves(failed: int, last: int) -> Values:
    """Saves that raised, and those of them since the last that succeeded."""
    return {catalog.CHECKPOINTS.name: {("failed",): failed}, catalog.CHECKPOINT_FAILURE_STREAK.name: {(): last}}


def anomalies(**counts: int) -> Values:
    """The values of a rank that has had so many of each kind."""
    return {"torchobs.anomalies": {(kind,): float(number) for kind, number in counts.items()}}


def finished(rank: int = 0, **given: Any) -> RankView:
    """A rank that has ended in order."""
    return row(rank, "finished", reason="finished", **given)


def waited(data_s: float, rest_s: float) -> Values:
    """The values of a rank whose steps took so long in all."""
    return {"torchobs.step.phase.time": {("data",): data_s, ("forward",): rest_s}}


def skips(streak: float, scale: float) -> Values:
    """The values of a rank whose scaler has skipped so many steps in a row."""
    return {catalog.AMP_SKIP_STREAK.name: {(): streak}, catalog.AMP_SCALE.name: {("0",): scale}}


def grows(left_s: float) -> Values:
    """The values of a rank whose memory is full after so long."""
    return {catalog.MEMORY_TIME_TO_LIMIT.name: {("host",): left_s}}


def gpu(state: str) -> Values:
    """The values of a rank whose GPU is in that state."""
    return {catalog.HW_STATUS.name: {("GPU-1", "gpu", one): float(one == state) for one in catalog.HW_STATE.values}}


RATE = ZeroRate(12_361, 40, is_begun_before=False)
SPIKES = {"loss_spike": 20, "gradient_explosion": 2}
LATELY = {catalog.EVENT_WORKER_DIED.name: 1}
DIED: Values = {catalog.DATA_WORKERS_DIED.name: {(): 2.0}}
WELL = "1.90 steps/s."
"""Nothing more is said."""
SKIPS = "The loss scaler skips every step: {} in a row, in which nothing was learned."
INFO, WARNING, ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR


def test_a_mistake_that_is_taken_back_is_none() -> None:
    """By a later event about no parameter."""

    def told(kind: object, parameters: int) -> Fact:
        return Fact(catalog.EVENT_LOOP_MISTAKE.name, 1.0, 3, {"kind": kind, "parameters_affected": parameters})

    stopped, again = (told("same_order", parameters) for parameters in (4, 0))
    assert mistakes_of([stopped], ("gradients_kept",)) == ("gradients_kept", "same_order")
    assert mistakes_of([stopped, again], ("gradients_kept",)) == ("gradients_kept",)
    assert mistakes_of([again, told("unheard of", 1), told(["list"], 1)], ("same_order",)) == ()


@pytest.mark.parametrize(
    ("causes", "said"),
    [
        ({"dead_units": 1}, "1 of 12 layers learns nothing: only zeros come into it, from dead units."),
        ({"vanishing": 3}, "3 of 12 layers learn nothing: only a tiny gradient reaches them."),
        (
            {"dead_units": 1, "vanishing": 2, "cut_off": 1},
            (
                "4 of 12 layers learn nothing: only zeros come into 1, from dead units; only a tiny gradient reaches 2; "
                "no gradient reaches 1."
            ),
        ),
    ],
)
def test_layers_that_learn_nothing_are_counted_for_each_cause(causes: dict[str, int], said: str) -> None:
    """As their events have it, out of the layers that the model has. A cause that nobody knows is left out."""
    facts = [
        Fact(
            catalog.EVENT_UNMOVED_LAYERS.name, 1.0, 200,
            {"cause": cause, "layers": ["a"], "layers_affected": count, "layers_total": 12, "at": "a"},
        )
        for cause, count in {**causes, "unheard of": 1}.items()
    ]  # fmt: skip
    stuck = row(0, steps=None, loss=None, values={catalog.GRAD_UNMOVED_LAYERS.name: {(): float(sum(causes.values()))}})
    status = replace(stuck.status, events=summary_of(facts))
    found = health(RunStatus([status], 1, 1))
    assert found.text == f"Starting: 1 of 1 rank alive, no step yet. {said}"
    assert found.level is Severity.WARNING


def test_a_misused_scheduler_is_a_mistake_of_the_loop() -> None:
    """Of the kinds that there are."""

    def told(kind: object) -> Fact:
        return Fact(catalog.EVENT_SCHEDULER_MISUSED.name, 1.0, 3, {"kind": kind, "scheduler": "StepLR"})

    assert mistakes_of([told("never_stepped"), told("unheard of"), told(["list"])]) == ("scheduler_never_stepped",)


@pytest.mark.parametrize(
    "kind", [*catalog.LOOP_MISTAKES, "left_out", *(f"scheduler_{kind}" for kind in catalog.SCHEDULER_MISUSES)]
)
def test_every_mistake_has_its_sentence(kind: str) -> None:
    """Also one that is new."""
    assert run(row(0, mistakes=(kind,), steps=0)).health.level is Severity.WARNING


def test_parameters_that_no_optimizer_has_are_a_mistake_of_the_loop() -> None:
    """As long as the last event says so."""
    left, again = (Fact(catalog.EVENT_LEFT_OUT_PARAMETERS.name, 1.0, 3, {"parameters_affected": number}) for number in (2, 0))
    assert mistakes_of([left]) == mistakes_of([left, left], ("left_out",)) == ("left_out",)
    assert mistakes_of([left, again]) == mistakes_of([again], ("left_out",)) == ()


def test_what_ranks_write_down_is_compared() -> None:
    """The same data on all ranks, and weights that are not one model's."""
    losses = {step: 1.0 / step for step in range(1, 20)}
    same = Replicas({1: (5.0, 1.0)}, {1: tuple(map(float, range(8)))}, losses)
    found = run(row(replicas=same), row(1, replicas=same)).health
    assert "All ranks train on the same data: from step 1 on" in found.text
    assert found.level is Severity.WARNING
    other = same._replace(batches={1: tuple(map(float, range(8, 16)))})
    assert run(row(replicas=same), row(1, replicas=other)).health.level is Severity.INFO
    apart = other._replace(weights={1: (5.0, 1.0), 2: (5.0, -1.0)})
    found = run(row(replicas=other._replace(weights={1: (5.0, 1.0), 2: (5.0, 1.0)})), row(1, replicas=apart)).health
    assert "in step 2 the weights of ranks 0 and 1 are not the same (in step 1 they were)" in found.text
    assert found.level is Severity.ERROR


@pytest.mark.parametrize("window", [32, 256])
def test_a_schedule_that_has_ended_is_no_zero_rate(window: int) -> None:
    """Of a long run only its last steps are read: few zeros there are its end, if the steps before are not known."""
    assert zero_rate([(step, 0.0) for step in range(100_001 - window, 100_001)]) == (
        None if window < 200 else ZeroRate(100_001 - window, window, is_begun_before=True)
    )


@pytest.mark.parametrize(
    ("rows", "said", "level"),
    [
        (EIGHT, "Training: 8 of 8 ranks alive, step 12,400, loss 2.313, 1.90 steps/s.", INFO),
        ([row(0)], "Training: 1 of 1 rank alive, step 12,400, loss 2.313, 1.90 steps/s.", INFO),
        ([row(0, steps=0, loss=None)], "Starting: 1 of 1 rank alive, no step yet.", INFO),
        ([row(0, phase="evaluation")], "Evaluating: 1 of 1 rank alive, step 12,400, loss 2.313, 1.90 steps/s.", INFO),
        ([row(0, phase="idle")], "Idle: 1 of 1 rank alive, step 12,400, loss 2.313.", INFO),
        ([row(0, phase="compile", steps=0, loss=None)], "Compiling: 1 of 1 rank alive, no step yet.", INFO),
        (
            [row(rank, "finished", reason="finished") for rank in (0, 1)],
            "Finished: 2 ranks, 12,400 steps, last loss 2.313.",
            INFO,
        ),
        (
            but(row(2, "lost", reason="out_of_memory", age_s=40)),
            training(7) + "Rank 2 was lost 40 s ago, likely out of memory.",
            ERROR,
        ),
        (
            [row(rank, "lost", reason="lost", age_s=100 + rank) for rank in range(6)],
            "Ended: 6 ranks, 12,400 steps, last loss 2.313. Ranks 0, 1, 2, 3 and 2 more were lost 1 min 40 s ago.",
            ERROR,
        ),
        (
            but(row(5, "failed", reason="exception", age_s=7_300)),
            training(7) + "Rank 5 failed 2 h 1 min ago with an exception.",
            ERROR,
        ),
        (
            but(row(3, "hung", age_s=320), row(4, "hung", age_s=300)),
            training(8) + "Ranks 3 and 4 hang: no step for 5 min 20 s.",
            ERROR,
        ),
        (
            [row(rank, "hung", age_s=300, still=Standstill(300, 0.057)) for rank in (0, 1)],
            "Hanging: 2 of 2 ranks alive, step 12,400, loss 2.313. Ranks 0 and 1 hang: no step for 5 min.",
            ERROR,
        ),
        (
            but(row(6, "unresponsive", age_s=12)),
            training(7) + "Rank 6 does not respond: silent for 12 s.",
            ERROR,
        ),
        (
            [row(0, age_s=45, still=Standstill(45, 0.057))],
            "No step for 45 s (usual: 57 ms): 1 of 1 rank alive, step 12,400, loss 2.313.",
            WARNING,
        ),
        (
            [row(rank, age_s=45, still=Standstill(45 + rank, 0.057)) for rank in range(2)],
            "No step for 46 s (usual: 57 ms): 2 of 2 ranks alive, step 12,400, loss 2.313.",
            WARNING,
        ),
        (
            but(row(3, age_s=45, still=Standstill(45, 0.057))),
            "No step on rank 3 for 45 s (usual: 57 ms): 8 of 8 ranks alive, step 12,400, loss 2.313.",
            WARNING,
        ),
        (
            [row(0, age_s=45, still=Standstill(45, 0.057, habitual=True))],
            "No step for 45 s (usual: 57 ms; it paused as long before): 1 of 1 rank alive, step 12,400, loss 2.313.",
            INFO,
        ),
        (
            [row(0, phase="evaluation"), *(row(rank, age_s=45, still=Standstill(45, 0.057)) for rank in range(1, 4))],
            "Evaluating: 4 of 4 ranks alive, step 12,400, loss 2.313, 1.90 steps/s.",
            INFO,
        ),
        (
            [row(0, recorded=False)],
            "Not recorded: 1 of 1 rank alive, step 12,400, loss 2.313. Rank 0 does not record steps: switched off.",
            WARNING,
        ),
        (
            [row(0, "unresponsive", age_s=12)],
            "Not responding: 0 of 1 rank alive, step 12,400, loss 2.313. Rank 0 does not respond: silent for 12 s.",
            ERROR,
        ),
        (
            but(row(3, slow=Slowness(1.42, 0))),
            training(8) + "Rank 3 is 1.4 times slower than the others in data.",
            WARNING,
        ),
        (
            [row(0, steps=None, loss=None, values={catalog.CHECKPOINTS.name: {("failed",): 1.0}})],
            "Starting: 1 of 1 rank alive, no step yet. 1 checkpoint could not be saved.",
            WARNING,
        ),
        (
            [row(0, steps=None, loss=None, values=saves(failed=3, last=2))],
            "Starting: 1 of 1 rank alive, no step yet. 3 checkpoints could not be saved. None was since.",
            ERROR,
        ),
        (
            [row(0, steps=None, loss=None, values=saves(failed=3, last=0))],
            "Starting: 1 of 1 rank alive, no step yet. 3 checkpoints could not be saved; a later one was.",
            INFO,
        ),
        (
            [row(0, steps=None, loss=None, values={catalog.GRAD_UNMOVED_LAYERS.name: {(): 12.0}})],
            "Starting: 1 of 1 rank alive, no step yet. 12 layers learn nothing.",
            WARNING,
        ),
        (
            [row(0, steps=None, loss=None, values={catalog.COMPILE_FAILURES.name: {("recompile_limit",): 2.0}})],
            "Starting: 1 of 1 rank alive, no step yet. torch.compile has given 2 functions up, recompiled again and again.",
            WARNING,
        ),
        (
            but(row(0, anomalies=("nonfinite_loss",)), row(1, anomalies=("nonfinite_loss",))),
            training(8).replace("2.313", "NaN") + "The loss is not finite on ranks 0 and 1.",
            ERROR,
        ),
        (
            [row(0, anomalies=("gradient_explosion",))],
            "Training: 1 of 1 rank alive, step 12,400, loss 2.313, 1.90 steps/s. Gradients explode.",
            WARNING,
        ),
        # one of a run without a step is none after one
        (
            [row(rank, mistakes=("gradients_kept", "never_stepped")) for rank in range(8)],
            f"{WELL} Gradients are never set to zero (optimizer.zero_grad()).", WARNING,
        ),
        ([row(0, mistakes=("never_stepped",), steps=0, loss=None)], "The optimizer never steps.", WARNING),
        ([row(rate=RATE), row(1, rate=RATE)], "rate was 0 from step 12,361 on: 40 steps changed nothing.", WARNING),
        ([row(rate=RATE, values={catalog.LEARNING_RATE.name: {("0",): 0.0, ("1",): 1e-3}})], WELL, INFO),
        # anomalies: of a run that ended, lately as long as the alert fires, and past
        (
            [finished(rank, loss=7.9e13, values=anomalies(loss_spike=109, gradient_explosion=13)) for rank in (0, 1)],
            "There have been 13 gradient explosions and 109 loss spikes.", WARNING,
        ),
        ([finished(values=anomalies(nonfinite_loss=1))], "1 loss that was not finite.", WARNING),
        ([finished(values=anomalies(loss_spike=2))], "There have been 2 loss spikes.", INFO),
        ([row(0, values=anomalies(loss_spike=7))], "Earlier: 7 loss spikes.", INFO),
        ([row(0, values=anomalies(**SPIKES), lately=SPIKES)], "Lately: 2 gradient explosions and 20 loss spikes.", WARNING),
        ([row(0, values=anomalies(loss_spike=9), lately={"loss_spike": 1})], "Earlier: 9 loss spikes.", INFO),
        ([row(0, anomalies=("loss_spike",), values=anomalies(loss_spike=7))], "steps/s. The loss has jumped.", WARNING),
        (
            [row(rank, anomalies=("diverged",), values=anomalies(diverged=1)) for rank in range(2)],
            "The loss has diverged: it left its start for good in the first steps.", WARNING,
        ),
        ([finished(values=anomalies(diverged=1))], "There have been 1 loss that diverged.", WARNING),
        # a loss scaler raises its scale until gradients are not finite
        (
            [finished(values={**anomalies(nonfinite_gradient=4), "torchobs.amp.steps_skipped": {(): 4.0}})],
            "last loss 2.313.", INFO,
        ),
        # the loss that is shown is that of the first rank that has any
        ([row(0, anomalies=("nonfinite_loss",))], f"loss NaN, {WELL} The loss is not finite.", ERROR),
        ([row(0), row(1, anomalies=("nonfinite_loss",))], f"loss 2.313, {WELL} The loss is not finite on rank 1.", ERROR),
        ([finished(newest_loss=math.nan)], "last loss NaN. The loss was not finite at the end.", ERROR),
        ([finished(newest_loss=math.inf)], "last loss Inf. The loss was not finite at the end.", ERROR),
        ([finished(newest_loss=2.0)], "last loss 2.313.", INFO),
        # waiting for data: by the rank's verdict of a minute; a short run, and one that is over, by their totals
        ([row(0, values={"torchobs.data.starved": {(): 1.0}}), row(1)], "Training waits for its data on rank 0.", WARNING),
        ([finished(values=waited(83.0, 17.0))], "Training waited for its data: 83 % of the time of its steps.", WARNING),
        ([row(0, values=waited(16.6, 3.4))], "Training waits for its data: 83 % of the time of its steps.", WARNING),
        ([row(0, values={**waited(83.0, 17.0), "torchobs.data.starved": {(): 0.0}})], WELL, INFO),
        ([finished(values=waited(4.0, 4.0))], "last loss 2.313.", INFO),  # a single step that starts the workers
        (
            [row(0, values={"torchobs.probe.disabled": {("loss",): 1.0, ("data",): 0.0}})],
            "Not watched, because the probe failed: loss.", WARNING,
        ),
        # ends by a person, or a scheduler; one rank's is a failure of a run that goes on
        *(
            (
                [row(0, "failed", reason="interrupted", ran_s=192), row(1, state, reason=other, ran_s=190)],
                "Interrupted by Ctrl-C after 3 min 12 s: 2 ranks, 12,400 steps, last loss 2.313.", INFO,
            )
            for state, other in (("failed", "interrupted"), ("failed", "terminated"), ("finished", "finished"))
        ),
        (
            [row(rank, "failed", reason="terminated", age_s=3) for rank in (0, 1)],
            "Ranks 0 and 1 were told to end 3 s ago.", WARNING,
        ),
        *(
            ([row(0, "failed", reason=reason, age_s=3), other], "", ERROR)
            for reason in ("terminated", "interrupted")
            for other in (row(1), row(1, "failed", reason="exception"))
        ),
        # what an alert is about, and its healthy twins
        ([row(0, values=skips(40, 0.5))], SKIPS.format(40), ERROR),
        ([row(0, values=skips(20, 1.0))], SKIPS.format(20), WARNING),
        ([row(0, values=skips(128, 9.0))], SKIPS.format(128), WARNING),
        ([row(0, values=skips(19, 0.5))], WELL, INFO),
        ([row(0, values=skips(30, 4.0))], WELL, INFO),
        ([row(0, values=grows(3600.0))], "Host memory grows with the steps, and is full in 1 h.", WARNING),
        ([row(0), row(1, values=grows(60.0))], "grows with the steps on rank 1, and is full in 1 min.", WARNING),
        ([row(0, values=grows(NEAR_S + 1))], WELL, INFO),
        ([row(0, values=gpu("failed"))], "1 GPU has failed: GPU-1.", ERROR),
        ([row(0, values=gpu("ok"))], WELL, INFO),
        ([row(0, values=gpu("degraded"))], WELL, INFO),
        ([row(0, values=DIED)], "Earlier: 2 workers of data loaders died.", INFO),
        ([row(0), row(1, values=DIED, lately=LATELY)], "2 workers of data loaders died on rank 1.", WARNING),
        ([finished(values=DIED, lately=LATELY)], " 2 workers of data loaders died.", INFO),
        ([finished(values={**skips(40, 0.5), **grows(60.0)})], SKIPS.replace("skips", "skipped").format(40), ERROR),
        ([row(0), row(1, slow=Slowness(SLOW - 0.01, 0))], WELL, INFO),  # somebody is always the slowest
    ],
)  # fmt: skip
def test_what_is_said_of_a_run(rows: list[RankView], said: str, level: Severity) -> None:
    """Of ranks as they are, the most serious first; what is ordinary, or past, is no reason to worry."""
    health = run(*rows).health
    assert (health.text[-len(said) :] if said else "", health.level) == (said, level)


def test_ranks_that_have_not_appeared_are_missed() -> None:
    """On a node of a larger run only its own are."""
    health = run(*EIGHT[:6], expected=8, world_size=64).health
    assert health.text.startswith("Training: 6 of 8 ranks alive on this node, 64 in all, step 12,400")
    assert health.text.endswith("2 ranks have not appeared.")
    assert health.level is Severity.WARNING


def test_the_most_serious_comes_first() -> None:
    """A dead rank before a slow one."""
    health = run(*but(row(1, slow=Slowness(3.0, 1)), row(7, "lost", reason="lost", age_s=3))).health
    assert health.text.index("Rank 7 was lost") < health.text.index("Rank 1 is 3.0 times slower")


def test_what_is_read_aloud_does_not_change_with_every_step() -> None:
    """A screen reader would never come to an end."""
    before, after = (run(row(0, steps=steps, loss=loss)).health.gist for steps, loss in ((10, 3.0), (11, 2.9)))
    assert before == after == "Training, 1 of 1 rank alive."
    lost = (run(row(0), row(1, "lost", reason="lost", age_s=age)).health.gist for age in (4, 5))
    assert set(lost) == {"Training, 1 of 2 ranks alive. Rank 1 was lost."}


def test_before_the_first_rank() -> None:
    """It says what one waits for."""
    assert "No rank has been seen yet" in NO_RANK.text
    assert NO_RANK.level is Severity.INFO


def test_what_is_over_is_told_to_a_screen_reader_without_numbers() -> None:
    """They would change."""
    assert run(row(0, values=anomalies(loss_spike=7))).health.gist.endswith("Earlier: anomalies.")


def test_a_rank_that_failed_lists_the_workers_that_died() -> None:
    """Its findings are those of its last minutes."""
    failed = run(row(0, "failed", reason="exception", values=DIED, lately=LATELY))
    assert "workers_died" in {one.kind for one in findings(failed.status) if one.severity == "warning"}


def test_what_a_run_has_recovered_from_is_past_while_it_runs_and_after() -> None:
    """On all ranks, with the least number of healthy steps; also of what the alert still fires for."""
    values, lately = anomalies(nonfinite_loss=1, loss_spike=20), {"nonfinite_loss": 1, "loss_spike": 20}
    both = {"nonfinite_loss": 60, "loss_spike": 75}
    for state, reason in (("alive", ""), ("finished", "finished")):
        ranks = [row(rank, state, reason=reason, values=values, lately=lately).status for rank in (0, 1)]
        found = health(RunStatus([replace(rank, past=both) for rank in ranks], 2, 2))
        said = "Past: 1 loss that was not finite and 20 loss spikes; the last 60 steps were healthy."
        assert (found.text.endswith(said), found.level) == (True, Severity.INFO)
        partly = health(RunStatus([replace(ranks[0], past={"loss_spike": 75}), replace(ranks[1], past=both)], 2, 2))
        assert "1 loss that was not finite. Past: 20 loss spikes; the last 75 steps were healthy." in partly.text
        assert partly.level is Severity.WARNING


def test_the_page_reads_all_that_a_status_is_made_of() -> None:
    """A value that it did not read would be missing on the page alone, without a word."""
    asked: set[str] = set()

    def of(metric: catalog.Metric) -> dict[tuple[str, ...], float]:
        asked.add(metric.name)
        return {}

    completed(row(0).status, lambda metric, *_: of(metric).get(()), of)
    assert asked <= {metric.name for metric in METRICS}


def test_a_run_that_failed_beside_this_one_is_worth_a_look() -> None:
    """The headline is what a tab in the background shows."""
    well = run(row(0))
    failed = run(row(0, "failed", reason="exception"), run_id="run-2")
    health = health_beside(well, [well, failed])
    assert health.text.endswith("Another run here is in trouble: gpt run-2.")
    assert health.level is Severity.WARNING
    assert health_beside(well, [well]).level is Severity.INFO


def test_ranks_whose_averaged_gradient_differs_are_told_at_once() -> None:
    """By the judgement of `torchobs inspect`; a screen reader is not told of every step."""
    found = [row(rank) for rank in range(3)]
    norms = [{step: (1.5 if rank == 2 else 1.0) * step for step in (28, 29, 30)} for rank in range(3)]
    alike = [replace(one.status, alike_norms=own) for one, own in zip(found, norms, strict=True)]
    told = health(RunStatus(alike, 3, 3))
    assert told.level is Severity.ERROR
    assert "its norm in step 30 is not the same (rank 2: 45, and 30 on the others)" in told.text
    assert "its norm is not the same on rank 2." in told.gist
    assert "not the same" not in health(RunStatus([alike[0], alike[1], found[2].status], 3, 3)).text


def test_norms_are_compared_only_where_ddp_averages_whole_gradients() -> None:
    """A shard's norm is a rank's own."""
    norms, one = {3: 1.0}, ("gloo", "ddp", "")
    for found in ([one], [("nccl", "ddp+tensor", "dp=4,tp=2")], {one: 1.0}):
        assert alike_norms(norms, found, None) == norms
        assert alike_norms(norms, found, 1.0) == norms
        assert alike_norms(norms, found, 2.0) == {}
    for other in ([], [("gloo", "fsdp2", "")], [("gloo", "", "")]):
        assert alike_norms(norms, other, 1.0) == {}


def test_when_a_worker_died_is_known_from_its_event() -> None:
    """For ten minutes."""
    died = fact(catalog.EVENT_WORKER_DIED, 9.0, 90, pid=77)
    assert recent_anomalies(anomalies_of([died]), died.time_s + 60.0) == LATELY
    assert not recent_anomalies(anomalies_of([died]), died.time_s + 700.0)
