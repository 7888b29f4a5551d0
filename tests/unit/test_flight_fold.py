"""From step records to metrics: one pure function, whatever the batches; losses that diverge, goodput, throughput."""

from __future__ import annotations

import itertools
import zlib
from math import exp, inf, isnan, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from tests import flights
from torchobs import catalog
from torchobs.detect.spikes import CALM, LASTING
from torchobs.flight import fold, throughput
from torchobs.flight.fold import credit, credited
from torchobs.flight.forward import LEAST_STAMPS, ForwardShare
from torchobs.flight.layout import MAJOR, PHASE_NAMES
from torchobs.flight.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.throughput import LEAST_STEPS, pace, time_left_s
from torchobs.flight.totals import DIVERGED, STATES, WORDS, Anomaly, Totals, Word, core_series, is_active

HEADER = flights.header()
LAYOUT = 0xEFD6C175
NUMBERS = st.floats(width=64) | st.sampled_from([nan, inf, -inf, 0.0, 1e308, -1e308, 5e-324])
SECONDS = st.floats(min_value=0.0, max_value=1e6)
LAST = ("torchobs.loss", ())


def numbered(values_of_steps: list[dict[str, Any]]) -> list[StepRecord]:
    """These values as the records 1, 2, … of a ring; ``delay``: so many steps after its own."""
    records = []
    for seq, values in enumerate(values_of_steps, 1):
        delay = values.pop("delay")
        records.append(flights.step_record(HEADER, max(1, seq - delay), **values)._replace(seq=seq))
    return records


RECORDS = st.lists(
    st.fixed_dictionaries(
        {
            "delay": st.sampled_from([0, 0, 0, 1, 5]),
            "kind": st.sampled_from([RecordKind.STEP, RecordKind.STEP, RecordKind.LATE]),
            "flags": st.integers(0, 511),
            "loss": NUMBERS,
            "grad_norm": NUMBERS.map(abs),
            "learning_rate": NUMBERS,
            "duration_s": SECONDS,
            "phase_s": SECONDS.map(lambda seconds: (seconds,) * 9),
            "tokens": st.sampled_from([0, 1, 4096, 2**64 - 1]),
            "norm_scale": st.sampled_from([1.0, 1.0, 1024.0]),
        }
    ),
    min_size=1,
    max_size=30,
).map(numbered)
"""Records in ring order, as a hostile training could produce them: any flags, any numbers, late ones among them."""


def folded(batches: list[list[StepRecord]]) -> tuple[Totals, list[Anomaly]]:
    """The state after these batches, and what was found."""
    state, reported = flights.totals(HEADER), list[Anomaly]()
    for batch in batches:
        fold.fold(state, batch, reported)
    return state, reported


def fold_steps(*steps_values: dict[str, Any]) -> tuple[dict[Any, Any], list[Anomaly]]:
    """The points after steps 1, 2, … with the given values, and what was found."""
    records = [flights.step_record(HEADER, number, **values) for number, values in enumerate(steps_values, 1)]
    *_, last = flights.folded_states(HEADER, records)
    return last, folded([records])[1]


@given(RECORDS, st.lists(st.integers(0, 30), max_size=4))
def test_any_cut_of_the_records_into_batches_gives_the_same_words(records: list[StepRecord], cuts: list[int]) -> None:
    """The writer folds in batches, the reader the rest: bit by bit the same, or a total would step back by a rounding error."""
    edges = [0, *sorted(min(cut, len(records)) for cut in cuts), len(records)]
    batches = [records[begin:end] for begin, end in itertools.pairwise(edges)]
    at_once, reported = folded([records])
    in_parts, reported_in_parts = folded(batches)
    one_by_one, _ = folded([[record] for record in records])
    assert bytes(in_parts.buffer) == bytes(at_once.buffer) == bytes(one_by_one.buffer)
    assert sorted(map(repr, reported)) == sorted(map(repr, reported_in_parts))  # as text: NaN is not itself


