"""Words and numbers of the live page."""

from __future__ import annotations

import math

from tests import flights
from tests.diagnosis_files import Values, row
from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.document.blocks import LineChart, Series
from torchobs.document.charts import SMALL_BUCKETS, curve, small, stacked
from torchobs.document.event_log import EventRow, log_of, merged_ranks, rows_of
from torchobs.document.live import Choice
from torchobs.document.markup import tag
from torchobs.document.sections import event_words
from torchobs.exporter.page import choice_of
from torchobs.ranks.events import events_of
from torchobs.support.rate_limit import BURST

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
    """An anomaly that tells of so many."""
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
    """And what several ranks tell alike is counted as often as it happened to each."""
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
