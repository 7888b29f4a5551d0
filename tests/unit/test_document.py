"""What a report and the live page say: sections and findings, of two runs what differs, words, numbers and events."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from tests import flights
from tests.diagnosis_files import START_S, Values, fact, facts, row, step, steps
from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.document import sections
from torchobs.document.blocks import Items, LineChart, Series, Table
from torchobs.document.charts import SMALL_BUCKETS, curve, small, stacked
from torchobs.document.compare import Difference, Side, compare, comparison_document
from torchobs.document.event_log import EventRow, log_of, merged_ranks, rows_of
from torchobs.document.files import markdown
from torchobs.document.html import page
from torchobs.document.kept import side_for
from torchobs.document.live import Choice, figures
from torchobs.document.markup import tag
from torchobs.document.run import Options, document, run_document
from torchobs.document.sections import anomalies, event_words
from torchobs.document.text import TerminalStyle, render
from torchobs.exporter.page import choice_of
from torchobs.flight.details import History, HistoryRow
from torchobs.flight.forward import ForwardShare
from torchobs.flight.reader import Distribution
from torchobs.ranks.events import events_of
from torchobs.ranks.rank_view import run_of
from torchobs.ranks.runs import Chosen
from torchobs.support.rate_limit import BURST

GB = 1 << 30


def test_a_slowdown_leads_to_where_the_time_went() -> None:
    """The finding's link."""
    slow = [step(number, duration_s=0.5, phase_s={"data": 0.5}) for number in range(601, 641)]
    run = facts([*steps(600), *slow], state="finished", reason="finished", values={(catalog.GOODPUT_TIME, "productive"): 60.0})
    happened = run_document(Chosen([run], [], [], [])).sections[0]
    items = next(block for block in happened.blocks if isinstance(block, Items))
    assert [item.section for item in items.items if "each, usual was" in item.words] == ["time"]


def test_a_phase_that_nothing_sets_apart_has_no_time() -> None:
    """Without a data loader the forward pass is part of what lies between: it does not take 0 s."""
    plain = {"data": 0.0, "forward": 0.0, "backward": 0.04, "optimizer": 0.02, "other": 0.01, "between": 0.03}
    (table,) = sections.last_steps(facts([step(1, phase_s=plain)]), "", 1).blocks
    assert isinstance(table, Table)
    shown = dict(zip(table.head, table.rows[0], strict=True))
    assert not {"data", "forward"} & shown.keys()
    assert (shown["backward"], shown["between"]) == ("40 ms", "30 ms")
    assert table.caption == "With the time of each phase"


def test_tables_of_means_are_divided_by_the_forward_stamps_and_single_steps_are_not() -> None:
    """As the metrics are: of 60 ms before the fetch and 40 ms after it the forward pass has half, on the mean."""
    raw = {"data": 0.02, "forward": 0.04, "backward": 0.05, "optimizer": 0.01, "other": 0.08}
    history = [step(number, duration_s=0.2, phase_s=raw, gap_s=(0.06, 0.04, 0.0)) for number in range(1, 41)]
    rank = facts(history, share=ForwardShare((20.0, 0.06, 0.03, 0.04, 0.02)))
    (steps_table,) = sections.last_steps(rank, "", 1).blocks
    whole = run_document(Chosen([rank, rank], [], [], []))
    ranks = next(section for section in whole.sections if section.name == "ranks").blocks[0]
    assert isinstance(steps_table, Table)
    assert isinstance(ranks, Table)
    shown, typical = (dict(zip(table.head, table.rows[0], strict=True)) for table in (steps_table, ranks))
    assert "forward" not in shown
    assert (shown["between"], shown["other"], shown["backward"]) == ("100 ms", "20 ms", "50 ms")
    assert (typical["forward"], typical["other"], typical["backward"]) == ("50 ms", "70 ms", "50 ms")
    assert "between" not in typical