@given(RECORDS)
def test_no_record_makes_a_counter_step_back_or_disappear(records: list[StepRecord]) -> None:
    """After every record each counter and each bucket is there and at least what it was, however large the values are."""
    before: dict[Any, Any] = {}
    for state in flights.folded_states(HEADER, records):
        for metric, attributes, _ in core_series():
            key = metric.name, tuple(attributes.items())
            if metric.kind is catalog.Kind.COUNTER:
                assert state[key] >= before.get(key, 0)
                assert state[key] < 2**63
            elif metric.kind is catalog.Kind.HISTOGRAM:
                assert abs(state[key].sum) < inf
                old = (before or state)[key].counts
                assert all(a >= b for a, b in zip(state[key].counts, old, strict=True))
        before = state


@settings(max_examples=50)
@given(st.lists(st.floats(min_value=0.0, allow_infinity=False), min_size=1, max_size=30))
def test_buckets_are_those_of_prometheus(durations: list[float]) -> None:
    """A value on a bound belongs to the bucket of that bound (le), as prometheus-client counts."""
    bounds = catalog.SECONDS_BOUNDS
    oracle = Histogram("x", "x", registry=CollectorRegistry(), buckets=bounds)
    values = [*durations, *bounds[:3]]
    for value in values:
        oracle.observe(value)
    points, _ = fold_steps(*({"duration_s": value} for value in values))
    distribution = points[catalog.STEP_DURATION.name, ()]
    cumulative = [sum(distribution.counts[: index + 1]) for index in range(len(bounds) + 1)]
    (family,) = oracle.collect()
    assert cumulative == [sample.value for sample in family.samples if sample.name == "x_bucket"]
    assert distribution.least == min(values)
    assert distribution.greatest == max(values)


def test_a_non_finite_loss_is_counted_and_never_shown_as_a_value() -> None:
    """A counter, a flag and an anomaly; the gauge keeps the last finite loss. A step that measured nothing ends no anomaly."""
    points, reported = fold_steps({"loss": 2.0}, {"loss": nan}, {"loss": -inf})
    kind = (("kind", "nonfinite_loss"),)
    assert points[catalog.ANOMALIES.name, kind] == 2
    assert points[catalog.ANOMALY_ACTIVE.name, kind] == 1.0
    assert points[LAST] == 2.0
    assert {anomaly.kind for anomaly in reported} == {"nonfinite_loss"}
    assert [(anomaly.step, anomaly.baseline) for anomaly in reported] == [(2, 2.0), (3, 2.0)]
    assert isnan(reported[0].value)
    points, _ = fold_steps({"grad_norm": nan}, {"flags": StepFlag.LOSS})
    assert points[catalog.ANOMALY_ACTIVE.name, (("kind", "nonfinite_gradient"),)] == 1.0


def test_what_a_device_delivers_after_a_newer_value_is_not_shown_but_counted() -> None:
    """The gauge is the newest step's; a late value of an older one moves neither it nor the baseline; a NaN is an anomaly."""
    late = {"step": 1, "kind": RecordKind.LATE, "flags": StepFlag.LOSS, "loss": 99.0}
    points, _ = fold_steps({"flags": 0}, {"loss": 3.0}, late)
    assert (points[LAST], points[catalog.STEPS.name, ()]) == (3.0, 2)
    late |= {"flags": StepFlag.LOSS | StepFlag.GRAD_NORM, "loss": nan, "grad_norm": inf}
    points, reported = fold_steps({"flags": 0}, {"loss": 3.0, "grad_norm": 1.0}, late)
    assert points[catalog.GRAD_NONFINITE_STEPS.name, ()] == 1
    for kind in ("nonfinite_loss", "nonfinite_gradient"):
        assert points[catalog.ANOMALIES.name, (("kind", kind),)] == 1
        assert points[catalog.ANOMALY_ACTIVE.name, (("kind", kind),)] == 0.0
    assert {(anomaly.kind, anomaly.step) for anomaly in reported} == {("nonfinite_loss", 1), ("nonfinite_gradient", 1)}


