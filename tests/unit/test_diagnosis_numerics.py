"""What is said of losses, gradients and rates of a dead run: the sentences, from numbers alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.diagnosis_files import fact, facts, step, steps, told
from torchobs import catalog
from torchobs.diagnosis.diagnosis import RunDiagnosis, diagnose, diagnose_run, worst
from torchobs.diagnosis.numerics import learning_rate
from torchobs.diagnosis.rank_report import Fact, RankReport, Step
from torchobs.flight.reader.reader import Distribution

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchobs.diagnosis.rank_report import Fact, RankReport, Step

NAN = math.nan
SINCE_WHEN = "The loss turned NaN in step 100, where 2.5 was usual. It trained on for 9,900 steps with it."
GONE = "The loss has been NaN since step 9,000 or before: older steps are gone from the file."


AVERAGED = "on this rank or another: gradients are averaged"
REGION = {"operator": "compiled_function", "module": "blocks.3", "location": "train.py:9"}
ORIGINS: list[tuple[dict[str, str], str]] = [
    (
        {"origin": "operator", "operator": "log", "module": "blocks.3", "location": "train.py:9"},
        "The NaN or infinity of step 7 was born in log in blocks.3 (train.py:9).",
    ),
    (
        {"origin": "unknown", **REGION},
        (
            "The NaN or infinity of step 7 appeared inside compiled region blocks.3 (train.py:9)."
            " Run `debug.trace_nan(model, batch)`."
        ),
    ),
    (
        {"origin": "unknown", "note": "or a later one", **REGION},
        (
            "The NaN or infinity of step 7 appeared inside compiled region blocks.3 (train.py:9) or a later one."
            " Run `debug.trace_nan(model, batch)`."
        ),
    ),
    (
        {"origin": "backward", "operator": "checkpoint_function"},
        (
            "The NaN or infinity of step 7 appeared inside the backward pass of checkpointed region."
            " Run `debug.trace_nan(model, batch)`."
        ),
    ),
    (
        {"origin": "unknown", "operator": "sqrt", "module": "head", "location": "train.py:9", "note": AVERAGED},
        (
            "Where the NaN or infinity of step 7 began was not found: perhaps in the derivative of sqrt in head (train.py:9), "
            f"{AVERAGED}."
        ),
    ),
    (
        {"origin": "unknown", "parameter": "0.weight", "note": "and 5 more"},
        "Parameters (0.weight and 5 more) were NaN or infinite already in step 7; what made them so was not seen.",
    ),
    (
        {"origin": "parameter", "operator": "addmm", "parameter": "0.weight"},
        "The parameter 0.weight held the NaN or infinity of step 7 already; what made it so was not seen.",
    ),
]


@pytest.mark.parametrize(("attributes", "said"), ORIGINS)
def test_an_origin_is_told_as_far_as_it_is_known(attributes: dict[str, str], said: str) -> None:
    """An operator, a region and the call that looks inside, or what is not known."""
    event = fact(catalog.EVENT_NONFINITE_ORIGIN, 1.0, 7, **attributes)
    assert told(facts(steps(3), events=[event]))["nonfinite_origin"] == said


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


def alone(history: list[Step], events: list[Fact], values: Mapping[Any, float]) -> RankReport:
    """The only rank of a run that finished."""
    sizes = {"world_size": 1, "local_world_size": 1}
    return facts(history, state="finished", reason="finished", events=events, values=values, resource=sizes)


def test_a_loss_that_recovered_is_no_error() -> None:
    """The last one was finite; after fifty of them it is past, and a warning before."""
    for last, severity in ((150, "warning"), (151, "info"), (200, "info")):
        history = [*steps(100), step(101, NAN, NAN), *(step(n) for n in range(102, last + 1))]
        values = {(catalog.ANOMALIES, "nonfinite_loss"): 1}
        found = diagnose(facts(history, state="finished", reason="finished", values=values))
        assert [(finding.kind, finding.severity) for finding in found] == [("finished", "info"), ("nonfinite_loss", severity)]


def test_where_a_value_was_born_is_past_when_the_training_has_recovered() -> None:
    """With the steps since. Not while a parameter holds it: that no loss shows it proves nothing."""
    born = {"operator": "log", "module": "blocks.3"}
    events = [
        fact(catalog.EVENT_NONFINITE_ORIGIN, 1.0, 101, origin="operator", **born),
        fact(catalog.EVENT_ANOMALY, 1.0, 101, kind="nonfinite_loss", value=NAN, baseline=2.5),
    ]
    history = [*steps(100), step(101, NAN, 1.0), *(step(n) for n in range(102, 172))]
    values = {(catalog.ANOMALIES, "nonfinite_loss"): 1}

    def run(*more: Fact) -> RunDiagnosis:
        return diagnose_run([alone(history, [*events, *more], values)])

    past = run()
    assert past.verdict.long.startswith("All well.")
    assert "Past: 1 loss that was not finite (step 101); the last 70 steps were healthy." in past.health.text
    other = replace(alone(history, [], {(catalog.ANOMALIES, "nonfinite_loss"): 3}), suffix="-1")  # whose reports are gone
    both = diagnose_run([alone(history, events, values), other])
    assert "Past: 3 losses that were not finite; the last " in both.health.text
    (origin,) = (one for one in past.by_rank[0] if one.kind == "nonfinite_origin")
    assert (origin.severity, origin.long.endswith("It is past: the last 70 steps were healthy.")) == ("info", True)
    spoiled = fact(catalog.EVENT_NONFINITE_ORIGIN, 1.1, 101, origin="parameter", parameter="bn.weight")
    mean = "bn.running_mean"
    rest = [fact(catalog.EVENT_NONFINITE_REST, 2.0, 160, parameters_affected=n, parameter=mean) for n in (2, 0)]
    for held, name in (([spoiled], "bn.weight"), ([rest[0]], mean), ([spoiled, rest[0]], mean)):
        found = run(*held)
        assert found.verdict.long.startswith("Trouble.")
        assert f"{name} held NaN or infinity, and was not found to be finite since." in found.health.text
    assert run(spoiled, rest[1]).verdict.long.startswith("All well.")


@pytest.mark.parametrize(
    ("kind", "value", "level", "is_past"),
    [
        ("loss_spike", 40.0, 2.5, True),
        ("loss_spike", 40.0, 4.0, False),  # the baseline has followed: no spike, and nothing is well
    ],
)
def test_spikes_are_past_when_the_loss_has_come_back(kind: str, value: float, level: float, *, is_past: bool) -> None:
    """To where it was: one that stays high has not recovered, whatever its baseline says."""
    history = [*steps(100), *(step(n, value) for n in range(101, 106)), *(step(n, level) for n in range(106, 200))]
    events = [fact(catalog.EVENT_ANOMALY, 1.0, n, kind=kind, value=value, baseline=2.5) for n in range(101, 106)]
    values = {(catalog.ANOMALIES, kind): 5}
    found = diagnose_run([alone(history, events, values)])
    assert found.health.text.endswith("Past: 5 loss spikes (until step 105); the last 94 steps were healthy.") == is_past
    assert found.verdict.long.startswith("All well." if is_past else "Worth a look.")


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


def test_a_collapsed_loss_scale_is_an_error() -> None:
    """No scale helps where gradients are NaN."""
    events = [fact(catalog.EVENT_AMP_SCALE_COLLAPSED, 5.0, 50, scaler="0", scale=0.5)]
    values = {(catalog.AMP_SCALE, "0"): 0.25, catalog.STEPS: 100, catalog.AMP_STEPS_SKIPPED: 60}
    found = diagnose(facts(steps(100), events=events, values=values))
    assert worst(found) == "error"
    assert "it ended at 0.25" in told(facts(steps(100), events=events, values=values))["amp_scale_collapsed"]


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
        "It began to train parameters that it had not trained before in step 101 (the next model, fold or trial, or a "
        "part that begins late): losses and step times before and after it are judged apart."
    )
    again = told(facts([*first, *later], events=[event], values={catalog.MODEL_CHANGES: 3}))["model_changes"]
    assert "3 times, the last time in step 101 (" in again
    assert again.endswith("): losses and step times from one to the next are judged apart.")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [{"layers": ["a", "b", "c", "d"], "layers_affected": 12, "layers_total": 25, "cause": "vanishing", "at": "l"}],
            "12 of 25 layers learned nothing: the gradient is tiny on its way back to l (a, b, c and 9 more).",
        ),
        (
            [
                {"layers": ["b"], "layers_affected": 1, "layers_total": 3, "cause": "dead_units", "at": "b"},
                {"layers": ["a"], "layers_affected": 1, "layers_total": 3, "cause": "cut_off", "at": "a"},
            ],
            (
                "2 of 3 layers learned nothing: nothing but zeros comes into b, the units before it are dead; "
                "no gradient at all comes back to a, because of saturated or dead units behind it, or a part that is cut off "
                "from the loss."
            ),
        ),
    ],
)
def test_layers_that_learned_nothing_are_named(given: list[dict[str, object]], said: str) -> None:
    """How many of how many, and for each cause which; of the last step that has them."""
    earlier = fact(catalog.EVENT_UNMOVED_LAYERS, 4.0, 150, layers=["z"], layers_affected=1, layers_total=3, cause="vanishing")
    events = [earlier, *(fact(catalog.EVENT_UNMOVED_LAYERS, 5.0, 200, **one) for one in given)]
    assert told(facts(steps(300), events=events))["unmoved_layers"] == said


def missing(cause: str, step: int, *layers: str) -> Fact:
    """The event of layers that get no gradient; of none of them, if that is taken back."""
    counts = {"layers_affected": len(layers), "layers_total": max(3, len(layers))}
    at = layers[-1] if layers else ""
    return fact(catalog.EVENT_UNMOVED_LAYERS, 5.0, step, cause=cause, layers=list(layers), at=at, **counts)


def test_an_optimizer_without_gradients_is_reported_beside_other_causes_until_some_come() -> None:
    """What may be the cause stands with it; whatever else is seen in gradients, earlier or later, stays."""
    tiny = fact(
        catalog.EVENT_UNMOVED_LAYERS, 5.0, 200, layers=["z"], layers_affected=1, layers_total=9, cause="vanishing", at="z"
    )
    said = told(facts(steps(300), events=[missing("no_gradient", 34, "a", "b"), tiny]))["unmoved_layers"]
    assert said.startswith(
        "3 of 9 layers learned nothing: from step 34 on the optimizer gets no gradient for b (a, b). The loss"
    )
    assert "zero_grad() comes after backward()" in said
    assert "the gradient is tiny on its way back to z" in said
    back = [missing("no_gradient", 34, "a"), tiny, missing("no_gradient", 250)]
    assert told(facts(steps(300), events=back))["unmoved_layers"].startswith(
        "1 of 9 layers learned nothing: the gradient is tiny"
    )


def test_layers_that_may_be_unused_on_purpose_are_information() -> None:
    """Beside what learns nothing for another cause, and not counted with it."""
    findings = diagnose(facts(steps(300), events=[missing("unused", 101, "pooler")]))
    (found,) = [one for one in findings if one.kind == "unmoved_layers"]
    assert found.severity == "info"
    assert found.long == (
        "1 layer of the optimizer had got no gradient by step 101 (pooler): unused, or cut off from the loss (detach, no_grad)."
    )


@pytest.mark.parametrize("zero", [0.5, 1.0])
def test_gradients_that_are_all_zero_may_have_been_set_to_zero(zero: float) -> None:
    """Where a half of them is, something else is the cause."""
    values = {(catalog.ANOMALIES, "gradient_vanishing"): 4, catalog.GRAD_ZERO: zero}
    said = told(facts(steps(100), values=values))["gradient_vanishing"]
    assert said.endswith("Is zero_grad(set_to_none=False) called after backward()?") == (zero == 1.0)


def of_rate(history: Sequence[Step], **given: Any) -> dict[str, str]:
    """The findings by kind."""
    return {finding.kind: finding.long for finding in learning_rate(facts(history, **given))}


def with_losses(*losses: float, after: Sequence[float], **given: Any) -> list[Step]:
    """Steps with these losses."""
    return [step(number, loss, **given) for number, loss in enumerate([*losses, *after], 1)]


DIVERGED = {(catalog.ANOMALY_ACTIVE, "diverged"): 1.0}


def test_a_loss_that_left_its_start_for_good_is_told_with_the_rate() -> None:
    """As the fold found it; after another model's first steps the rate is that of the start, too."""
    history = with_losses(4.1, 60.0, 271.0, after=[100.0] * 100, learning_rate=1.0)
    events = [fact(catalog.EVENT_ANOMALY, 5.2, 52, kind="diverged", value=100.0, baseline=4.1)]
    text = "The loss rose from 4.1 to 10 times that or more within its first 20 steps, and has not come back: "
    assert of_rate(history, values=DIVERGED, events=events) == {
        "diverged": f"{text}in step 103 it was 100. The learning rate, 1, is a suspect."
    }
    later = of_rate(history[50:], values=DIVERGED, events=events)["diverged"]
    assert later == f"{text}in step 103 it was 100.", "the steps of the start are gone"
    assert "from its first value to" in of_rate(history, values=DIVERGED)["diverged"]
    assert of_rate(history, events=events) == {}, "it came back"


