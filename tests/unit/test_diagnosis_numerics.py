"""What is said of losses, gradients and rates of a rank: from numbers alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from tests.diagnosis_files import PHASES, START_S, fact, facts, origin_told, step, steps, told
from torchobs import catalog
from torchobs.diagnosis.health import diagnose
from torchobs.flight.reader import Distribution

if TYPE_CHECKING:
    from torchobs.flight.events import Event
    from torchobs.ranks.rank_view import Step

NAN = math.nan
REGION = {"origin": "unknown", "operator": "compiled_function", "module": "blocks.3", "location": "train.py:9"}
ORIGINS: dict[str, dict[str, str]] = {
    "The NaN or infinity of step 7 was born in log in blocks.3 (": {**REGION, "origin": "operator", "operator": "log"},
    "infinity of step 7 appeared inside compiled region blocks.3 (train.py:9). Run `debug.trace_nan(": REGION,
    "inside the backward pass of a checkpointed region. Run": {"origin": "backward", "operator": "checkpoint_function"},
    "began was not found: it passed sqrt in blocks.3 (train.py:9); on a": {**REGION, "operator": "sqrt", "note": "on a"},
    "0.weight and 5 more held the NaN or infinity of": {"origin": "unknown", "parameter": "0.weight", "note": "and 5 more"},
    "born in the derivative of sqrt, outside of any module. That derivative is": {"origin": "backward", "operator": "sqrt"},
    "step 7 came with the input x; it went into addmm.": {"origin": "input", "operator": "addmm", "parameter": "x"},
    "overflowed in float16, in 0.weight: the largest number there is 65,504": {"origin": "overflow", "parameter": "0.weight"},
}


def test_an_origin_is_told_as_far_as_it_is_known() -> None:
    """An operator, a region and the call that looks inside, or what is not known."""
    for said, attributes in ORIGINS.items():
        assert said in origin_told(fact(catalog.EVENT_NONFINITE_ORIGIN, 1.0, 7, **attributes))


GRADIENT = [*steps(100), step(101, 2.5, math.inf), step(102, NAN, NAN)]
LEAPT = [*steps(100), step(101, 2.0, 1.0, learning_rate=1.0), step(102, NAN, NAN, learning_rate=1.0)]
ROSE = [*steps(808), step(809, 2.0, 40.0), step(810, 3.0), step(811, 4.0), *(step(n, NAN, NAN) for n in range(812, 822))]
WARM_UP = [*(step(n, learning_rate=1e-3 * n / 100) for n in range(1, 101)), step(101, NAN, NAN)]


@pytest.mark.parametrize(
    ("history", "said"),
    [
        (
            ROSE,
            "turned NaN in step 812, 3 steps after the gradient norm rose 40-fold (from 1 to 40). The learning rate was 0.001",
        ),
        (ROSE, " It trained on for 9 steps after that."),
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
        (rates((1e-3, 100), (0.0, 500)), {"1": 0.0}, "was 0 from step 101 on: 500 steps changed nothing."),
        (rates((0.0, 300)), {}, "was 0 in all steps: 300 steps changed nothing."),
        (rates((0.0, 300), first=9_000), {}, "was 0 from step 9,000 or before on: 300 steps changed nothing."),
        (HALVED, {"1": 1e-20}, "was below 5.96e-11 from step 24 on, after 0.001: 277 steps changed next to nothing."),
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
    found = told(facts(history, values={(catalog.LEARNING_RATE, group): rate for group, rate in others.items()}))
    texts = [found[kind] for kind in ("diverged", "zero_learning_rate", "tiny_learning_rate") if kind in found]
    assert texts == ([f"The learning rate {said}"] if said else [])


def test_a_step_that_took_very_long_is_told_though_the_run_went_on() -> None:
    """A stopped process, a file system that came back: the long step of a run that finished; an evaluation is none."""
    stood = step(150, duration_s=160.1, phase_s={**PHASES, "forward": 160.0})
    history = [*steps(149), stood, *steps(300)[150:159], step(160, duration_s=300.0), *steps(300)[160:]]
    text = told(facts(history, state="finished", reason="finished"))["held_up"]
    assert text == "Step 150 took 2 min 40 s, where 100 ms was usual, most of it in the phase forward."


def test_what_is_lost_since_the_last_checkpoint_is_told() -> None:
    """In steps and in time; without one nothing, for something unseen may have saved."""
    saved = facts(steps(100), values={catalog.CHECKPOINT_TIMESTAMP: START_S + 7.05})
    text = "The last checkpoint was complete 2.95 s before the end: 30 steps must be done again."
    assert told(saved)["checkpoint_age"] == text
    late = facts(steps(100), values={catalog.CHECKPOINT_TIMESTAMP: START_S + 10.0377})
    assert told(late)["checkpoint_age"] == "The last checkpoint was complete at the end: nothing has to be done again."
    assert "checkpoint_age" not in told(facts(steps(100), last_s=START_S + 600))


def test_steps_that_became_slow_name_the_phase() -> None:
    """For ten seconds at least, whatever the steps' number; compilation makes a run slower, though no step's duration."""
    slow = {"data": 0.21, "forward": 0.02, "backward": 0.05, "optimizer": 0.01, "other": 0.01}
    history = [*steps(600), *(step(n, duration_s=0.3, phase_s=slow) for n in range(601, 635))]
    text = "The last 34 steps (10.2 s) took 300 ms each, usual was 100 ms; 100 % of the difference is in the phase data."
    assert told(facts(history))["slowdown"] == text
    assert "slowdown" not in told(facts(history[:-10]))
    history = [*steps(600), *(step(n, duration_s=0.1, phase_s={**PHASES, "compile": 0.9}) for n in range(601, 611))]
    assert told(facts(history))["slowdown"] == (
        "The last 10 steps (10 s) took 1 s each, usual was 100 ms; 100 % of the difference is in the phase compile."
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


def test_waiting_for_data_is_told_from_a_fifth_of_the_time_on() -> None:
    """With what the workers had ready; one long wait is not called a lack of workers."""
    data, forward = ((catalog.STEP_PHASE_TIME, phase) for phase in ("data", "forward"))
    starved: dict[Any, float] = {data: 40.0, forward: 60.0, catalog.DATA_BATCHES_READY: 0.0}
    found = told(facts(steps(100), values=starved))["data"]
    assert found.startswith("Training waited for its data: 40 % of the time of its steps. Its workers had no batch ready")
    assert "data" not in told(facts(steps(100), values={**starved, data: 10.0}))
    stalled = step(101, duration_s=40.0, phase_s={**PHASES, "data": 39.5})
    found = told(facts([*steps(100), stalled], values=starved))["data"]
    assert found.endswith(" Most of it was one wait of 39.5 s, in step 101: something stalled there.")


def stuck(cause: str, step: int, *layers: str) -> Event:
    """The event of layers that learn nothing; of none of them, if that is taken back."""
    at = layers[-1] if layers else ""
    counts = {"layers_affected": len(layers), "layers_total": 9}
    return fact(catalog.EVENT_UNMOVED_LAYERS, 5.0, step, cause=cause, layers=list(layers), at=at, **counts)


def test_layers_that_learn_nothing_are_named_for_each_cause() -> None:
    """Of the last step that has them; an optimizer without gradients beside, until some come; unused ones as information."""

    def found(*events: Event) -> dict[str, str]:
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


def test_a_leak_leads_with_what_grew_how_much_and_where() -> None:
    """The tensors, else the line, else that it is not Python's."""
    attributes = {"space": "host", "grown": 195 << 20, "steps": 40}
    tensors, lines = ["244 tensors float32[200000] on cpu, 186 MiB"], ["train.py:23 2,000 more, 95 MiB"]

    def words(**rows: list[str]) -> str:
        return told(facts(steps(90), events=[fact(catalog.EVENT_MEMORY_LEAK, 6.0, 60, **attributes, **rows)]))["memory_leak"]

    leaks, grew = "Host memory leaks", "It grew by 195 MiB in 40 steps."
    assert words(tensors=tensors, lines=lines) == f"{leaks}: {tensors[0]}, made at train.py:23, are never freed. {grew}"
    assert words(lines=lines) == f"{leaks}: what train.py:23 makes is never freed (2,000 more, 95 MiB). {grew}"
    assert words() == f"{leaks}, but no object of Python's became more: look at native code. {grew}"


def test_steps_without_a_loss_are_not_steps_that_are_gone() -> None:
    """An earlier loss is unknown only where the file begins later."""
    for first, said in {
        1: "The loss turned NaN in step 5. ",
        9: "The loss has been NaN since step 13 or before: older",
    }.items():
        history = [step(number, NAN if number == first + 4 else None) for number in range(first, first + 6)]
        assert any(line.startswith(said) for line in told(facts(history)).values())
