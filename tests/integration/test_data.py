"""Loaders of every kind: what training waited for, their workers, and what a dead one leaves."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests import support
from tests.training import Recording, mlp
from torchobs.flight.layout import PHASE_NAMES
from torchobs.probes.data import BatchWatch, StarvationWatch
from torchobs.probes.timeline import LONG_TRACE

if TYPE_CHECKING:
    from collections.abc import Iterator

FETCH_S = 0.02
SAMPLES = 12


class Slow(Dataset[torch.Tensor]):
    """Every sample takes its time."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(FETCH_S)
        return torch.full((8,), float(index))


class SlowStream(IterableDataset[torch.Tensor]):
    """The same as a stream; in workers, each yields its share."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        for index in range(worker.id if worker else 0, SAMPLES, worker.num_workers if worker else 1):
            yield Slow()[index]


class Deadly(Slow):
    """The first sample kills the process that loads it, before a batch's descriptor could be on its way from there."""

    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def train(batches: Any) -> float:
    """Train on every batch; return the seconds that it waited for them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    waited, asked = 0.0, time.perf_counter()
    for batch in batches:
        waited += time.perf_counter() - asked
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        asked = time.perf_counter()
    return waited


def data_time(run: Recording) -> float:
    """Seconds of the phase data in all step records: all but the wait in which the loader turned out to be exhausted."""
    return sum(record.phase_s[0] for record in run.steps())


@pytest.mark.serial
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Slow, SlowStream])
def test_the_wait_for_data_is_what_the_loop_waited(run: Recording, dataset: type[Slow], workers: int) -> None:
    """Within 5 %, with and without workers, by index or as a stream; their start is a part of it."""
    loader: Any = DataLoader(dataset(), batch_size=2, num_workers=workers)
    waited = train(loader)
    assert data_time(run) == pytest.approx(waited, rel=0.05, abs=0.002)


@pytest.mark.serial
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning")  # torchdata 0.11 calls it
def test_stateful_loaders_are_loaders(run: Recording) -> None:
    """It has iterators and an ``__iter__`` of its own; imported after init(), it is watched all the same."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    waited = train(stateful.StatefulDataLoader(Slow(), batch_size=2, num_workers=1))
    assert data_time(run) == pytest.approx(waited, rel=0.05, abs=0.002)
    assert run.look()[("torchobs.data.worker_start.time",)] > 0


def test_workers_are_counted_and_their_start_is_timed_once_where_they_persist(run: Recording) -> None:
    """Configured and alive while the loader is iterated; persistent workers start in the first epoch only."""
    loader = DataLoader(Slow(), batch_size=2, num_workers=2, persistent_workers=True)
    train(loader)
    started = support.wait_until(lambda: run.values()[("torchobs.data.worker_start.time",)])
    assert 0 < started < 5
    iterator = iter(loader)
    support.wait_until(lambda: run.values().get(("torchobs.data.workers", "alive")) == 2)
    assert run.values()[("torchobs.data.workers", "configured")] == 2
    support.wait_until(lambda: run.values().get(("torchobs.data.batches_ready",)) == 4)  # two each, untouched
    next(iterator)
    values = run.look()
    assert values[("torchobs.data.worker_start.time",)] == started
    assert values[("torchobs.data.workers_died",)] == 0
    assert run.frames("torchobs.data.worker_died") == []


def test_a_killed_worker_is_an_event_and_torch_says_what_it_always_says(run: Recording) -> None:
    """The training loop gets torch's own error, and the event has the signal."""
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*(is killed by signal: Killed|exited unexpectedly)"):
        train(DataLoader(Deadly(), batch_size=2, num_workers=1))  # when another ends, torch raises again, wherever
    (event,) = support.wait_until(lambda: run.frames("torchobs.data.worker_died"))
    assert event["attrs"]["signal"] == "SIGKILL"
    assert run.look()[("torchobs.data.workers_died",)] == 1  # the event is there at once, the count at the end of its round


def test_a_look_at_one_batch_leaves_the_iterator_as_it_was(run: Recording) -> None:
    """The next fetch is looked at, the ones after are not; the batches are the same, and no iterator lives longer for it."""
    context, seen = run.session.context, list[Any]()
    assert context is not None
    watch = BatchWatch(context.breaker("loaders"), lambda _, batch: seen.append(batch))
    loader: Any = DataLoader(torch.zeros(6, 40_000), batch_size=2)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)  # the session itself looks at the first
    watch.arm(iterator)
    assert "_next_data" in vars(iterator)
    first, second = next(iterator), next(iterator)
    assert (first.shape, second.shape) == ((2, 40_000), (2, 40_000))
    assert "_next_data" not in vars(iterator)
    assert [one is first for one in seen] == [True]
    watch.arm(iterator)
    references = sys.getrefcount(iterator)
    watch.remove()
    assert "_next_data" not in vars(iterator)
    assert sys.getrefcount(iterator) == references


@pytest.mark.serial
def test_training_that_waits_for_its_data_is_told(run: Recording) -> None:
    """A state, and one event when it begins; the clock is the test's."""
    context, now_s = run.session.context, [0.0]
    assert context is not None
    run.look()  # from here on nobody else folds and publishes
    starving = StarvationWatch(context, lambda: now_s[0])
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(batches: Any) -> None:
        starving.sample()
        for batch in batches:
            model(batch).sum().backward()
            time.sleep(0.002)
            optimizer.step()
        context.writer.fold()
        now_s[0] += 60.0
        starving.sample()
        context.writer.publish()

    train(DataLoader(torch.ones(SAMPLES, 8), batch_size=None))  # type: ignore[arg-type]
    assert run.values()[("torchobs.data.starved",)] == 0
    for _ in range(2):
        train(DataLoader(Slow(), batch_size=None))
    assert run.values()[("torchobs.data.starved",)] == 1
    (event,) = run.frames("torchobs.data.starved")
    assert 0.2 <= event["attrs"]["share"] <= 1


class Stream(IterableDataset[torch.Tensor]):
    """Batches without end, as a server's requests."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.zeros(8)


@pytest.mark.parametrize("gradients", [False, True])
def test_batches_without_end_after_training_take_no_memory(run: Recording, gradients: bool) -> None:  # noqa: FBT001  # a parameter
    """Streaming evaluation, or serving: what is noted of fetches is taken in as they come, and counts as before."""
    assert run.session.context is not None
    recorder, longest, fetched = run.session.context.recorder, 0, 0
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    begun = time.perf_counter()
    with torch.set_grad_enabled(gradients):
        for _ in DataLoader(Stream(), batch_size=None):
            longest, fetched = max(longest, len(recorder.trace), len(recorder.arguments)), fetched + 1
            if fetched == 3 * LONG_TRACE:
                break
    served = time.perf_counter() - begun
    assert longest <= LONG_TRACE + 2
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    last = run.steps()[-1]
    assert sum(last.phase_s) >= served, "no time is lost"
    assert (last.phase_s[PHASE_NAMES.index("evaluation")] > 0.9 * served) is not gradients