RAMPED = [min(12.0 * 1.5**number, 7e3) for number in range(45)]
"""The losses of a detector whose rate warms up to 1: 12, 18, 27 ..., and 7,000 in the end"""


def short(losses: Sequence[float], rate: float = 1.0, norm: float = 300.0) -> list[Step]:
    """The steps of a whole run."""
    return [step(number, loss, norm, learning_rate=rate) for number, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("losses", "given"),
    [
        (RAMPED, {"reason": "", "state": "training"}),
        (RAMPED[:24], {}),
        ([*RAMPED[:40], *[20.0] * 5], {}),
        ([*RAMPED[:40], *[100.0] * 5], {}),
        ([*RAMPED[:40], math.nan], {}),
        ([12.0 * number for number in range(1, 45)], {}),
    ],
    ids=["it still runs", "too few", "it came back", "it comes back", "it turned NaN", "its weight is ramped up"],
)
def test_other_short_runs_are_not(losses: list[float], given: dict[str, Any]) -> None:
    """What may still come back, has, or grows as a weight does."""
    assert of_rate(short(losses), **given) == {}


def test_a_short_run_of_short_steps_is_not_told() -> None:
    """A contrastive loss rises a thousandfold as its queue fills, and the weights hardly move."""
    assert of_rate(short(RAMPED, rate=1e-3, norm=1.0)) == {}


