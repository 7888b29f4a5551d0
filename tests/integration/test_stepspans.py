"""Spans of steps: which, with what, beneath what, and how many at most."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from opentelemetry import trace
from torch.utils.data import DataLoader

from tests import support
from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog
from torchobs.flight.format import event_ring
from torchobs.flight.format.step_record import StepFlag
from torchobs.flight.reader import reader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
    return support.wait_until(lambda: found if len(found := written(run, reason)) >= count else [])


def links(span: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The spans it links to, by their relation."""
    return {attributes["torchobs.link.relation"]: (trace, span) for trace, span, _, _, attributes, _ in span["links"]}


def test_sampled_steps_link_to_run_and_segment(run: Recording) -> None:
    """The same numbers everywhere, each a trace of its own, with its loss, and with identifiers that anybody can work out."""
    train(8)
    steps = awaited(run, "sampled", 3)
    assert [step["attrs"]["step"] for step in steps] == [2, 4, 8]
    assert run.session.writer is not None
    ids, losses = event_ring.SpanIds(run.session.writer.header), [record.loss for record in run.steps()]
    for step in steps:
        number = step["attrs"]["step"]
        assert step["attrs"]["loss"] == pytest.approx(losses[number - 1])
        assert (step["trace_id"], step["span_id"]) == ids.step(number)
        assert "parent" not in step
        assert links(step) == {"run": ids.run, "segment": ids.segment(1, 0)}


def test_a_step_s_span_says_what_the_histograms_count(run: Recording) -> None:
    """So that their exemplars are the observations themselves; the first step, which has no begin, has no duration."""
    tracer = trace.get_tracer("application")
    train(8, lambda number: tracer.start_span("work").end() if number in {1, 3} else None)
    records = {record.step: record for record in run.steps()}
    for step in awaited(run, "user", 2):
        attributes = step["attrs"]
        record = records[attributes["step"]]
        assert attributes.get("duration_s") == (None if record.flags & StepFlag.UNTIMED else record.duration_s)
        assert attributes["grad_norm"] == record.grad_norm
    assert records[1].flags & StepFlag.UNTIMED


def test_a_norm_that_a_device_delivers_late_is_told(flight_dir: Path) -> None:
    """With the step's span, or after it where that was written before; not of a step that has none."""
    for run in recording(flight_dir, grad_interval=1000):
        context = run.session.context
        assert context is not None
        train(8)
        run.look()
        assert [span["attrs"]["step"] for span in run.frames("torchobs.step")] == [2, 4, 8]
        early, later, other = 4, 7, 6
        for step, norm in ((early, 2.5), (later, 3.5), (other, 4.5), (early, math.inf)):
            context.recorder.late(step, StepFlag.GRAD_NORM, 0.0, norm)
        run.look()
        assert run.session.run is not None
        run.session.run.anomalous.append(later)
        run.look()
        file = reader.open_path(context.writer.path)
        late = [fields for _, fields in file.events() if fields["k"] == "late"]
        file.close()
        assert late == [{"k": "late", "step": early, "grad_norm": 2.5}]
        (anomalous,) = [span for span in written(run, "anomalous") if span["attrs"]["step"] == later]
        assert anomalous["attrs"]["grad_norm"] == 3.5


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
    assert all(one["t1"] <= two["t0"] for one, two in pairwise(phases))
    assert phases[-1]["t1"] == step["t1"]
    forward_s = (phases[1]["t1"] - phases[1]["t0"]) / 1e9
    (begun, ended), (_, before), (after, _) = napped[50], napped[49], napped[51]
    assert (ended - begun) * (1 - 1e-6) <= forward_s < after - before


def test_an_anomalous_step_is_there(run: Recording) -> None:
    """The step whose loss was not a number; its value is no attribute, for JSON has none."""
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
    assert run.session.context is not None
    writer = run.session.context.writer
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


def test_an_epoch_longer_than_a_segment_is_not_sent(run: Recording) -> None:
    """It is in the file, for the live page; a tracing backend has its segments."""
    assert run.session.run is not None
    now_ns = time.monotonic_ns()
    for hours in (0.9, 1.1):
        begun_ns = now_ns - round(hours * 3600e9)
        run.session.run.write(catalog.SPAN_EPOCH.name, begun_ns, now_ns, {"epoch": 1}, failed=False)
    assert [span["flags"] for span in run.frames("torchobs.epoch")] == [1, 0]


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


def test_what_the_application_does_after_the_last_step_has_its_parent(flight_dir: Path) -> None:
    """A final evaluation's spans are beneath a step that the run's end interrupted: no parent is missing."""
    path = ""
    for run in recording(flight_dir):
        assert run.session.writer is not None
        path = run.session.writer.path
        train(3)
        trace.get_tracer("application").start_span("final").end()
    frames = [frame for _, frame in reader.open_path(path).events()]
    known = {frame["span_id"] for frame in frames if "span_id" in frame}
    assert all(frame["parent"] in known for frame in frames if "parent" in frame)
    (final,) = [frame for frame in frames if frame["name"] == "final"]
    (step,) = [frame for frame in frames if frame.get("span_id") == final["parent"]]
    assert (step["attrs"]["step"], step["attrs"]["ended"]) == (4, False)


@pytest.mark.parametrize("sampled", [True, False])
def test_the_launcher_s_decision_to_sample_holds(flight_dir: Path, *, sampled: bool) -> None:
    """Its trace is the run's, from which those of the steps come, and where it is not sampled no step is."""
    for run in recording(flight_dir, traceparent=f"{PARENT}-0{int(sampled)}", trace_steps=1):
        train(30, lambda _: time.sleep(0.01))
        run.look()
        run.look()
        found = run.frames("torchobs.step")
        assert bool(found) == sampled
        assert run.session.writer is not None
        ids = event_ring.SpanIds(run.session.writer.header)
        assert ids.run.trace == PARENT.split("-")[1]
        assert all((span["trace_id"], span["span_id"]) == ids.step(span["attrs"]["step"]) for span in found)
        assert all(links(span)["run"] == ids.run for span in found)
        assert {span["parent"] for span in run.frames("torchobs.run")} == {PARENT.split("-")[2]}
        assert {span["flags"] for span in run.frames("torchobs.segment")} <= {int(sampled)}


def test_every_nth_step_if_that_was_asked_for(flight_dir: Path) -> None:
    """No others, and at most one a second."""
    for run in recording(flight_dir, trace_steps=10):
        train(45, lambda _: time.sleep(0.06))
        steps = [step["attrs"]["step"] for step in awaited(run, "sampled", 2)]
        assert steps[0] == 10
        assert all(not step % 10 for step in steps)
        assert all(two - one >= 10 for one, two in pairwise(steps))


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


def test_accumulated_steps_have_their_sums(run: Recording) -> None:
    """Two backwards: phases are attributes, and no child claims to be where it was not."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        for micro in range(2):
            loss_of(model, micro).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for step in awaited(run, "sampled", 2):
        assert step["attrs"]["backward_s"] > 0
    assert run.frames("torchobs.step_phase") == []