def test_skipped_steps_are_steps_whose_time_is_not_productive() -> None:
    """What the loss scaler threw away is goodput's loss, not its gain."""
    points, _ = fold_steps({}, {"flags": flights.ALL_VALUES | StepFlag.SKIPPED})
    assert (points[catalog.STEPS.name, ()], points[catalog.AMP_STEPS_SKIPPED.name, ()]) == (2, 1)
    spent = [points[catalog.GOODPUT_TIME.name, (("state", state),)] for state in ("productive", "skipped", "data")]
    assert spent == [0.1875, 0.1875, 0.125]


def test_a_batch_that_is_given_again_changes_nothing() -> None:
    """An interrupted fold is done once more; what was in it already is passed over, what was not is added."""
    records = [flights.step_record(HEADER, number, loss=nan) for number in (1, 2, 3, 4)]
    state, reported = folded([records[:3]])
    before = bytes(state.buffer)
    fold.fold(state, records[:3], reported)
    assert bytes(state.buffer) == before
    fold.fold(state, records, reported)
    assert bytes(state.buffer) == bytes(folded([records])[0].buffer)
    assert [anomaly.step for anomaly in reported] == [1, 2, 3, 4]


def test_another_model_has_a_past_of_its_own() -> None:
    """The first losses and norms of a second fold, far above the converged first one's, are nothing unusual; later ones are."""
    converged = [{"loss": 0.01 + number % 3 * 1e-4, "grad_norm": 1e-3} for number in range(60)]
    fresh = [{"loss": 2.0 + number % 3 * 0.01, "grad_norm": 1.0 + number % 3 * 0.01} for number in range(60)]
    begun = [{**fresh[0], "flags": flights.ALL_VALUES | StepFlag.NEW_MODEL}, *fresh[1:]]
    *_, reported = fold_steps(*converged, *fresh)
    assert reported == [], "by loss and norm alone it is a harder stage of the data"
    points, reported = fold_steps(*converged, *begun)
    assert (reported, points[catalog.MODEL_CHANGES.name, ()]) == ([], 1)
    _, reported = fold_steps(*converged, *begun, {"loss": 9.0, "grad_norm": 90.0}, *fresh[:CALM])
    assert {anomaly.kind: anomaly.step for anomaly in reported} == {"loss_spike": 121}, "the norm is that of the same batch"


def anomalies(field: str, values: list[float]) -> list[Anomaly]:
    """What is found in these losses, or norms."""
    flag = StepFlag.LOSS if field == "loss" else StepFlag.GRAD_NORM
    return fold_steps(*({field: value, "flags": flag} for value in values))[1]


def test_a_run_that_diverges_in_its_warm_up_is_found() -> None:
    """At its first value that is orders of magnitude above the start, beside a usual one that is the start's own."""
    for field, values, first in (
        ("loss", [2.3, 2.4, 2.2, 40.0, 9e3, 1.5e10], 5),
        ("loss", [2.3 * 3.1**n for n in range(20)], 10),
        ("grad_norm", [2.18, 61.2, 8.2e29], 3),
    ):
        reported = anomalies(field, values)
        assert reported[0].kind == ("loss_spike" if field == "loss" else "gradient_explosion")
        assert [anomaly.step for anomaly in reported] == list(range(first, len(values) + 1)), "and so are those after it"
        assert values[0] <= reported[0].baseline <= max(values[:3])


def test_what_is_usual_is_so_of_healthy_steps() -> None:
    """Steps that have blown up never become the measure of the next one: no report calls 4.6e+29 usual."""
    wild = [3e4 * 10.0**n for n in range(25)] + [1e29, 4e29, nan, 8e29, inf]
    for field, healthy in itertools.product(("loss", "grad_norm"), (5, 200)):
        reported = anomalies(field, [2.3 + 0.1 * (n % 3) for n in range(healthy)] + wild)
        assert [2.0 <= anomaly.baseline <= 3.0 for anomaly in reported] == [True] * len(wild)


