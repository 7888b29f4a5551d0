"""The sampler thread beside others that are held up."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

import torchobs
from tests import support
from tests.training import loss_of, mlp, recording
from torchobs.flight.format.layout import Exit
from torchobs.flight.reader import reader

if TYPE_CHECKING:
    from pathlib import Path


def test_a_number_whose_series_cannot_be_made_at_once_is_there_a_moment_later(flight_dir: Path) -> None:
    """Another thread is held up while it makes one: the last of what was given meanwhile counts."""
    for run in recording(flight_dir):
        assert run.session.writer is not None
        with run.session.writer.table._lock:
            torchobs.log(accuracy=0.25, total_steps=7)
            torchobs.log(accuracy=0.5)
            assert ("torchobs.scalar", "accuracy") not in run.values()
        values = support.wait_until(lambda: found if ("torchobs.scalar", "accuracy") in (found := run.look()) else {})  # noqa: B023
        assert (values["torchobs.scalar", "accuracy"], values["torchobs.steps.planned",]) == (0.5, 7.0)
        torchobs.log(accuracy=0.75)
        assert run.look()["torchobs.scalar", "accuracy"] == 0.75


def test_an_end_while_a_round_hangs_is_written_with_all_steps_and_makes_no_round_beside_it(flight_dir: Path) -> None:
    """A file system that does not answer, for one: the process does not wait for it."""
    here, gate, callers = threading.Event(), threading.Event(), list[str]()

    def hang() -> None:
        callers.append(threading.current_thread().name)
        here.set()
        gate.wait(30)

    session = torchobs.init(flight_dir=flight_dir)
    assert session.writer is not None
    assert session._sampler is not None
    path = session.writer.path
    session._samples.append(("hanging", hang))
    assert here.wait(30)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torchobs.shutdown()
    gate.set()
    session._sampler._thread.join()
    assert callers == ["torchobs-sampler"]
    view = reader.open_path(path).read(final=True)
    assert view.live.exit_reason == Exit.FINISHED
    steps = {point.series.name: point.value for point in view.points}["torchobs.steps"]
    assert steps == 3


def test_the_overhead_of_the_sampler_is_that_of_its_thread_up_to_the_end(flight_dir: Path) -> None:
    """The last round is done by the thread that ends the session, which has imported torch and trained."""
    before_s = time.process_time()
    session = torchobs.init(flight_dir=flight_dir)
    assert session.writer is not None
    assert session._sampler is not None
    path, context = session.writer.path, session._sampler._context
    support.wait_until(lambda: context.spent_ns.get("sampler", 0) > 1_000_000)  # what is less has no series
    torchobs.shutdown()
    spent_s = time.process_time() - before_s
    points = reader.open_path(path).read(final=True).points
    (shown,) = [point.value for point in points if point.series.attributes == (("probe", "sampler"),)]
    assert isinstance(shown, float)
    assert 0 < shown <= spent_s
