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
from torchobs.flight.format import span_ids
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
        loss.backward()
        optimizer.step()


def written(run: Recording, reason: str) -> list[dict[str, Any]]:
    """The steps' spans written for that reason."""
    return [span for span in run.frames("torchobs.step") if span["attrs"]["reason"] == reason]


def awaited(run: Recording, reason: str, count: int = 1) -> list[dict[str, Any]]:
    """The same, when there are so many."""
    return support.wait_until(lambda: found if len(found := written(run, reason)) >= count else [])


def test_a_sampled_step_is_beneath_the_run(run: Recording) -> None:
    """One in ten seconds, with its loss, and with identifiers that whoever reads the file can work out."""
    train(8)
    (step,) = awaited(run, "sampled")
    assert step["attrs"]["loss"] == pytest.approx(run.steps()[step["attrs"]["step"] - 1].loss)
    (begun,) = run.frames("torchobs.run")
    assert (step["trace_id"], step["parent"]) == (begun["trace_id"], begun["span_id"])
    assert run.session.writer is not None
    header = run.session.writer.header
    assert step["span_id"] == span_ids.step_span_id(span_ids.run_span_id(header), step["attrs"]["step"])
    assert step["trace_id"] == span_ids.trace_id(header)


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
        run.look()
        (sampled,) = run.frames("torchobs.step")
        early, later, other = sampled["attrs"]["step"], 7, 8
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
    (begun,) = run.frames("torchobs.run")
    (setup,) = run.frames("setup")
    assert setup["parent"] == begun["span_id"]


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
    """Its trace is the run's, and where it is not sampled no step is."""
    for run in recording(flight_dir, traceparent=f"{PARENT}-0{int(sampled)}", trace_steps=1):
        train(30, lambda _: time.sleep(0.01))
        run.look()
        run.look()
        found = run.frames("torchobs.step")
        assert bool(found) == sampled
        assert {span["trace_id"] for span in found} <= {PARENT.split("-")[1]}
        assert run.session.writer is not None
        assert span_ids.trace_id(run.session.writer.header) == PARENT.split("-")[1]


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
    (step,) = awaited(run, "sampled")
    assert step["attrs"]["backward_s"] > 0
    assert run.frames("torchobs.step_phase") == []