def test_a_norm_has_neither_exploded_nor_vanished_where_the_loss_has_gone_with_it() -> None:
    """A curriculum's next stage, after a baseline of 0; norms of a fit that fall a thousandfold; a shard that is large."""
    learned = [
        {"loss": 2.3 * exp(-step / 1.5), "grad_norm": max(2.0 * exp(-step / 2), 1e-8 * (1 + step % 7))} for step in range(130)
    ]
    begins = [{"loss": loss, "grad_norm": norm} for loss, norm in ((19.2, 15.6), (13.9, 12.7), (4.2, 6.9))]
    goes_on = [{"loss": 1.5 + step % 5 * 0.1, "grad_norm": 0.5 + step % 3 * 0.1} for step in range(40)]
    _, reported = fold_steps(*learned, *begins, *goes_on)
    assert reported == []
    usual = [{"loss": 2.0, "grad_norm": 1.0 + index % 3} for index in range(30)]
    shard = [{"loss": values["loss"] * 900, "grad_norm": values["grad_norm"] * 900} for values in usual]
    assert fold_steps(*usual, *shard[:10], *usual, *shard, *usual)[1] == []
    for left, vanishes in ((1e-8, False), (0.5, True)):
        fall = [{"loss": 2.0 * left ** (index / 10), "grad_norm": 10.0 ** (-index / 2)} for index in range(1, 20)]
        assert ("gradient_vanishing" in {anomaly.kind for anomaly in fold_steps(*usual, *fall)[1]}) == vanishes


@pytest.mark.parametrize(("loss", "vanishes"), [(0.0, False), (0.3, True)])
@pytest.mark.parametrize("apart", [False, True])
def test_a_zero_gradient_has_vanished_unless_the_loss_is_zero(*, loss: float, vanishes: bool, apart: bool) -> None:
    """Also where a device delivers the loss in a record of its own, behind the norm's, and in another batch."""
    usual = [flights.step_record(HEADER, n, loss=0.3 + n % 5 * 0.01, grad_norm=1.0 + n % 7 * 0.1) for n in range(1, 101)]
    flags, seq, later = (StepFlag.GRAD_NORM, StepFlag.LOSS), 100, list[StepRecord]()
    for step in range(101, 141):
        values = {"step": step, "loss": loss, "grad_norm": 0.0}
        for delivered in flags if apart else (flags[0] | flags[1],):
            seq += 1
            kind = RecordKind.LATE if delivered is StepFlag.LOSS else RecordKind.STEP
            later.append(flights.step_record(HEADER, seq, flags=delivered, kind=kind, **values))
    for batches in ([[*usual, *later]], [[record] for record in (*usual, *later)]):
        kinds = [record.kind for record in folded(batches)[1]]
        assert kinds.count("gradient_vanishing") == (40 - LASTING + 1 if vanishes else 0)


@pytest.mark.parametrize("last", [nan, inf])
def test_norms_far_above_the_usual_have_exploded_if_those_after_them_are_not_finite(last: float) -> None:
    """Promise: they are counted, and no event calls them usual. Under a loss scaler an infinity between them says nothing."""
    usual = [1.0 + n % 5 / 64 for n in range(200)]
    reported = anomalies("grad_norm", [*usual, 40.0, 45.0, last, last, last])
    kinds = ["gradient_explosion"] * 2 + ["nonfinite_gradient"] * 3
    assert [(anomaly.kind, anomaly.step) for anomaly in reported] == list(zip(kinds, range(201, 206), strict=True))
    assert all(0.9 < anomaly.baseline < 1.1 for anomaly in reported)
    norms = [{"grad_norm": norm, "norm_scale": 1024.0} for norm in (*usual, 40.0, 45.0, last, *usual)]
    (only,) = fold_steps(*norms)[1]
    assert only.kind == "nonfinite_gradient"
    assert 0.9 < only.baseline < 1.1
    skipped = {"grad_norm": last, "flags": flights.ALL_VALUES | StepFlag.SKIPPED}
    reported = fold_steps(skipped, *({"grad_norm": norm} for norm in (*usual, 40.0, last, *usual)))[1]
    assert {anomaly.kind for anomaly in reported} == {"nonfinite_gradient"}


def step(number: int, loss: float, flags: int = StepFlag.LOSS, **fields: float) -> StepRecord:
    """A record of one."""
    return flights.step_record(HEADER, number, step=number, loss=loss, flags=flags, **fields)