def test_sizes_and_durations_of_events_have_their_units() -> None:
    """In text for people, and beside the numbers for programs."""
    full = fact(catalog.EVENT_OUT_OF_MEMORY, 4.0, 40, device="cuda:0", requested=2 * GB, limit=80 * GB)
    asked = fact(catalog.EVENT_STACKS, 5.0, 41, cause="stalled", quiet_s=12.5)
    run = facts(steps(50), events=[full, asked])
    report = run_document(Chosen([run], [], [], []))
    for text in (page(report), markdown(report)):
        assert "requested 2 GiB" in text
        assert "12.5 s" in text
        assert str(2 * GB) not in text
    (rank,) = document([run], [], [], Options())["ranks"]
    assert [event["units"] for event in rank["events"]] == [{"requested": "By", "limit": "By"}, {"quiet_s": "s"}]
    assert rank["events"][0]["attributes"]["requested"] == 2 * GB
    assert json.dumps(rank["events"])


def test_an_anomaly_is_as_bad_as_its_kind_everywhere() -> None:
    """A NaN is an error, a spike a warning; Ctrl-C is none."""
    bad, spike = (fact(catalog.EVENT_ANOMALY, 4.0, 40, kind=kind) for kind in ("nonfinite_loss", "loss_spike"))
    interrupt = fact(catalog.EVENT_EXCEPTION, 5.0, 50, exception__type="builtins.KeyboardInterrupt")
    severities = [catalog.event_severity(event.name, event.attributes) for event in (bad, spike, interrupt)]
    assert severities == [Severity.ERROR, Severity.WARNING, Severity.INFO]
    assert catalog.event_severity("mine", {}) is Severity.INFO
    assert catalog.event_severity(catalog.EVENT_ANOMALY.name, {"kind": ["?"]}) is Severity.WARNING
    run = facts(steps(50), events=[bad, spike, interrupt])
    assert {mark.name: mark.severity for mark in sections._marks(run)} == {"nonfinite loss": "error", "loss spike": "warning"}
    (rank,) = document([run], [], [], Options())["ranks"]
    assert [event["severity"] for event in rank["events"]] == ["error", "warning", "info"]
    assert rank["events"][0]["time"] == START_S + 4.0


def test_a_share_is_of_the_steps_that_were_measured() -> None:
    """Promise: of gradients those with a norm, finite or not, where they are known; of losses all steps."""
    values: dict[Any, Any] = {
        (catalog.ANOMALIES, "gradient_vanishing"): 8, (catalog.ANOMALIES, "nonfinite_loss"): 5,
        catalog.GRAD_NORM_DISTRIBUTION: Distribution((10, 2, 0), 1.0, 0.0, 1.0), catalog.GRAD_NONFINITE_STEPS: 4,
    }  # fmt: skip
    assert table(values) == (("vanishing gradient", "8", "50 %"), ("loss that was not finite", "5", "5 %"))
    del values[catalog.GRAD_NORM_DISTRIBUTION], values[catalog.GRAD_NONFINITE_STEPS]
    assert table(values) == (("vanishing gradient", "8", "8 %"), ("loss that was not finite", "5", "5 %"))


def table(values: dict[Any, Any]) -> tuple[tuple[str, ...], ...]:
    """The rows on a run of a hundred steps."""
    (rows_table,) = anomalies(facts(steps(100), values=values), "").blocks
    assert isinstance(rows_table, Table)
    return rows_table.rows


def test_what_a_script_asked_for_is_no_anomaly() -> None:
    """Promise: an evaluation that ended, a sampled line, are not listed among anomalies; a spike is."""
    ordinary = (catalog.EVENT_DEBUG_VALIDATION, catalog.EVENT_TUNE_PLAN, catalog.EVENT_STEP_BETWEEN)
    asked = [fact(event, 5.0, 50, name="x") for event in ordinary]
    assert not anomalies(facts(steps(100), events=asked), "").blocks
    spike = fact(catalog.EVENT_ANOMALY, 6.0, 60, kind="loss_spike")
    (chart,) = anomalies(facts(steps(100), events=[*asked, spike]), "").blocks
    assert getattr(chart, "rows", None) == (("Loss spike", "warning", (60.0,)),)


def run(*losses: float) -> Chosen:
    """A run of one rank, from its beginning; the last tenth of its steps has these losses."""
    history = [*(step(number, 9.0) for number in range(1, 41)), *map(step, range(41, 46), losses)]
    return Chosen([facts(history, values={catalog.STEPS_RESUMED_FROM: 0.0})], [], [], [])


