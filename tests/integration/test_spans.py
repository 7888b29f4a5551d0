"""Spans of a rank: root spans of the run and of its segments, and which steps have one, with what, and how many at most."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from opentelemetry import trace
from torch.utils.data import DataLoader

from tests import support
from tests.flights import recorded
from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog
from torchobs.flight.events import SpanIds, scan
from torchobs.flight.layout import Region
from torchobs.probes.context import EpochStart
from torchobs.runtime.spans import RootSpans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torchobs.flight.writer import FlightWriter


S = 1_000_000_000
HOUR = 3600


class Rank:
    """The root spans of a rank, at moments in seconds since its birth."""

    def __init__(self) -> None:
        self.writer, self._memory = recorded()
        self.roots = RootSpans(self.writer, 1, {})
        self.roots.announce()
        self.ids = SpanIds(self.writer.header)
        self._first_ns = 0

    def look(self, second: float, step: int = 0, epochs: Iterable[EpochStart] = (), first: float | None = None) -> None:
        """Do what the sampler does in a round; `first`: when the first step ended."""
        self._first_ns = self._first_ns if first is None else self.ns(first)
        self.roots.advance(epochs, self.ns(second), step, self._first_ns)

    def ns(self, second: float) -> int:
        """A moment on CLOCK_MONOTONIC."""
        return self.writer.header.monotonic_ns + round(second * S)

    def epoch(self, number: int, second: float, step: int) -> EpochStart:
        """An epoch's begin."""
        return EpochStart(number, self.ns(second), step)

    def frames(self) -> list[dict[str, Any]]:
        """What stands in the ring."""
        region = self.writer.header.regions[Region.EVENTS]
        ring = bytes(self._memory.content[region.offset : region.offset + region.length])
        return [json.loads(payload) for _, payload in scan(ring, self.writer.header.seed)]

    def ended(self) -> list[tuple[dict[str, Any], float, float]]:
        """Attributes, begin and end of the root spans that have ended."""
        wall_ns = self.writer.header.wall_ns
        return [
            (frame["attrs"], (frame["t0"] - wall_ns) / S, (frame["t1"] - wall_ns) / S)
            for frame in self.frames()
            if frame["k"] == "span"
        ]


def test_epochs_are_segments_and_cover_the_rank_s_life() -> None:
    """The run's span until the first begins, then one for each, the last until the rank's end; without a gap."""
    rank = Rank()
    rank.look(50.0, 1, [rank.epoch(1, 40.0, 0)], first=49.0)
    rank.look(160.0, 12, [rank.epoch(2, 150.0, 10)])
    rank.roots.end(rank.ns(300.0), 25, "ok")
    assert rank.ended() == [
        ({}, 0.0, 40.0),
        ({"epoch": 1, "part": 0, "steps": 10}, 40.0, 150.0),
        ({"epoch": 2, "part": 0, "steps": 15}, 150.0, 300.0),
    ]
    first, second = [frame for frame in rank.frames() if frame["k"] == "span"][1:]
    assert (second["trace_id"], second["span_id"]) == rank.ids.segment(2, 0)
    assert "parent" not in second
    related = [(link[4]["torchobs.link.relation"], (link[0], link[1])) for link in second["links"]]
    assert related == [("run", rank.ids.run), ("previous", rank.ids.segment(1, 0))]
    assert [link[4]["torchobs.link.relation"] for link in first["links"]] == ["run"]


def test_an_epoch_of_days_ends_every_hour() -> None:
    """Counted from its own begin, so that ranks need no common clock; also if nobody looked for hours."""
    rank = Rank()
    rank.look(10.0, 1, [rank.epoch(1, 5.0, 0)], first=9.0)
    for second in (HOUR, HOUR + 6, 2 * HOUR + 6, 5.5 * HOUR):
        rank.look(second, int(second))
    assert [(attributes.get("part"), begun, end) for attributes, begun, end in rank.ended()] == [
        (None, 0.0, 5.0),
        (0, 5.0, HOUR + 5.0),
        (1, HOUR + 5.0, 2 * HOUR + 5.0),
        (2, 2 * HOUR + 5.0, 5 * HOUR + 5.0),
    ]
    assert rank.roots.current.ids == rank.ids.segment(1, 5)


def test_without_epochs_there_are_hours_from_the_first_step_on() -> None:
    """And a rank that never trains has hours, too: no span lasts for weeks."""
    rank, idle = Rank(), Rank()
    rank.look(20.0, 3, first=15.0)
    rank.look(HOUR + 16.0, 900)
    idle.look(HOUR + 1.0)
    assert [(begun, end) for _, begun, end in rank.ended()] == [(0.0, 15.0), (15.0, HOUR + 15.0)]
    assert rank.ended()[1][0] == {"part": 0, "steps": 899}
    assert [(begun, end) for _, begun, end in idle.ended()] == [(0.0, float(HOUR))]