def diverged(records: list[StepRecord], batch: int) -> tuple[bool, list[Anomaly]]:
    """Whether the loss is away in the end, and where that was found."""
    totals, reported = folded([records[begin : begin + batch] for begin in range(0, len(records), batch)])
    return is_active(totals, DIVERGED), [anomaly for anomaly in reported if anomaly.kind == "diverged"]


COURSES_OF_LOSS: dict[str, tuple[list[float], int | None]] = {
    "at once": ([4.1, 60.0, 271.0, *[100.0] * 100], 52),
    "in the twentieth step": ([0.2] * 19 + [12.0] * 60, 70),
    "came back once": ([4.1, 271.0, *[100.0] * 30, 5.0, *[100.0] * 100], None),
    "begins near zero": ([0.01, 0.9, *[1.9] * 200], None),
    "both signs": ([-4.0, 50.0, *[-3.0, 60.0] * 60], None),
    "later": ([*[2.0] * 30, *[200.0] * 100], None),
    "not finite: another anomaly": ([4.1, 271.0, *[100.0] * 30, nan, *[100.0] * 100], None),
    "a weight that is ramped up": ([18.0 * min(number, 100) for number in range(1, 300)], None),
    "a first batch of nothing": ([0.0, 1e-6, *[10.8 - number / 100 for number in range(300)]], None),
    "a first batch of nothing, and then away": ([0.0, 4.0, 271.0, *[100.0] * 100], 53),
}


def test_a_loss_that_leaves_its_start_for_good_has_diverged() -> None:
    """Told once, beside its first value; twenty times that is no spike by its own past, which is too short."""
    for name, batch in itertools.product(COURSES_OF_LOSS, (1, 7, 1000)):
        losses, at = COURSES_OF_LOSS[name]
        is_away, reported = diverged([step(number, loss) for number, loss in enumerate(losses, 1)], batch)
        expected = [] if at is None else [(at, next(filter(None, losses)))]
        assert [(anomaly.step, anomaly.baseline) for anomaly in reported] == expected, name
        assert is_away == (at is not None), name


def test_a_diverged_loss_is_active_until_it_comes_back_or_another_model_begins() -> None:
    """Late values of earlier steps change nothing."""
    away = [step(1, 4.0), *(step(number, 90.0) for number in range(2, 62))]
    late = step(62, 1.0, kind=RecordKind.LATE)._replace(step=5)
    for last, is_away in ((late, True), (step(62, 7.0), False), (step(62, 90.0, StepFlag.LOSS | StepFlag.NEW_MODEL), False)):
        assert diverged([*away, last], len(away))[0] is is_away


@pytest.mark.parametrize(
    ("rate", "norm", "is_away"),
    [(5e-4, 22.0, False), (1e-3, 330.0, False), (0.03, 0.3, False), (18.0, 0.85, True), (1.2, 300.0, True), (0.1, 1e5, True)],
    ids=["SGD on a sum", "Adam on a sum", "SGD on a mean", "hot SGD", "hot AdamW", "explodes"],
)
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_steps_too_short_to_have_taken_the_loss_away_have_not(rate: float, norm: float, batch: int, *, is_away: bool) -> None:
    """A contrastive loss rises as its queue fills, and a term's weight may be raised; every third norm is measured."""
    rated = StepFlag.LOSS | StepFlag.LEARNING_RATE
    records = [
        step(number, loss, rated if number % 3 else flights.ALL_VALUES, learning_rate=rate, grad_norm=norm)
        for number, loss in enumerate([0.4, 180.0, 300.0, *[360.0] * 100], 1)
    ]
    away, reported = diverged(records, batch)
    assert (away, [anomaly.step for anomaly in reported]) == (is_away, [52] * is_away)


def record(seq: int, *, end_s: float = 0.0, duration_s: float = 0.5, flags: int = 0, **fields: object) -> StepRecord:
    """A step's record."""
    phases = (0.1,) * 5 + (0.0,) * 4
    built = StepRecord(seq, seq, round(end_s * 1e9), RecordKind.STEP, flags, 0, duration_s, 0.0, 0.0, 0.0, phases, 10, 1, 1.0)
    return built._replace(**fields)  # type: ignore[arg-type]  # what a test wants


