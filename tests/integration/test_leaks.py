"""What is told of a leak by itself: the lines, the types and the tensors that grew; and what is left as it was."""

from __future__ import annotations

import gc
import os
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog
from torchobs.flight import artifacts
from torchobs.probes import leak
from torchobs.probes.leak import LeakProbe, count_objects, grown_kinds
from torchobs.probes.memory_growth import Suspicion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Marked:
    """An object of a type of its own."""

    def __init__(self) -> None:
        self.text = "x" * 2000 + str(id(self))


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A recording without the probe, and without the sampler's thread in its way."""
    yield from recording(flight_dir, disable_probes="leak")


class Leaking:
    """A leak probe on a clock of its own, and a training that it watches."""

    def __init__(self, run: Recording) -> None:
        self.run, self.seconds, self.suspicion = run, 0.0, Suspicion()
        self.probe = LeakProbe(self.suspicion, lambda: self.seconds)
        assert run.session.context is not None
        self.probe.install(run.session.context)
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, rounds: int, leaked: Callable[[], object] = lambda: None) -> None:
        """Two seconds a round, with two steps and a look of the probe."""
        for _ in range(rounds):
            for _ in range(2):
                leaked()
                self.optimizer.zero_grad()
                loss_of(self.model).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
            self.seconds += 2.0
            self.probe.sample()

    def told(self) -> list[dict[str, Any]]:
        """The events' attributes."""
        return self.run.attributes(catalog.EVENT_MEMORY_LEAK.name)


def test_a_leak_is_told_with_its_line_its_types_and_its_tensors(run: Recording, flight_dir: Path) -> None:
    """As an event, as evidence beside the flight file, and in words; the tracing ends, and is not begun again at once."""
    leaking, kept = Leaking(run), list[Any]()

    def leaked() -> None:
        # more than what a module that another thread imports meanwhile has of any type
        kept.append(([Marked() for _ in range(100)], torch.ones(7, 333) * 2))

    leaking.train(2, leaked)
    assert not tracemalloc.is_tracing()
    leaking.suspicion.host = True
    leaking.train(12, leaked)
    assert not tracemalloc.is_tracing()
    (told,) = leaking.told()
    assert (told["space"], told["ended"]) == ("host", "complete")
    assert told["steps"] >= leak.LEAST_STEPS
    assert any(line.startswith(f"{__file__}:") for line in told["lines"])
    assert any(row.endswith(f" {__name__}.Marked") for row in told["objects"])
    assert any(" tensors float32[7, 333] on cpu, " in row for row in told["tensors"])
    assert told["tensor_bytes"] >= told["steps"] * 7 * 333 * 4
    place = run.session.context.writer.place if run.session.context is not None else None
    assert place is not None
    (written,) = (one for one in artifacts.names(place.fd) if one.kind == artifacts.LEAK)
    assert written.id == told["evidence"]
    assert "float32[7, 333] on cpu" in (flight_dir / written.name).read_text()
    leaking.suspicion.host = True
    leaking.train(3, leaked)
    assert not tracemalloc.is_tracing()
    assert len(leaking.told()) == 1


def test_a_user_s_own_tracing_is_left_alone(run: Recording) -> None:
    """It goes on with what it has, and nothing is counted meanwhile."""
    leaking = Leaking(run)
    tracemalloc.start(2)
    try:
        leaking.suspicion.host = True
        leaking.train(2)
        assert tracemalloc.is_tracing()
        assert tracemalloc.get_traceback_limit() == 2
    finally:
        tracemalloc.stop()
    assert leaking.probe._host is None
    assert leaking.told() == []


def test_tracing_ends_with_the_session_and_in_a_forked_child(run: Recording) -> None:
    """A child would trace for the rest of its life."""
    leaking = Leaking(run)
    leaking.suspicion.host = True
    leaking.train(2)
    assert tracemalloc.is_tracing()
    child = os.fork()
    if child == 0:
        os._exit(int(tracemalloc.is_tracing()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tracemalloc.is_tracing()
    leaking.probe.remove()
    assert not tracemalloc.is_tracing()


def test_tracing_that_takes_too_much_memory_ends_early(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a leak of very many small objects a part is enough."""
    monkeypatch.setattr(leak, "MOST_TRACED", 1000)
    leaking, kept = Leaking(run), list[Any]()
    leaking.suspicion.host = True
    leaking.train(5, lambda: kept.extend([object() for _ in range(50)]))
    assert not tracemalloc.is_tracing()
    leaking.train(2)
    (told,) = leaking.told()
    assert told["ended"] == "memory"
    assert told["seconds"] < leak.TRACED_S


def test_counting_keeps_nothing_alive_and_takes_no_notice_of_strange_tensors() -> None:
    """Sparse, nested, meta and functorch's: none raises. Memory that two share counts once."""
    strange = [
        torch.ones(3).to_sparse(), torch.ones(3, device="meta"), torch.empty(0),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ]  # fmt: skip
    before = count_objects(torch)
    base = torch.ones(11, 1013)
    views = [base[1:], base.T]
    torch.func.vmap(lambda row: (count_objects(torch), row)[1])(torch.ones(3, 2))
    after = count_objects(torch)
    assert after.sizes.total() - before.sizes.total() == pytest.approx(11 * 1013 * 4, abs=4096)
    assert {kind for kind, _ in grown_kinds(before, after)} >= {"float32[11, 1013] on cpu", "float32[1013, 11] on cpu"}
    references = len(gc.get_referrers(base))
    count_objects(torch)
    assert len(gc.get_referrers(base)) == references
    assert len(strange + views) == 6