def test_short_epochs_share_a_segment_of_a_minute_at_least() -> None:
    """A thousand of two seconds are no thousand traces; two ranks whose epochs last a little differently still share them."""

    def begins(length_s: float) -> set[int]:
        rank = Rank()
        for number in range(1, 201):
            rank.look(number * length_s, number, [rank.epoch(number, number * length_s, number - 1)], first=length_s)
        return {attributes["epoch"] for attributes, *_ in rank.ended()[1:]}

    quick, slow = begins(1.86), begins(1.89)
    assert quick == {1, 65, 129} | {1} - {129} or quick == {1, 65}
    assert quick < slow


def test_the_open_root_is_always_in_the_ring() -> None:
    """However much is written to it: an exporter that starts late can complete it."""
    rank = Rank()
    rank.look(10.0, 1, [rank.epoch(1, 5.0, 0)], first=9.0)
    fill(rank.writer, 400)
    for look in range(20):
        fill(rank.writer, 100)
        rank.look(11.0 + look, look)
        newest = [frame for frame in rank.frames() if frame["k"] == "span_start"][-1]
        assert newest["span_id"] == rank.ids.segment(1, 0).span
        assert newest["attrs"] == {"epoch": 1, "part": 0}


def fill(writer: FlightWriter, spans: int) -> None:
    """Write so many spans of an application."""
    for number in range(spans):
        writer.events.append({"k": "span", "name": "work", "n": number, "text": "x" * 300})


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


def train(steps: int, during: Callable[[int], None] = lambda _: None) -> None:
    """Train, doing something before each step's backward."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches: Any = DataLoader(torch.ones(steps, 8), batch_size=1)  # type: ignore[arg-type]
    for number, batch in enumerate(batches, start=1):
        loss = model(batch).sum()
        during(number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def written(run: Recording, reason: str) -> list[dict[str, Any]]:
    """The steps' spans written for that reason."""
    return [span for span in run.frames("torchobs.step") if span["attrs"]["reason"] == reason]


def awaited(run: Recording, reason: str, count: int = 1) -> list[dict[str, Any]]:
    """The same, when there are so many."""
    return support.wait_until(lambda: spans if len(spans := written(run, reason)) >= count else [])


