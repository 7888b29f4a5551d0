"""What a report says: its sections and findings, and of two runs what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.diagnosis_files import START_S, fact, facts, step, steps
from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.document import sections
from torchobs.document.blocks import Items, StripChart, Table
from torchobs.document.compare import compare, comparison_document
from torchobs.document.files import markdown
from torchobs.document.html import page
from torchobs.document.kept import side_for
from torchobs.document.live import figures
from torchobs.document.run import Options, document, run_document
from torchobs.document.sections import anomalies
from torchobs.flight.details import History, HistoryRow
from torchobs.flight.forward import ForwardShare
from torchobs.flight.reader import Distribution
from torchobs.ranks.rank_view import run_of
from torchobs.ranks.runs import Chosen

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
    """Promise: an evaluation that ended is not listed among anomalies; a spike is."""
    asked = [fact(catalog.EVENT_DEBUG_VALIDATION, 5.0, 50, name="validation"), fact(catalog.EVENT_TUNE_PLAN, 0.1, 1)]
    assert not anomalies(facts(steps(100), events=asked), "").blocks
    spike = fact(catalog.EVENT_ANOMALY, 6.0, 60, kind="loss_spike")
    (chart,) = anomalies(facts(steps(100), events=[*asked, spike]), "").blocks
    assert isinstance(chart, StripChart)
    assert chart.rows == (("Loss spike", "warning", (60.0,)),)


def run(*losses: float) -> Chosen:
    """A run of one rank, whose last tenth of the steps has these losses."""
    return Chosen([facts([*(step(number, 9.0) for number in range(1, 41)), *map(step, range(41, 46), losses)])], [], [], [])


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


def test_a_run_whose_optimizer_counts_no_steps_may_be_a_resumed_one() -> None:
    """Its curve is beside steps 1 to N of the other run, and the document says so; one that counts is where it went on."""
    history = [step(number, 2.0) for number in range(1, 41)]
    counted, uncounted = (
        side_for(Chosen([facts(history, values=values)], [], [], []))
        for values in ({catalog.STEPS_RESUMED_FROM: 60.0}, dict[catalog.Metric, float]())
    )
    said = "Whether B went on from a checkpoint is not in the flight file"
    comparison = compare(counted, uncounted)
    assert said in markdown(comparison_document(comparison))
    assert [side["resumed_from"] for side in comparison.to_dict()["runs"]] == [60.0, 0.0]
    assert counted.curves["loss"][0][0] == 61.0
    assert "went on from a checkpoint" not in markdown(comparison_document(compare(counted, counted)))


@pytest.mark.parametrize(("losses", "said"), [(1, "the last one"), (8, "the last one, sum of 8 backward passes, mean 3.7")])
def test_a_sum_over_micro_batches_says_so(losses: int, said: str) -> None:
    """Beside the number, which otherwise is eight times what the script prints; steps say where they begin to count."""
    run = facts([step(1, 29.6, losses=losses)], values={catalog.LOSS: 29.6, catalog.STEPS: 1})
    shown = {figure.name: figure.more for figure in figures(run, run_of([run])).figures}
    assert shown["Loss"] == said
    assert shown["Steps"].startswith("counted from 1, in ")


def test_only_layers_that_have_no_series_are_left_out() -> None:
    """Not where each layer has one."""
    for names, said in ((("fc1", "fc2"), False), (("fc1", "other"), True)):
        rows = (HistoryRow(0.0, 1, (1.0, 2.0)),)
        history = History(tuple(f"{catalog.GRAD_LAYER_NORM.name}{{{name}}}" for name in names), rows)
        assert ("Only the largest layers" in str(sections.layers(replace(facts(), history=history), ""))) == said
