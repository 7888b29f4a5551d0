"""Exemplars: which step each bucket of a histogram shows, and which it never does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.samples import Timestamp

from tests.exporter_page import Exporter
from tests.rank_files import BORN_WALL_NS, File, S
from torchobs.flight.format import span_ids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DURATION, NORM = "torchobs_step_duration_seconds_bucket", "torchobs_grad_norm_distribution_bucket"


@pytest.fixture
def exporter(flight_dir: Path) -> Iterator[Exporter]:
    """An exporter of the flight directory."""
    made = Exporter(flight_dir)
    yield made
    made.close()


def shown(exporter: Exporter, name: str = DURATION) -> dict[str, int]:
    """The step that each bucket shows, by its upper bound."""
    return {one.labels["le"]: int(one.exemplar.labels["step"]) for one in exporter.samples(name) if one.exemplar}


def test_each_bucket_shows_its_newest_step_that_has_a_span(exporter: Exporter, file: File) -> None:
    """With the span's identifiers, what was observed, and when the step ended; the classic format has no exemplars."""
    for step, duration_s in enumerate((0.1, 0.11, 0.6, 0.1), start=1):
        file.step(step, step / 4, duration_s=duration_s, norm=3.0 * step)
        if step != 4:
            file.span(step, step / 4, attrs={"duration_s": duration_s, "grad_norm": 3.0 * step})
    file.save()
    exporter.scan()
    assert shown(exporter) == {"0.125": 2, "1.0": 3}
    assert shown(exporter, NORM) == {"4.0": 1, "16.0": 3}
    (slow,) = [one.exemplar for one in exporter.samples(DURATION) if one.labels["le"] == "1.0"]
    ids = span_ids.SpanIds(file.header).step(3)
    assert slow is not None
    assert slow.labels == {"trace_id": ids.trace, "span_id": ids.span, "step": "3"}
    assert (slow.value, slow.timestamp) == (0.6, Timestamp(BORN_WALL_NS // S, 750_000_000))
    assert " # {" not in exporter.text()


def test_an_exemplar_outlives_its_span_in_the_ring(exporter: Exporter, file: File) -> None:
    """An application that writes many spans pushes the step's out; the bucket shows it on, of a dead rank, too."""
    file.step(1, 0.1)
    file.span(1, 0.1)
    file.save()
    exporter.scan()
    assert shown(exporter) == {"0.125": 1}
    for number in range(1000):
        file.writer.events.append({"k": "span", "name": "work", "n": number, "text": "x" * 300})
    file.step(2, 0.2)
    file.save()
    exporter.scan()
    assert shown(exporter) == {"0.125": 1}
    file.release()
    exporter.scan(5.0)
    assert shown(exporter) == {"0.125": 1}


def test_a_span_is_shown_though_no_counter_has_changed(exporter: Exporter, file: File) -> None:
    """A step found to be anomalous afterwards has its span later than its place in the histogram; the page is written anew."""
    file.step(1, 0.1)
    file.save()
    exporter.scan()
    assert shown(exporter) == {}
    file.span(1, 0.1)
    file.save()
    exporter.scan()
    assert shown(exporter) == {"0.125": 1}


def test_a_ring_full_of_steps_is_read_at_once(exporter: Exporter, file: File) -> None:
    """As by an exporter that starts late: the newest of them is shown."""
    for step in range(1, 501):
        file.step(step, step / 1000)
        file.span(step, step / 1000)
    file.save()
    exporter.scan()
    assert (shown(exporter), shown(exporter, NORM)) == ({"0.125": 500}, {"1.0": 500})


def test_a_norm_that_a_device_delivers_late_finds_its_span(exporter: Exporter, file: File) -> None:
    """Of a step whose span is there, and by the step's own end: it does not take a newer step's place."""
    file.step(1, 0.1, norm=3.0)
    file.span(1, 0.1, attrs={"duration_s": 0.1})
    file.writer.events.append({"k": "late", "step": 1, "grad_norm": 3.0})
    file.writer.events.append({"k": "late", "step": 7, "grad_norm": 3.0})
    file.save()
    exporter.scan()
    assert (shown(exporter), shown(exporter, NORM)) == ({"0.125": 1}, {"4.0": 1})
    file.step(2, 0.2, norm=3.0)
    file.span(2, 0.2, attrs={"duration_s": 0.1, "grad_norm": 3.0})
    file.writer.events.append({"k": "late", "step": 1, "grad_norm": 3.5})
    file.save()
    exporter.scan()
    assert shown(exporter, NORM) == {"4.0": 2}


@pytest.mark.parametrize("given", [{}, {"trace_id": "0af7651916cd43dd8448eb211c80319c"}], ids=["run id", "launcher"])
def test_all_ranks_exemplars_of_a_step_lead_to_one_trace(exporter: Exporter, flight_dir: Path, given: dict[str, Any]) -> None:
    """Derived from the run's id, or from the trace that the launcher gave; in it each rank has a span of its own."""
    for rank in range(2):
        file = File(flight_dir, seed=1 + rank, rank=rank, **given)
        file.step(1, 0.1)
        file.span(1, 0.1)
        file.save()
    exporter.scan()
    found = [one.exemplar.labels for one in exporter.samples(DURATION) if one.exemplar]
    assert len(found) == 2
    assert len({labels["trace_id"] for labels in found}) == 1
    assert len({labels["span_id"] for labels in found}) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"name": "work"},
        {"k": "span_start"},
        {"k": "event", "step": 1, "duration_s": 0.1},
        {"span_id": "0123456789abcdef"},
        {"trace_id": "0123456789abcdef" * 2},
        {"flags": 0},
        {"attrs": {"step": 2, "duration_s": 0.1}},
        {"attrs": {"step": 1, "duration_s": "NaN"}},
        {"attrs": {"step": 1, "duration_s": 77.0}},
    ],
    ids=str,
)
def test_what_is_no_span_of_a_step_is_never_shown(exporter: Exporter, file: File, other: dict[str, Any]) -> None:
    """Nor is one whose trace nobody samples, or that says what its bucket has not counted."""
    file.step(1, 0.1)
    file.span(1, 0.1, **other)
    file.save()
    exporter.scan()
    assert shown(exporter) == {}
