"""Memory as a session sees it: what it shows, which training it calls a leak and why, and what an out-of-memory error says."""

from __future__ import annotations

import gc
import mmap
import os
import tracemalloc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog
from torchobs.detect.growth import LEAST
from torchobs.flight import artifacts
from torchobs.probes import leak
from torchobs.probes.device_memory import components, host_shortage
from torchobs.probes.leak import LeakProbe, count_objects, grown_kinds
from torchobs.probes.memory_growth import Suspicion
from torchobs.probes.process_memory import Machine, MemoryLimits, MemoryProbe
from torchobs.support import text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


MIB = 1024**2


@pytest.fixture
def watched(flight_dir: Path) -> Iterator[Watched]:
    """A recording whose memory probe is the test's."""
    for run in recording(flight_dir, disable_probes="memory"):
        yield Watched(run)


class Watched:
    """A memory probe on a clock of its own: ten looks and a point every ten seconds of it."""

    def __init__(self, run: Recording, shared: str = "/dev/shm") -> None:
        self.run, self.seconds = run, 0.0
        self.suspicion = Suspicion()
        self.probe = MemoryProbe(shared=shared, clock=lambda: self.seconds, suspicion=self.suspicion)
        self.probe.install(run.context)

    def limit(self, left: float, total: float = 64 * 1024**3) -> None:
        """From now on this machine has so many bytes left, and no cgroup."""
        machine = Machine(int(total), int(left), 0, 0)
        self.probe._limits = MemoryLimits(self.run.writer, lambda: machine, root="/nowhere")

    def value(self, metric: catalog.Metric, *attributes: str) -> float | None:
        """What the file holds."""
        self.run.writer.publish()
        value = self.run.values().get((metric.name, *attributes))
        return None if value is None else float(value)


def test_the_proportional_set_is_for_the_advanced_level(watched: Watched) -> None:
    """It takes milliseconds; and it goes when the level does."""
    shown = []
    for level in (1, 2, 1):
        watched.run.context.hooks.level.value = level
        watched.probe.observe()
        shown.append(watched.value(catalog.MEMORY_HOST_PSS))
    assert shown[0] is shown[2] is None
    assert 0 < (shown[1] or 0.0) <= 1.02 * (watched.value(catalog.MEMORY_HOST_RSS) or 0.0)