def test_a_curve_has_median_and_range_of_both_runs() -> None:
    """The range is that of the middle half, so that one spike does not make it; nothing is judged."""
    comparison = compare(side_for(run(2.0, 2.1, 2.2, 2.3, 99.0)), side_for(run(1.0, 1.1, 1.1, 1.1, 1.2)))
    loss = next(quantity for quantity in comparison.quantities if quantity.what == "loss, steps 41 to 45")
    assert (loss.first, loss.first_range) == (2.2, (2.1, 2.3))
    assert (loss.second, loss.second_range, loss.change) == (1.1, (1.1, 1.1), -0.5)
    text = markdown(comparison_document(comparison))
    assert "| loss, steps 41 to 45 | 2.2 (2.1 to 2.3) | 1.1 (1.1 to 1.1) | -50.0 % |" in text
    quantities = {quantity["what"]: quantity for quantity in comparison.to_dict()["quantities"]}
    assert quantities[loss.what]["first_range"] == [2.1, 2.3]


def test_a_run_that_was_resumed_is_compared_step_by_step() -> None:
    """Its first step is the one after those that it was resumed from; where nothing says that, no step is compared."""

    def side(first_loss: float, *before: float) -> Side:
        history = [step(number, first_loss - number) for number in range(1, 41)]
        return side_for(Chosen([facts(history, values=dict.fromkeys([catalog.STEPS_RESUMED_FROM], *before))], [], [], []))

    whole, resumed, uncounted = side(60.0, 0.0), side(40.0, 20.0), side(40.0)
    comparison, unknown = compare(whole, resumed), compare(whole, uncounted)
    (loss,) = (quantity for quantity in comparison.quantities if quantity.what.startswith("loss, "))
    assert (loss.what, loss.first, loss.second) == ("loss, steps 36 to 40", 22.0, 22.0)
    assert Difference("resumed from step", "0", "20") in comparison.differences
    assert not any(quantity.what.startswith("loss, ") for quantity in unknown.quantities)
    assert [entry["resumed_from"] for entry in unknown.to_dict()["runs"]] == [0.0, None]
    text = " ".join(render(comparison_document(unknown), TerminalStyle(200)))
    assert "Nothing says at which step B began" in text


@pytest.mark.parametrize(("losses", "said"), [(1, "the last one"), (8, "the last one, sum of 8 backward passes, mean 3.7")])
def test_a_sum_over_micro_batches_says_so(losses: int, said: str) -> None:
    """Beside the number, which otherwise is eight times what the script prints; steps say where they begin to count."""
    run = facts([step(1, 29.6, losses=losses)], values={catalog.LOSS: 29.6, catalog.STEPS: 1})
    shown = {figure.name: figure.more for figure in figures(run, run_of([run])).figures}
    assert shown["Loss"] == said
    assert shown["Steps"].startswith("counted from 1, in ")
    damaged = run_document(Chosen([facts([], partial=True)], [], [], []))
    assert ("no step in its file" in damaged.headline, "counted from 1" in markdown(damaged)) == (True, False)


def test_only_layers_that_have_no_series_are_left_out() -> None:
    """Not where each layer has one."""
    for names, said in ((("fc1", "fc2"), False), (("fc1", "other"), True)):
        rows = (HistoryRow(0.0, 1, (1.0, 2.0)),)
        history = History(tuple(f"{catalog.GRAD_LAYER_NORM.name}{{{name}}}" for name in names), rows)
        assert ("Only the largest layers" in str(sections.layers(replace(facts(), history=history), ""))) == said


NAN, INF = math.nan, math.inf


def test_elements_without_content_are_closed_as_html_and_as_svg_want_it() -> None:
    """An open `<rect>` would hold all that follow, and show only the first."""
    assert stacked([("data", 0.5), ("forward", 0.5)]).count("/><rect") == 1
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8"/>'


def test_what_is_not_finite_is_counted_and_leaves_a_gap() -> None:
    """A NaN is data."""
    points = [(1.0, 1.0), (2.0, NAN), (3.0, 2.0), (4.0, -INF)]
    line = curve(points, SMALL_BUCKETS)
    assert line is not None
    assert (line.nonfinite, line.last) == (2, 2.0)
    assert [bucket.mean for bucket in line.buckets] == [1.0, None, 2.0, None]
    drawn = small(LineChart("Loss", (Series("Loss", points),)))
    assert drawn.count('class="line"') == 2
    assert drawn.count('class="odd"') == 2
    assert "2 not finite" in drawn
    assert 'aria-label="Loss from step 1 to 4: from 1 to 2, least 1, greatest 2, 2 values not finite"' in drawn