def rates(*runs: tuple[float | None, int], first: int = 1) -> list[Step]:
    """Steps in runs of one learning rate each."""
    every = [rate for rate, count in runs for _ in range(count)]
    return [step(number, learning_rate=rate) for number, rate in enumerate(every, first)]


@pytest.mark.parametrize(
    ("history", "since"),
    [
        (rates((1e-3, 100), (0.0, 500)), "from step 101 on: 500 steps"),
        (rates((0.0, 300)), "in all steps: 300 steps"),
        (rates((0.0, 300), first=9_000), "from step 9,000 or before on: 300 steps"),
    ],
    ids=["ended early", "from the start", "as far as is known"],
)
def test_a_learning_rate_of_zero_is_told(history: list[Step], since: str) -> None:
    """A schedule for fewer steps than there are, or one that nobody steps."""
    found = of_rate(history, values={(catalog.LEARNING_RATE, "1"): 0.0})
    assert found == {"zero_learning_rate": f"The learning rate was 0 {since} changed nothing."}


@pytest.mark.parametrize("others", [1e-20, 1e-3])
def test_a_learning_rate_next_to_zero_is_told(others: float) -> None:
    """Halved in each step; its 24th half is the first that float32 rounds away. Not told while another group trains."""
    history = [step(number, learning_rate=1e-3 * 0.5**number) for number in range(301)]
    found = of_rate(history, values={(catalog.LEARNING_RATE, "1"): others})
    text = "The learning rate was below 5.96e-11 from step 24 on, after 0.001: 277 steps may have changed next to nothing."
    hint = "Is a scheduler that counts epochs stepped in each batch?"
    assert found == ({"zero_learning_rate": f"{text} {hint}"} if others < 1e-10 else {})