def test_shared_memory_that_is_nearly_full_is_an_event(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB is a container's default: at nine tenths it is said, once, and again after there was room."""
    watched.run.look()  # the sampler's thread, which asks for other sizes, is gone
    usage = SimpleNamespace(f_frsize=4096, f_blocks=1024)
    monkeypatch.setattr(os, "statvfs", lambda _: usage)
    counts = []
    for used in (0.0, 3.0, 3.75, 3.875, 3.5, 2.0, 3.75):
        usage.f_bfree = usage.f_bavail = round((4 - used) * 256)
        watched.probe.observe()
        assert watched.value(catalog.MEMORY_SHARED_SIZE) == 4 * MIB
        assert watched.value(catalog.MEMORY_SHARED_USED) == used * MIB
        counts.append(len(watched.run.frames(catalog.EVENT_SHARED_MEMORY_FULL.name)))
    assert counts == [0, 0, 1, 1, 1, 1, 2]


def mlp_step() -> Callable[[], None]:
    """A step of plain training."""
    model = mlp(width=64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def pages(size: int) -> Any:
    """An array in pages of its own: one of the heap's may take what earlier tests have given back, and nothing grows."""
    array = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    array.fill(1)
    return array


def test_a_leak_that_leaves_a_minute_is_told_of_within_half_a_minute(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """Four mebibytes a second and room for a minute of it: said in the file, as an event and in the log."""
    step, kept = mlp_step(), list[Any]()
    gc.collect()
    watched.limit(240 * MIB)
    for _ in range(LEAST + 2):
        step()
        kept.append(pages(4 * MIB))
        watched.probe._read(thorough=False)
        watched.seconds += 1.0
    assert [frame["attrs"]["space"] for frame in watched.run.frames(catalog.EVENT_MEMORY_GROWTH.name)] == ["host"]
    assert len([record for record in caplog.records if "Host memory grows by" in record.getMessage()]) == 1
    assert watched.value(catalog.MEMORY_TIME_TO_LIMIT, "host") == pytest.approx(60, rel=0.2)


@pytest.mark.parametrize(("kept", "is_steep"), [(4 * MIB, True), (MIB, False)])
def test_fast_growth_is_looked_at_within_half_a_minute_however_much_is_left(
    watched: Watched, kept: int, *, is_steep: bool
) -> None:
    """It is a suspicion of kept graphs, and no finding by itself."""
    step, arrays = mlp_step(), list[Any]()
    gc.collect()
    watched.limit(4e12, total=8e12)
    for _ in range(LEAST + 2):
        step()
        arrays.append(pages(kept))
        watched.probe._read(thorough=False)
        watched.seconds += 1.0
    assert watched.suspicion.is_steep == is_steep
    assert not watched.suspicion.host
    assert watched.run.frames(catalog.EVENT_MEMORY_GROWTH.name) == []
    assert watched.value(catalog.MEMORY_TIME_TO_LIMIT, "host") is None


class Marked:
    """An object of a type of its own."""

    def __init__(self) -> None:
        self.text = "x" * 2000 + str(id(self))


@pytest.fixture
def run_without_leaks(flight_dir: Path) -> Iterator[Recording]:
    """A recording without the probe, and without the sampler's thread in its way."""
    yield from recording(flight_dir, disable_probes="leak")


class Leaking:
    """A leak probe on a clock of its own, and a training that it watches."""

    def __init__(self, run_without_leaks: Recording) -> None:
        run_without_leaks.look()  # whatever the sampler's thread imports is there, and the thread is gone
        self.run, self.seconds, self.suspicion = run_without_leaks, 0.0, Suspicion()
        self.probe = LeakProbe(self.suspicion, lambda: self.seconds)
        self.probe.install(run_without_leaks.context)
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

    def events(self) -> list[dict[str, Any]]:
        """The events' attributes."""
        return self.run.attributes(catalog.EVENT_MEMORY_LEAK.name)


def test_a_leak_is_told_with_its_line_its_types_and_its_tensors(run_without_leaks: Recording, flight_dir: Path) -> None:
    """As an event, as evidence beside the flight file, and in words; the tracing ends, and is not begun again at once."""
    leaking, kept = Leaking(run_without_leaks), list[Any]()

    def leaked() -> None:
        # more than what a module that another thread imports meanwhile has of any type
        kept.append(([Marked() for _ in range(100)], torch.ones(7, 333) * 2))

    leaking.train(2, leaked)
    assert not tracemalloc.is_tracing()
    leaking.suspicion.is_steep = True
    leaking.train(2, leaked)  # a search for graphs, before which a leak that is certain comes
    leaking.suspicion.host = True
    leaking.train(12, leaked)
    assert not tracemalloc.is_tracing()
    (leak_event,) = leaking.events()
    assert (leak_event["space"], leak_event["ended"]) == ("host", "complete")
    assert leak_event["steps"] >= leak.LEAST_STEPS
    assert any(line.startswith(f"{__file__}:") for line in leak_event["lines"])
    assert any(row.endswith(f" {__name__}.Marked") for row in leak_event["objects"])
    assert any(" tensors float32[7, 333] on cpu, " in row for row in leak_event["tensors"])
    assert leak_event["tensor_bytes"] >= leak_event["steps"] * 7 * 333 * 4
    place = run_without_leaks.writer.place
    assert place is not None
    (written,) = (artifact for artifact in artifacts.names(place.fd) if artifact.kind == artifacts.LEAK)
    assert written.id == leak_event["evidence"]
    assert "float32[7, 333] on cpu" in (flight_dir / written.name).read_text()
    leaking.suspicion.host = True
    leaking.train(3, leaked)
    assert not tracemalloc.is_tracing()
    assert len(leaking.events()) == 1


def test_the_line_of_tensors_is_none_that_makes_numbers(run_without_leaks: Recording) -> None:
    """A sampler draws a list of indices for each epoch, more of them than the tensors that are kept."""
    leaking, kept = Leaking(run_without_leaks), dict[int, torch.Tensor]()
    indices = iter(torch.utils.data.RandomSampler(range(4000)))

    def leaked() -> None:
        nonlocal indices
        if len(kept) == 15:  # the epoch ends between two counts
            indices = iter(torch.utils.data.RandomSampler(range(4000)))
        next(indices)
        kept[len(kept) + 1000] = torch.ones(100_000)

    leaking.suspicion.host = True
    leaking.train(12, leaked)
    (leak_event,) = leaking.events()
    assert leak_event["lines"][0].startswith(f"{__file__}:{leaked.__code__.co_firstlineno + 5} ")
    assert not any(row.endswith(" builtins.tuple") for row in leak_event["objects"])


def collect(leaking: Leaking, model: torch.nn.Module, result: Callable[[torch.Tensor], object]) -> None:
    """Keep the result of a forward pass in every step, for a minute."""
    kept, inputs = list[object](), torch.ones(3, next(model.parameters()).shape[1])
    for is_steep in (False, True):
        leaking.suspicion.is_steep = is_steep
        leaking.train(28 if is_steep else 12, lambda: kept.append(result(model(inputs))))


COLLECTED: dict[str, Callable[[torch.Tensor], object]] = {
    "graphs": lambda output: output,
    "outputs for a metric": lambda output: output.detach(),
    "losses that have gone backward": lambda output: output.sum().backward() or output,  # type: ignore[no-untyped-call]
    "a policy's, which is trained at the episode's end": lambda output: output,
}


@pytest.mark.parametrize("name", COLLECTED)
def test_graphs_that_never_go_backward_are_told_of_within_a_minute(run_without_leaks: Recording, name: str) -> None:
    """`outputs.append(model(x))` in every step, however much memory is left. Fast growth of other things alone is nothing."""
    leaking = Leaking(run_without_leaks)
    collect(leaking, mlp() if name.startswith("a policy's") else leaking.model, COLLECTED[name])
    if name != "graphs":
        assert leaking.events() == []
        return
    (leak_event,) = leaking.events()
    assert leak_event["space"] == "host"
    assert any(" tensors float32[3, " in row for row in leak_event["tensors"])
    assert any(line.startswith(f"{__file__}:") for line in leak_event["lines"])


def test_a_user_s_own_tracing_is_left_alone(run_without_leaks: Recording) -> None:
    """It goes on with what it has, and nothing is counted meanwhile. Ours ends with the session, and in a forked child."""
    leaking = Leaking(run_without_leaks)
    leaking.suspicion.host = True
    tracemalloc.start(2)
    try:
        leaking.train(2)
        assert tracemalloc.is_tracing()
        assert tracemalloc.get_traceback_limit() == 2
    finally:
        tracemalloc.stop()
    leaking.suspicion.host = True
    leaking.train(2)
    assert tracemalloc.is_tracing()
    child = os.fork()
    if child == 0:
        os._exit(int(tracemalloc.is_tracing()))  # it would trace for the rest of its life
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tracemalloc.is_tracing()
    leaking.probe.remove()
    assert not tracemalloc.is_tracing()
    assert leaking.events() == []


def test_counting_keeps_nothing_alive_and_takes_no_notice_of_strange_tensors() -> None:
    """Sparse, nested, meta and functorch's: none raises. Memory that two share counts once."""
    strange = [
        torch.ones(3).to_sparse(), torch.ones(3, device="meta"), torch.empty(0),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ]  # fmt: skip
    before = count_objects()
    base = torch.ones(11, 1013)
    views = [base[1:], base.T]
    torch.func.vmap(lambda row: (count_objects(), row)[1])(torch.ones(3, 2))
    after = count_objects()
    assert after.sizes.total() - before.sizes.total() == pytest.approx(11 * 1013 * 4, abs=4096)
    assert {kind for kind, _ in grown_kinds(before, after)} >= {"float32[11, 1013] on cpu", "float32[1013, 11] on cpu"}
    references = len(gc.get_referrers(base))
    count_objects()
    assert len(gc.get_referrers(base)) == references
    assert len(strange + views) == 6


TOO_MUCH = 1 << 50


@pytest.mark.parametrize(("make", "asked"), [(torch.empty, TOO_MUCH), (np.empty, None)])
def test_the_host_s_memory_is_told_by_component(run: Recording, make: Callable[..., object], asked: int | None) -> None:
    """An exception that ends the script: an event beside its own. Torch has no class for it, and numpy's is a MemoryError."""
    model = torch.nn.Sequential(mlp(width=64), torch.nn.BatchNorm1d(1))
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        make(TOO_MUCH, dtype=torch.uint8 if make is torch.empty else np.uint8)
    session = run.session
    session._exits.record_exception(raised.value)
    session._exits.record_exception(raised.value)
    (frame,) = run.frames(catalog.EVENT_OUT_OF_MEMORY.name)
    size = sum(parameter.nbytes for parameter in model.parameters())
    attributes = frame["attrs"]
    assert attributes.get("requested") == asked
    assert attributes["parameters"] >= size
    assert attributes["gradients"] >= size
    assert attributes["optimizer_state"] >= 2 * size
    assert attributes["buffers"] >= sum(buffer.nbytes for buffer in model.buffers())
    assert len(run.frames(catalog.EVENT_EXCEPTION.name)) == 1
    for error in (RuntimeError("shapes do not match"), ValueError("DefaultCPUAllocator: can't allocate memory"), OSError(12)):
        assert host_shortage(run.context, error) is None, "it is one only by the allocator's words"


def test_modules_are_named_by_what_they_take_on_a_device(run: Recording) -> None:
    """With gradients and optimizer state; tensors on another device do not count."""
    model = torch.nn.ModuleDict({"large": torch.nn.Linear(300, 400), "small": torch.nn.Linear(3, 4)})
    large = model["large"]
    assert isinstance(large, torch.nn.Linear)
    size = large.weight.nbytes + large.bias.nbytes
    usage = components(run.context, "cpu")
    assert f"large, {text.size(size)}" in usage.modules
    assert components(run.context, "cuda:0").sizes["parameters"] == 0