def spent(number: int, **seconds: float) -> StepRecord:
    """A step with these seconds."""
    phases = tuple(seconds.get(name, 0.0) for name in PHASE_NAMES)
    return record(number, end_s=number / 1e9, duration_s=sum(phases[:5]), phase_s=phases)


Credit = tuple[int, float, dict[str, float]]
"""After which step, the whole time since then, and what it went into"""
COURSES: dict[str, list[tuple[StepRecord | Credit, dict[str, float]]]] = {
    "an evaluation is shown while it lasts, and counted once": [
        (spent(1, forward=1.0), {"productive": 1.0}),
        ((1, 10.0, {"evaluation": 10.0}), {"productive": 1.0, "evaluation": 10.0}),
        ((1, 12.0, {"evaluation": 12.0}), {"productive": 1.0, "evaluation": 12.0}),
        ((1, 12.0, {"evaluation": 11.0}), {"productive": 1.0, "evaluation": 12.0}),
        (spent(2, evaluation=15.0, forward=2.0), {"productive": 3.0, "evaluation": 15.0}),
        (spent(3, forward=1.0), {"productive": 4.0, "evaluation": 15.0}),
    ],
    "no state steps back, and the whole is right, where data turn out to have been an evaluation": [
        ((0, 8.0, {"data": 8.0}), {"data": 8.0}),
        (spent(1, evaluation=9.0, forward=3.0), {"data": 8.0, "evaluation": 3.0, "productive": 1.0}),
    ],
    "idle stays idle when training goes on": [
        ((0, 60.0, {"idle": 60.0}), {"idle": 60.0}),
        (spent(1, forward=61.0, backward=1.0), {"idle": 60.0, "productive": 2.0}),
    ],
    "more credit than a step had is the next one's, for its end was provisional": [
        ((0, 20.0, {"evaluation": 19.0}), {"evaluation": 19.0}),
        (spent(1, forward=1.0), {"evaluation": 19.0}),
        (spent(2, evaluation=19.0, forward=2.0), {"evaluation": 20.0, "productive": 2.0}),
    ],
    "never more than has passed": [
        ((0, 10.0, {"data": 10.0}), {"data": 10.0}),
        ((0, 12.0, {"evaluation": 12.0}), {"data": 10.0, "evaluation": 2.0}),
    ],
}


@pytest.mark.parametrize("course", COURSES)
def test_goodput_of_what_is_under_way(course: str) -> None:
    """A record is folded, or a credit given."""
    totals = flights.totals(HEADER)
    for act, expected in COURSES[course]:
        if isinstance(act, StepRecord):
            fold.fold(totals, [act])
        else:
            after, whole_s, seconds = act
            credit(totals, after, [seconds.get(state, 0.0) for state in STATES], whole_s)
        values = totals.floats[Word.GOODPUT : Word.GOODPUT + len(catalog.GOODPUT_STATES)]
        goodput = {state: value for state, value in zip(catalog.GOODPUT_STATES, values, strict=True) if value}
        assert goodput == pytest.approx(expected)
    assert sum(credited(totals)) == pytest.approx(0.0) or isinstance(act, tuple)


def test_the_pace_is_that_of_the_clock() -> None:
    """What lies between two steps counts for the speed alone; there is none of one step, and a late value is no step."""
    speed = pace([record(1, end_s=1.0), record(2, end_s=1.5), record(3, end_s=4.0)])
    assert speed is not None
    assert (speed.steps, speed.step_s) == (3, 0.5)
    assert (speed.per_s, speed.tokens_per_s) == pytest.approx((2 / 3, 20 / 3))
    assert speed.shares == pytest.approx((*(0.2,) * 5, 0.0))
    assert pace([record(1, end_s=1.0, flags=StepFlag.UNTIMED), record(9, end_s=1.0, kind=RecordKind.LATE)]) is None
    only = pace([record(1, end_s=1.0)])
    assert only is not None
    assert only.per_s is None


def evenly(count: int, every_s: float) -> list[StepRecord]:
    """Steps that end so many seconds apart."""
    return [record(number, end_s=number * every_s) for number in range(1, count + 1)]