def test_a_rate_is_next_to_zero_by_the_same_models_rates() -> None:
    """A linear probe at 30, and then fine-tuning at 1e-6; of the same model that would be next to zero."""
    probe, tuned = rates((30.0, 100)), rates((1e-6, 300), first=101)
    assert "zero_learning_rate" in of_rate([*probe, *tuned])
    tuned[0] = tuned[0]._replace(new_model=True)
    assert of_rate([*probe, *tuned]) == {}


def annealed(steps: int, power: int = 1) -> list[Step]:
    """A cosine to zero, or a power of it."""
    return [step(n, learning_rate=1e-3 * (0.5 + 0.5 * math.cos(math.pi * n / steps)) ** power) for n in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("history", "others"),
    [
        (annealed(100), {}),
        (annealed(4_000, 2), {}),
        (rates((1e-3, 900), (0.0, 40)), {}),
        (rates((1e-3, 100), (0.0, 10)), {}),
        (rates((0.0, 30), (1e-3, 100)), {}),
        (rates((None, 300)), {}),
        (rates((0.0, 300)), {"1": 1e-3}),
        (rates((0.0, 300)), {str(group): 0.0 for group in range(1, 8)}),
        ([], {}),
    ],
    ids=[
        "a cosine",
        "its square",
        "at its end",
        "few",
        "warm-up",
        "none",
        "of one group",
        "more groups than are recorded",
        "no steps",
    ],
)
def test_other_rates_are_not_called_zero(history: list[Step], others: dict[str, float]) -> None:
    """What schedules and frozen groups do as well."""
    assert of_rate(history, values={(catalog.LEARNING_RATE, group): rate for group, rate in others.items()}) == {}