def test_a_spike_does_not_flatten_the_curve() -> None:
    """Where it is thirty times the usual the scale is logarithmic; with zeros it cannot be."""
    spiky = curve([(step, 40.0 if step == 50 else 1.0 + step / 1000) for step in range(100)], SMALL_BUCKETS)
    assert spiky is not None
    assert spiky.logarithmic
    with_zero = curve([(step, 40.0 if step == 50 else 0.0) for step in range(100)], SMALL_BUCKETS)
    assert with_zero is not None
    assert not with_zero.logarithmic


def test_a_query_is_a_choice_and_never_an_error() -> None:
    """Whatever stands in it; and a choice's own query means that choice."""
    cases: list[tuple[str, Choice]] = [
        ("", Choice()),
        ("rank=3&sort=loss&page=2", Choice(rank="3", sort="loss", page=2)),
        ("run=a%2Fb&layers=update", Choice(run="a/b", layers="update")),
        ("page=-1", Choice()),
        ("page=²", Choice()),
        ("page=99999999999999", Choice(page=1000)),
        ("&".join(f"a{number}=1" for number in range(100)), Choice()),
        ("rank=%ff%00<script>", Choice(rank="\ufffd\0<script>")),
    ]
    for query, choice in cases:
        assert choice_of(query) == choice
        assert choice_of(choice.query.removeprefix("?")) == choice


def test_events_become_lines_and_what_is_none_is_left_out() -> None:
    """An event of ours has its severity, an anomaly that of its kind; a name is text."""
    nan = {"kind": "nonfinite_loss", "value": "NaN"}
    late_ns = 1_700_000_100 * 10**9
    evaluation = {"k": "span", "name": "torchobs.evaluation", "t0": late_ns, "t1": late_ns + 3 * 10**9, "attrs": {}}
    frames: list[dict[str, object]] = [
        {"k": "event", "t": 5 * 10**9, "name": "torchobs.anomaly", "step": 7, "attrs": nan},
        {"k": "event", "t": 6 * 10**9, "name": "torchobs.data.worker_died", "attrs": {"pid": 3}},
        {"k": "event", "t": 10**10, "name": "mine <b>", "attrs": {}},
        {"k": "event", "t": 1 << 70, "name": "torchobs.model", "attrs": {}},
        {"k": "span", "name": "torchobs.step", "t0": 1, "t1": 2, "scope": ["torchobs"]},
        {**evaluation, "scope": ["torchobs"]},
        {**evaluation, "scope": ["somebody"]},
    ]
    rows = rows_of("0", events_of(flights.decoded(*frames)))
    assert [(line.title, line.text, line.severity, line.step) for line in rows] == [
        ("Nonfinite loss", "value NaN", Severity.ERROR, 7),
        ("Data loader's worker died", "pid 3", Severity.ERROR, None),
        ("mine <b>", "", Severity.INFO, None),
        ("Evaluation", "took 3 s", Severity.INFO, None),
    ]
    assert rows[0].at_s == 1_700_000_005
    assert [line.number for line in rows] == [1] * 4


def test_every_event_of_ours_is_a_line() -> None:
    """But points of curves. Whatever its attributes hold, it can be compared with those of other ranks."""
    shown = set()
    for event in catalog.EVENTS:
        attributes: dict[str, object] = {attribute.name: ["a", {"b": 1}] for attribute in event.attributes}
        attributes |= {"kind": "gradients_kept", "values": [1.0, 2.0]}
        frame = {"k": "event", "name": event.name, "t": 5, "step": 3, "attrs": attributes}
        rows = [rows_of(str(rank), events_of(flights.decoded(frame))) for rank in range(2)]
        if [line.last.ranks for line in log_of(rows).lines] == [("1", "0")]:
            shown.add(event)
    assert set(catalog.EVENTS) - shown == {catalog.EVENT_SCALARS}


