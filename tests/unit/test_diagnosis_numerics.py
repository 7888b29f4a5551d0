"""What is said of losses, gradients and rates of a rank: from numbers alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from tests.diagnosis_files import PHASES, START_S, fact, facts, step, steps, told
from torchobs import catalog
from torchobs.diagnosis.diagnosis import RunDiagnosis, diagnose, diagnose_run
from torchobs.flight.reader import Distribution

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchobs.ranks.events import Fact
    from torchobs.ranks.rank_view import RankView, Step

NAN = math.nan
REGION = {"operator": "compiled_function", "module": "blocks.3", "location": "train.py:9"}
ORIGINS: list[tuple[dict[str, str], str]] = [
    (
        {"origin": "operator", "operator": "log", "module": "blocks.3", "location": "train.py:9"},
        "The NaN or infinity of step 7 was born in log in blocks.3 (train.py:9).",
    ),
    (
        {"origin": "unknown", **REGION},
        "The NaN or infinity of step 7 appeared inside compiled region blocks.3 (train.py:9). Run `debug.trace_nan(",
    ),
    ({"origin": "backward", "operator": "checkpoint_function"}, "inside the backward pass of a checkpointed region. Run"),
    (
        {
            "origin": "unknown",
            "operator": "sqrt",
            "module": "head",
            "location": "train.py:9",
            "note": "on this rank or another",
        },
        "step 7 began was not found: it passed sqrt in head (train.py:9); on this rank or another.",
    ),
    (
        {"origin": "unknown", "parameter": "0.weight", "note": "and 5 more"},
        "The parameters 0.weight and 5 more held the NaN or infinity of step 7 already; what made them so was not seen.",
    ),
    ({"origin": "backward", "operator": "sqrt"}, "born in the derivative of sqrt, outside of any module. That derivative is"),
    ({"origin": "input", "operator": "addmm", "parameter": "x"}, "step 7 came with the input x; it went into addmm."),
    ({"origin": "overflow", "parameter": "0.weight"}, "overflowed in float16, in 0.weight: the largest number there is 65,504"),
]


@pytest.mark.parametrize(("attributes", "said"), ORIGINS)
def test_an_origin_is_told_as_far_as_it_is_known(attributes: dict[str, str], said: str) -> None:
    """An operator, a region and the call that looks inside, or what is not known."""
    event = fact(catalog.EVENT_NONFINITE_ORIGIN, 1.0, 7, **attributes)
    origins = [text for kind, text in told(facts(steps(3), events=[event])).items() if kind.startswith("nonfinite_origin_")]
    assert said in origins[0]


GRADIENT = [*steps(100), step(101, 2.5, math.inf), step(102, NAN, NAN)]
LEAPT = [*steps(100), step(101, 2.0, 1.0, learning_rate=1.0), step(102, NAN, NAN, learning_rate=1.0)]
ROSE = [*steps(808), step(809, 2.0, 40.0), step(810, 3.0), step(811, 4.0), *(step(n, NAN, NAN) for n in range(812, 822))]
WARM_UP = [*(step(n, learning_rate=1e-3 * n / 100) for n in range(1, 101)), step(101, NAN, NAN)]


@pytest.mark.parametrize(
    ("history", "said"),
    [
        (
            ROSE,
            "turned NaN in step 812, 3 steps after the gradient norm rose 40-fold (from 1 to 40). The learning rate was 0.001.",
        ),
        (ROSE, " It trained on for 9 steps with it."),
        (GRADIENT, "1 step after its gradient was not finite while the loss still was 2.5"),
        ([*steps(100), step(101, 2.5, math.inf, skipped=True), step(102, NAN, NAN)], "turned NaN in step 102. The learning"),
        (LEAPT, "The learning rate had risen 1,000-fold (from 0.001 to 1) in step 101."),
        (WARM_UP, "The loss turned NaN in step 101. The learning rate was 0.001."),
        ([*steps(50), step(51, math.inf)], "turned infinite in step 51"),
        ([step(n, NAN, NAN) for n in range(1, 20)], "The loss turned NaN in step 1."),
    ],
    ids=["norm", "wasted", "gradient", "skipped by the scaler", "rate", "warm-up", "infinite", "from the first step on"],
)
def test_a_loss_that_is_not_finite_is_told_with_what_came_before(history: list[Step], said: str) -> None:
    """The step, the gradient before it, the learning rate, and how much was wasted."""
    assert said in told(facts(history))["nonfinite_loss"]


def alone(history: list[Step], events: list[Fact], values: Mapping[Any, float]) -> RankView:
    """The only rank of a run that finished."""
    sizes = {"world_size": 1, "local_world_size": 1}
    return facts(history, state="finished", reason="finished", events=events, values=values, resource=sizes)


def test_a_loss_that_recovered_is_no_error() -> None:
    """The last one was finite; after fifty of them it is past, and a warning before."""
    for last, severity in ((150, "warning"), (151, "info")):
        history = [*steps(100), step(101, NAN, NAN), *(step(n) for n in range(102, last + 1))]
        found = diagnose(alone(history, [], {(catalog.ANOMALIES, "nonfinite_loss"): 1}))
        assert [(one.kind, one.severity) for one in found] == [("finished", "info"), ("nonfinite_loss_passed", severity)]


def test_where_a_value_was_born_is_past_when_the_training_has_recovered() -> None:
    """With the steps since. Not while a parameter holds it: that no loss shows it proves nothing."""
    events = [
        fact(catalog.EVENT_NONFINITE_ORIGIN, 1.0, 101, origin="operator", operator="log", module="blocks.3"),
        fact(catalog.EVENT_ANOMALY, 1.0, 101, kind="nonfinite_loss", value=NAN, baseline=2.5),
    ]
    history = [*steps(100), step(101, NAN, 1.0), *(step(n) for n in range(102, 172))]

    def run(*more: Fact) -> RunDiagnosis:
        return diagnose_run([alone(history, [*events, *more], {(catalog.ANOMALIES, "nonfinite_loss"): 1})])

    past = run()
    assert past.verdict.long.startswith("All well.")
    assert "Past: 1 loss that was not finite; the last 70 steps were healthy." in past.health.text
    (origin,) = (one for one in past.by_rank[0] if one.kind == "nonfinite_origin_operator")
    assert (origin.severity, origin.long.endswith("It is past: the last 70 steps were healthy.")) == ("info", True)
    spoiled = fact(catalog.EVENT_NONFINITE_ORIGIN, 1.1, 101, origin="parameter", parameter="bn.weight")
    mean = "bn.running_mean"
    rest = [fact(catalog.EVENT_NONFINITE_REST, 2.0, 160, parameters_affected=n, parameter=mean) for n in (2, 0)]
    for held, name in (([spoiled], "bn.weight"), ([rest[0]], mean), ([spoiled, rest[0]], mean)):
        found = run(*held)
        assert found.verdict.long.startswith("Trouble.")
        assert f"{name} holds NaN or infinity, and was not found to be finite since." in found.health.text
    assert run(spoiled, rest[1]).verdict.long.startswith("All well.")


@pytest.mark.parametrize(("level", "is_past"), [(2.5, True), (4.0, False)])
def test_spikes_are_past_when_the_loss_has_come_back(level: float, *, is_past: bool) -> None:
    """To where it was: one that stays high has not recovered, whatever its baseline says."""
    history = [*steps(100), *(step(n, 40.0) for n in range(101, 106)), *(step(n, level) for n in range(106, 200))]
    events = [fact(catalog.EVENT_ANOMALY, 1.0, n, kind="loss_spike", value=40.0, baseline=2.5) for n in range(101, 106)]
    found = diagnose_run([alone(history, events, {(catalog.ANOMALIES, "loss_spike"): 5})])
    assert found.health.text.endswith("Past: 5 loss spikes; the last 94 steps were healthy.") == is_past
    assert found.verdict.long.startswith("All well." if is_past else "Worth a look.")


def test_gradients_that_were_not_finite_or_vanished_are_told() -> None:
    """With the layers, three of them, and how many measured steps there were."""
    layers = {"layers": ["h.0", "h.1", "h.2", "h.3"], "layers_affected": 5, "kinds": ["nan"]}
    event = fact(catalog.EVENT_NONFINITE_GRADIENT, 8.1, 81, **layers)
    text = told(facts(steps(90), events=[event], values={catalog.GRAD_NONFINITE_STEPS: 2}))["nonfinite_gradient"]
    assert text == "Gradients were NaN in step 81, in h.0, h.1, h.2 and 2 more; in 2 measured steps in all."
    norms = {catalog.GRAD_NORM_DISTRIBUTION: Distribution((12, 0), 0.0, 0.0, 0.0)}
    values: dict[Any, Any] = {(catalog.ANOMALIES, "gradient_vanishing"): 8, **norms}
    text = told(facts(steps(100), values=values))["gradient_vanishing"]
    assert text == "The gradient norm was vanishingly small, or zero, in 8 steps of the 12 measured."


def test_an_explosion_is_told_with_its_rate_and_its_layer() -> None:
    """And how often it came again."""
    history = [*steps(100), *(step(n, 9.0, 80.0, learning_rate=1.0) for n in range(101, 104))]
    blown = {"layer": "h.0", "layer_norm": 70.0, "layer_usual": 0.5}
    events = [fact(catalog.EVENT_ANOMALY, 10.1, 101, kind="gradient_explosion", value=80.0, baseline=1.0, **blown)]
    found = told(facts(history, events=events, values={(catalog.ANOMALIES, "gradient_explosion"): 3}))
    assert found["gradient_explosion"] == (
        "The gradient norm rose in step 101 to 80, usual was 1; so it did in 2 later steps. The gradient of layer h.0 grew "
        "most: 70, usual was 0.5. The learning rate had risen 1,000-fold (from 0.001 to 1) in step 101."
    )


def test_a_loss_scaler_that_skips_is_told() -> None:
    """A collapsed scale is an error; a twentieth of all steps is worth a look."""
    events = [fact(catalog.EVENT_AMP_SCALE_COLLAPSED, 5.0, 50, scaler="0", scale=0.5)]
    values = {(catalog.AMP_SCALE, "0"): 0.25, catalog.STEPS: 100, catalog.AMP_STEPS_SKIPPED: 60}
    found = {one.kind: one for one in diagnose(facts(steps(100), events=events, values=values))}
    assert found["amp_scale_collapsed"].severity == "error"
    assert "amp_many_skips" not in found
    assert told(facts(steps(100), values=values))["amp_many_skips"] == "The loss scaler skipped 60 of 100 steps."
    assert "amp_many_skips" not in told(facts(steps(100), values={**values, catalog.AMP_STEPS_SKIPPED: 4}))


def test_what_an_earlier_model_did_is_no_measure_of_a_later_one() -> None:
    """A second fold begins with a rate and a norm far above those that the first one ended with, and is slower: no findings."""
    first = [step(number, 0.01, 1e-3, learning_rate=1e-6, duration_s=0.1) for number in range(1, 101)]
    later = [step(number, 2.0, 1.0, duration_s=0.3, new_model=number == 101) for number in range(101, 112)]
    event = fact(catalog.EVENT_MODEL_CHANGE, 10.1, 101, changes=1, steps_before=100)
    found = told(facts([*first, *later, step(112, NAN, NAN, duration_s=0.3)], events=[event]))
    assert "slowdown" not in found
    assert found["nonfinite_loss"] == "The loss turned NaN in step 112. The learning rate was 0.001."
    assert "from step 101 on" in found["model_changes"]


def stuck(cause: str, step: int, *layers: str) -> Fact:
    """The event of layers that learn nothing; of none of them, if that is taken back."""
    at = layers[-1] if layers else ""
    counts = {"layers_affected": len(layers), "layers_total": 9}
    return fact(catalog.EVENT_UNMOVED_LAYERS, 5.0, step, cause=cause, layers=list(layers), at=at, **counts)


def test_layers_that_learn_nothing_are_named_for_each_cause() -> None:
    """Of the last step that has them; an optimizer without gradients beside, until some come; unused ones as information."""

    def found(*events: Fact) -> dict[str, str]:
        return {kind: text for kind, text in told(facts(steps(300), events=events)).items() if "layers" in kind}

    early, tiny, cut = stuck("vanishing", 150, "z"), stuck("dead_units", 200, "b"), stuck("cut_off", 200, "a", "b", "c", "d")
    assert found(early, tiny, cut).keys() == {"unmoved_layers_dead_units", "unmoved_layers_cut_off"}
    assert found(cut)["unmoved_layers_cut_off"].startswith("4 of 9 layers (a, b, c and 1 more) learned nothing: no gradient")
    without = stuck("no_gradient", 34, "a", "b")
    assert found(without, tiny).keys() == {"unmoved_layers_no_gradient", "unmoved_layers_dead_units"}
    assert found(without, tiny, stuck("no_gradient", 250)).keys() == {"unmoved_layers_dead_units"}
    unused = facts(steps(300), events=[stuck("unused", 101, "pooler")])
    (one,) = (one for one in diagnose(unused) if one.kind == "unused_layers")
    assert (one.severity, one.long) == ("info", "1 layer of the optimizer has had no gradient by step 101 (pooler).")


def of_rate(history: Sequence[Step], **given: Any) -> dict[str, str]:
    """The findings on it, by kind."""
    found = told(facts(history, **given))
    return {kind: text for kind, text in found.items() if kind in {"diverged", "zero_learning_rate", "tiny_learning_rate"}}


def test_a_loss_that_left_its_start_for_good_is_told_with_the_rate() -> None:
    """As the fold found it, as long as the loss has not come back."""
    losses = [4.1, 60.0, 271.0, *[100.0] * 100]
    history = [step(number, loss, learning_rate=1.0) for number, loss in enumerate(losses, 1)]
    events = [fact(catalog.EVENT_ANOMALY, 5.2, 52, kind="diverged", value=100.0, baseline=4.1)]
    said = of_rate(history, values={(catalog.ANOMALY_ACTIVE, "diverged"): 1.0}, events=events)["diverged"]
    assert said == (
        "The loss rose from 4.1 to 10 times that or more within its first 20 steps, and has not come back: in step 103 it was "
        "100. The highest learning rate in them was 1."
    )
    assert of_rate(history, events=events) == {}


def rates(*runs: tuple[float | None, int], first: int = 1) -> list[Step]:
    """Steps in runs of one learning rate each."""
    every = [rate for rate, count in runs for _ in range(count)]
    return [step(number, learning_rate=rate) for number, rate in enumerate(every, first)]


def annealed(steps: int, power: int = 1) -> list[Step]:
    """A cosine to zero, or a power of it."""
    return [step(n, learning_rate=1e-3 * (0.5 + 0.5 * math.cos(math.pi * n / steps)) ** power) for n in range(1, steps + 1)]


HALVED = [step(number, learning_rate=1e-3 * 0.5**number) for number in range(301)]
TUNED = [*rates((30.0, 100)), *(each._replace(new_model=each.step == 101) for each in rates((1e-6, 300), first=101))]


@pytest.mark.parametrize(
    ("history", "others", "said"),
    [
        (rates((1e-3, 100), (0.0, 500)), {"1": 0.0}, "The learning rate was 0 from step 101 on: 500 steps changed nothing."),
        (rates((0.0, 300)), {}, "The learning rate was 0 in all steps: 300 steps changed nothing."),
        (
            rates((0.0, 300), first=9_000),
            {},
            "The learning rate was 0 from step 9,000 or before on: 300 steps changed nothing.",
        ),
        (
            HALVED,
            {"1": 1e-20},
            "The learning rate was below 5.96e-11 from step 24 on, after 0.001: 277 steps changed next to nothing.",
        ),
        (HALVED, {"1": 1e-3}, ""),
        (TUNED, {}, ""),
        (annealed(100), {}, ""),
        (annealed(4_000, 2), {}, ""),
        (rates((1e-3, 900), (0.0, 40)), {}, ""),
        (rates((0.0, 30), (1e-3, 100)), {}, ""),
        (rates((None, 300)), {}, ""),
        (rates((0.0, 300)), {"1": 1e-3}, ""),
    ],
)
def test_a_learning_rate_of_zero_is_told(history: list[Step], others: dict[str, float], said: str) -> None:
    """A schedule for fewer steps than there are, or one that nobody steps; not what schedules and frozen groups do as well."""
    values = {(catalog.LEARNING_RATE, group): rate for group, rate in others.items()}
    assert "".join(of_rate(history, values=values).values()) == said


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