def links(span: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The spans it links to, by their relation."""
    return {attributes["torchobs.link.relation"]: (trace, span) for trace, span, _, _, attributes, _ in span["links"]}


def test_sampled_steps_link_to_run_and_segment(run: Recording) -> None:
    """The same numbers everywhere, each a trace of its own, with its loss, and with identifiers that anybody can work out."""
    train(8)
    steps = awaited(run, "sampled", 3)
    assert [step["attrs"]["step"] for step in steps] == [2, 4, 8]
    ids, losses = SpanIds(run.writer.header), [record.loss for record in run.steps()]
    for step in steps:
        number = step["attrs"]["step"]
        assert step["attrs"]["loss"] == pytest.approx(losses[number - 1])
        assert (step["trace_id"], step["span_id"]) == ids.step(number)
        assert "parent" not in step
        assert links(step) == {"run": ids.run, "segment": ids.segment(1, 0)}


def test_a_slow_step_is_there_with_its_phases(run: Recording) -> None:
    """Whoever looks for what was slow finds it, phase by phase."""
    napped: dict[int, tuple[float, float]] = {}

    def nap(number: int) -> None:
        begun = time.perf_counter()
        time.sleep(0.2 if number == 50 else 0.03)
        napped[number] = begun, time.perf_counter()

    train(60, nap)
    (step,) = support.wait_until(lambda: [span for span in written(run, "slow") if span["attrs"]["step"] == 50])
    phases = [span for span in run.frames("torchobs.step_phase") if span["parent"] == step["span_id"]]
    assert [span["attrs"]["phase"] for span in phases] == ["data", "forward", "backward", "optimizer"]
    assert step["t0"] <= phases[0]["t0"]
    assert all(phase["t1"] <= following["t0"] for phase, following in pairwise(phases))
    assert phases[-1]["t1"] == step["t1"]
    forward_s = (phases[1]["t1"] - phases[1]["t0"]) / 1e9
    (begun, ended), (_, before), (after, _) = napped[50], napped[49], napped[51]
    assert (ended - begun) * (1 - 1e-6) <= forward_s < after - before


def test_an_anomalous_step_is_there(run: Recording) -> None:
    """The step with a NaN as its loss, which is no attribute, for JSON has none."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(1, 41):
        loss = loss_of(model, 1)
        (loss * float("nan") if number == 30 else loss).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad() if number == 30 else optimizer.step()
        if number == 30:
            optimizer.step()
        time.sleep(0.005)
    support.wait_until(lambda: [span for span in written(run, "anomalous") if span["attrs"]["step"] == 30])
    (step,) = [span for span in written(run, "anomalous") if span["attrs"]["step"] == 30]
    assert "loss" not in step["attrs"]


def test_a_step_with_an_event_is_there(run: Recording) -> None:
    """So that the log record of the event leads to a span; not for points of curves, nor for more than the ring has room."""
    writer = run.writer
    train(40, lambda _: time.sleep(0.001))
    run.look()
    for step in (11, 13, 11, 99, *range(20, 40)):
        writer.event("my.event", {}, step)
    writer.event(catalog.EVENT_SCALARS.name, {"names": []}, 15)
    run.look()
    steps = [span["attrs"]["step"] for span in written(run, "event")]
    assert steps[:2] == [11, 13]
    assert 3 <= len(steps) == len(set(steps)) <= 6
    assert 15 not in {span["attrs"]["step"] for span in run.frames("torchobs.step")}


def test_spans_of_the_application_are_beneath_the_step_they_were_made_in(run: Recording) -> None:
    """The step is written for it, sampled or not; what is made before the first step is beneath the run."""
    tracer = trace.get_tracer("application")
    tracer.start_span("setup").end()

    def work(number: int) -> None:
        if number in {3, 5}:
            with tracer.start_as_current_span("work"), tracer.start_as_current_span("inner"):
                time.sleep(0.001)

    train(8, work)
    steps = awaited(run, "user", 2)
    assert [step["attrs"]["step"] for step in steps] == [3, 5]
    works = run.frames("work")
    assert [span["parent"] for span in works] == [step["span_id"] for step in steps]
    assert [span["parent"] for span in run.frames("inner")] == [span["span_id"] for span in works]
    assert all(step["t0"] <= span["t0"] <= span["t1"] <= step["t1"] for step, span in zip(steps, works, strict=True))
    begun = run.frames("torchobs.run")[0]
    (setup,) = run.frames("setup")
    assert (setup["trace_id"], setup["parent"]) == (begun["trace_id"], begun["span_id"])
    assert [span["trace_id"] for span in works] == [step["trace_id"] for step in steps]


@pytest.mark.parametrize("sampled", [True, False])
def test_the_launcher_s_decision_to_sample_holds(flight_dir: Path, *, sampled: bool) -> None:
    """Its trace is the run's, from which those of the steps come, and where it is not sampled no step is."""
    for run in recording(flight_dir, traceparent=f"{PARENT}-0{int(sampled)}", trace_steps=1):
        train(30, lambda _: time.sleep(0.01))
        run.look()
        run.look()
        spans = run.frames("torchobs.step")
        assert bool(spans) == sampled
        ids = SpanIds(run.writer.header)
        assert ids.run.trace == PARENT.split("-")[1]
        assert all((span["trace_id"], span["span_id"]) == ids.step(span["attrs"]["step"]) for span in spans)
        assert all(links(span)["run"] == ids.run for span in spans)
        assert {span["parent"] for span in run.frames("torchobs.run")} == {PARENT.split("-")[2]}
        assert {span["flags"] for span in run.frames("torchobs.segment")} <= {int(sampled)}


def test_every_nth_step_if_that_was_asked_for(flight_dir: Path) -> None:
    """No others, and at most one a second."""
    for run in recording(flight_dir, trace_steps=10):
        train(32, lambda _: time.sleep(0.06))
        steps = [step["attrs"]["step"] for step in awaited(run, "sampled", 2)]
        assert steps[0] == 10
        assert all(not step % 10 for step in steps)
        assert all(later - earlier >= 10 for earlier, later in pairwise(steps))


def test_the_spans_of_steps_push_nothing_out(flight_dir: Path) -> None:
    """3,000 steps a second, every one asked for, each tenth slow: the run's first event is still in the ring."""
    for run in recording(flight_dir, trace_steps=1, grad_interval="auto"):
        train(3000)
        run.look()
        run.look()
        assert run.frames("torchobs.run.start")
        frames = run.frames("torchobs.step")
        assert 1 <= len(frames) <= 60
        assert len({frame["span_id"] for frame in frames}) == len(frames)