def test_the_window_is_a_minute_where_that_is_neither_too_long_nor_too_short() -> None:
    """However many records somebody has read."""
    for count, every_s, steps in ((1000, 0.001, throughput.RECORDS), (200, 1.0, 61), (50, 100.0, LEAST_STEPS)):
        speed = pace(evenly(count, every_s))
        assert speed is not None
        assert speed.steps == steps
        assert speed.per_s == pytest.approx(1 / every_s)
        assert speed.window_s == pytest.approx((steps - 1) * every_s)
        assert pace(evenly(count, every_s)[-throughput.RECORDS :]) == speed


def test_the_time_left_is_that_of_the_steps_to_come_and_of_the_evaluations_between_them() -> None:
    """A hundred steps of half a second, each with a tenth more for evaluations; not without a total, a step, or a pace."""
    speed = pace(evenly(20, 0.5))
    assert time_left_s(speed, 20, 120, 0.0) == pytest.approx(50.0)
    assert time_left_s(speed, 20, 120, 2.0) == pytest.approx(60.0)
    for done, total in ((20, 0), (0, 100), (100, 100), (150, 100), (20, inf), (20, nan)):
        assert time_left_s(speed, done, total, 0.0) is None
    assert time_left_s(pace(evenly(1, 0.5)), 1, 100, 0.0) is time_left_s(None, 20, 100, 0.0) is None


def test_words_stay_where_they_are() -> None:
    """Promise: readers of other versions find every total; another layout needs another version of the file."""
    words = {name: word for name, word in vars(Word).items() if name.isupper()}
    assert zlib.crc32(repr((MAJOR, sorted(words.items()), WORDS)).encode()) == LAYOUT


def stamped(seq: int, called_s: float, *, fetch: bool) -> StepRecord:
    """A plain step of a second: 0.2 s, a fetch of 0.1 s or none, 0.4 s, and a backward pass."""
    data_s, before_s, after_s = (0.1, 0.2, 0.4) if fetch else (0.0, 0.0, 0.6)
    seconds = {"data": data_s, "other": before_s, "forward" if fetch else "between": after_s, "backward": 0.3}
    return spent(seq, **seconds)._replace(end_ns=seq * 10**9, duration_s=0.5, gap_s=(before_s, after_s, called_s))


@pytest.mark.parametrize(
    ("fetch", "called_s", "forward_s"),
    [(False, 0.45, 0.15), (False, 0.0001, 0.5999), (True, 0.4, 0.3), (True, 0.05, 0.55)],
    ids=["batch by hand", "forward at once", "augmentation behind the fetch", "next batch fetched behind the forward pass"],
)
def test_stamps_divide_the_time_before_a_backward_pass(fetch: bool, called_s: float, forward_s: float) -> None:  # noqa: FBT001  # parametrized
    """From the twentieth on, every step; however the records are cut, and alike for the mean of the last steps."""
    steps = [stamped(seq, called_s if seq <= LEAST_STAMPS else 0.0, fetch=fetch) for seq in range(1, LEAST_STAMPS + 101)]
    whole, parts = flights.totals(HEADER), flights.totals(HEADER)
    fold.fold(whole, steps)
    for begin in range(0, len(steps), 7):
        fold.fold(parts, steps[begin : begin + 7])
    assert bytes(whole.buffer) == bytes(parts.buffer)
    times = dict(zip(catalog.PHASES, whole.floats[Word.PHASE_TIME : Word.PHASE_TIME + len(catalog.PHASES)], strict=True))
    divided, plain = (101, LEAST_STAMPS - 1)
    assert times["between"] == pytest.approx(0.0 if fetch else 0.6 * plain)
    assert times["forward"] == pytest.approx(forward_s * divided + 0.4 * plain * fetch)
    assert sum(times.values()) == pytest.approx(len(steps) * (1.0 if fetch else 0.9))
    share = ForwardShare(whole.floats[Word.FORWARD_SHARE : Word.FORWARD_SHARE + 5])
    last = pace(steps[-50:], share)
    assert last is not None
    assert last.phases_s[catalog.PHASES.index("forward")] == pytest.approx(forward_s)
    assert last.phases_s[catalog.PHASES.index("between")] == 0.0