def test_what_all_ranks_say_is_said_once() -> None:
    """Within a minute; the same of the same rank is twice."""

    def said(at_s: float, rank: str, what: str = "Run start") -> EventRow:
        return EventRow(at_s, (rank,), None, Severity.INFO, what, "")

    rows = merged_ranks([said(100.0, "1"), said(99.5, "0"), said(99.0, "0", "Epoch"), said(20.0, "0")])
    assert [(event.at_s, event.ranks, event.title) for event in rows] == [
        (100.0, ("0", "1"), "Run start"), (99.0, ("0",), "Epoch"), (20.0, ("0",), "Run start")
    ]  # fmt: skip


def spike(at_s: float, rank: str = "0", number: int = 1) -> EventRow:
    """An anomaly that stands for so many."""
    return EventRow(at_s, (rank,), int(at_s), Severity.WARNING, "Loss spike", f"value {at_s}", number)


def test_many_events_of_a_kind_are_one_line_and_the_first_cause_stays() -> None:
    """A hundred spikes after one worker's death: the death is the first, and the spikes say how many they were since when."""
    died = EventRow(50.0, ("0",), 49, Severity.ERROR, "Data loader's worker died", "pid 3")
    began = EventRow(1.0, ("0",), None, Severity.INFO, "Run start", "")
    log = log_of([[began, died, *(spike(float(second), number=2) for second in range(100, 200))]])
    assert log.cause == died
    many, *others = log.lines
    assert (many.number, many.last.at_s, many.first.at_s) == (200, 199.0, 100.0)
    assert [line.last for line in others] == [died, began]


def test_the_first_event_is_that_of_all_ranks_in_which_it_happened() -> None:
    """Promise: milliseconds do not choose one of two ranks that raised the same."""
    log = log_of([[EventRow(50 + index / 1000, (str(index),), 7, Severity.ERROR, "Exception", "type")] for index in range(2)])
    assert log.cause is not None
    assert set(log.cause.ranks) == {"0", "1"}


def test_a_few_events_of_a_kind_are_told_one_by_one() -> None:
    """What several ranks report alike is counted as often as it happened to each."""
    few = [spike(1.0), spike(2.0), spike(3.0)]
    assert [(line.last.at_s, line.number, line.first.at_s) for line in log_of([few]).lines] == [
        (3.0, 1, 3.0), (2.0, 1, 2.0), (1.0, 1, 1.0)
    ]  # fmt: skip
    many = [[spike(at_s, rank, 4), spike(at_s + 9, rank)] for rank, at_s in (("0", 1.0), ("1", 1.2))]
    (line,) = log_of(many).lines
    assert (line.number, set(line.last.ranks), line.last.at_s) == (5, {"0", "1"}, 10.2)
    assert event_words(line)[1].endswith(" ×5")
    (line,) = log_of([[spike(1.0, number=BURST)]]).lines
    assert event_words(line)[1].endswith(" ×32 or more"), "of more in a row only some are events"


MIB = float(1 << 20)
HOST: Values = {catalog.MEMORY_HOST_RSS.name: {(): 324 * MIB}}
MACHINE: Values = {catalog.MEMORY_HOST_UTILIZATION.name: {("machine",): 0.31}}
CONTAINER: Values = {catalog.MEMORY_HOST_UTILIZATION.name: {("machine",): 0.31, ("cgroup",): 0.8}}
DEVICES: Values = {
    metric.name: {("cuda:0",): first * MIB, ("cuda:1",): second * MIB}
    for metric, first, second in ((catalog.MEMORY_DEVICE_RESERVED, 300, 100), (catalog.MEMORY_DEVICE_LIMIT, 400, 400))
}


def test_a_percentage_says_of_what_it_is() -> None:
    """The process's bytes are not the machine's percentage: the words name the machine, the container or the device."""
    cases: list[tuple[Values, tuple[float, str]]] = [
        (HOST, (324 * MIB, "")),
        (HOST | MACHINE, (324 * MIB, "machine 31 % full")),
        (HOST | CONTAINER, (324 * MIB, "container 80 % full")),
        (HOST | MACHINE | DEVICES, (400 * MIB, "75 % of cuda:0")),
    ]
    for values, shown in cases:
        rank = row(values=values)
        assert (rank.memory, rank.memory_limit) == shown
