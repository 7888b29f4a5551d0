"""Loaders of every kind: what training waited for, their workers; and epochs, evaluations and the start of a run."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import torchobs
from tests import flights, support
from tests.training import Recording, mlp, recording
from torchobs.document.blocks import section
from torchobs.document.html import content
from torchobs.document.sections import epoch_table
from torchobs.flight import reader
from torchobs.ranks.runs import load
from torchobs.support.text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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


class Loop:
    """A training loop's parts."""

    def __init__(self) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch).sum().backward()
        self.optimizer.step()

    def train(self, batches: Any, after: Callable[[], object] = lambda: None) -> None:
        for batch in batches:
            self.step(batch)
            after()

    def evaluate(self, batches: Any, nap_s: float = 0.0) -> float:
        """Return the seconds from the first batch to the end of the last nap."""
        begun = ended = 0.0
        with torch.no_grad():
            for batch in batches:
                begun = begun or time.perf_counter()
                self.model(batch)
                time.sleep(nap_s)
                ended = time.perf_counter()
        return ended - begun


def train(batches: Any) -> float:
    """Train on every batch; return the seconds that it waited for them."""
    loop, waited, asked = Loop(), 0.0, time.perf_counter()
    for batch in batches:
        waited += time.perf_counter() - asked
        loop.step(batch)
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


NAP_S = 0.12
BATCHES = 3


def three_batches() -> Any:
    """Three batches."""
    return DataLoader(torch.ones(BATCHES * 2, 8), batch_size=2)  # type: ignore[arg-type]


def epochs(run: Recording) -> int:
    """The counter, after a whole round of the sampler's that began after the last step."""
    run.whole_round()
    count: int = run.values()[("torchobs.epochs",)]
    return count


@pytest.mark.parametrize("anew", [False, True])
def test_epochs_are_the_training_loader_s(run: Recording, *, anew: bool) -> None:
    """Evaluation before, amid and after them is none, with loaders that are used again, or made for each epoch."""
    loop, training, validation = Loop(), three_batches(), three_batches()
    next(iter(training))  # a look at the shape
    loop.evaluate(validation)
    assert epochs(run) == 0
    kept = []
    for _ in range(3):
        if anew:
            training, validation = three_batches(), three_batches()
        kept.append(training)
        loop.train(training, after=lambda: loop.evaluate(validation))  # noqa: B023  # it is called in this round
        loop.evaluate(validation)
    assert epochs(run) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_before_a_loop_s_first_step_is_no_epoch(run: Recording, workers: int) -> None:
    """At each batch, also the first, where nothing has been trained on yet; and before the loop, with workers that stay."""
    loop, training = Loop(), three_batches()
    validation: Any = DataLoader(
        torch.ones(BATCHES * 2, 8),  # type: ignore[arg-type]
        batch_size=2, num_workers=workers, persistent_workers=workers > 0,
    )  # fmt: skip
    loop.evaluate(validation)
    for _ in range(3):
        for batch in training:
            loop.evaluate(validation)
            loop.step(batch)
    assert epochs(run) == 3


def test_each_epoch_has_its_line(run: Recording) -> None:
    """Its steps, its time, and the mean of its losses."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(torch.ones(6, 8), torch.ones(6, 1)), batch_size=2)
    for _ in range(3):
        for inputs, targets in loader:
            torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert epochs(run) == 3
    assert run.session.writer is not None
    (view,), _ = load([Path(run.session.writer.path)])
    table = epoch_table(view)
    assert table is not None
    assert [row[:2] for row in table.rows] == [("1", "3"), ("2", "3")]  # the third has not ended
    assert {row[3] for row in table.rows} == {number(view.loss)}
    card = content(section("details", "", table, cards=True))  # of the live page
    assert "Mean loss</th>" in str(card)


def test_an_epoch_is_a_span_with_its_steps(flight_dir: Path) -> None:
    """From its beginning to the next one's, the last one to the run's end."""
    for _ in recording(flight_dir):
        loop, training = Loop(), three_batches()
        for _ in range(2):
            loop.train(training)
            time.sleep(NAP_S)
    (path,) = flight_dir.glob("*.flight")
    spans = [frame for frame in flights.frames(reader.open_path(str(path))) if frame["name"] == "torchobs.epoch"]
    assert [span["attrs"] for span in spans] == [{"epoch": 1, "steps": BATCHES}, {"epoch": 2, "steps": BATCHES}]
    assert spans[0]["t1"] == spans[1]["t0"]
    assert all(span["t1"] - span["t0"] >= NAP_S * 1e9 for span in spans)


@pytest.mark.parametrize("announced", [True, False])
def test_an_evaluation_is_a_span(run: Recording, *, announced: bool) -> None:
    """With ``eval()`` and ``train()``, or with gradients disabled alone: as long as it was."""
    loop, training = Loop(), three_batches()
    loop.train(training)
    begun = time.perf_counter()
    if announced:
        loop.model.eval()
    least = loop.evaluate(three_batches(), NAP_S)
    if announced:
        loop.model.train()
    most = time.perf_counter() - begun
    loop.train(training)
    values = run.look()
    (span,) = run.frames("torchobs.evaluation")
    assert least - 1e-6 <= (span["t1"] - span["t0"]) / 1e9 <= most + 1e-6
    assert least - 1e-6 <= values[("torchobs.goodput.time", "evaluation")] <= most + 1e-6


def test_the_length_of_the_run_is_what_it_was_told(flight_dir: Path) -> None:
    """By a setting, or by ``log()``; else there is no such series."""
    planned = ("torchobs.steps.planned",)
    for run in recording(flight_dir):
        assert planned not in run.look()
        torchobs.log(total_steps=500)
        assert run.look()[planned] == 500
        assert ("torchobs.scalar", "total_steps") not in run.values()
    for run in recording(flight_dir, total_steps=1000):
        assert run.look()[planned] == 1000


class Grouped(DistributedSampler[Any]):
    """Draws in its own way, and has not what its parent makes."""

    def __init__(self, samples: Any) -> None:
        self.dataset, self.num_replicas, self.rank, self.num_samples = samples, 2, 0, len(samples) // 2

    def __iter__(self) -> Any:
        return iter(torch.randperm(len(self.dataset)).tolist()[self.rank :: self.num_replicas])  # type: ignore[arg-type]


def mistaken_orders(run: Recording) -> list[tuple[int, bool]]:
    """Step of each word on it, and whether it takes it back."""
    events = [event for event in run.frames("torchobs.loop.mistake") if event["attrs"]["kind"] == "same_order"]
    return [(event["step"], "parameters_affected" in event["attrs"]) for event in events]


@pytest.mark.parametrize(
    "how", ["forgotten", "called", "in order", "one rank", "few steps", "grouped", "trial before", "set after iter"]
)
def test_a_sampler_that_is_not_given_the_epoch_is_told_once(run: Recording, how: str) -> None:
    """Promise: where a ``DistributedSampler`` of several ranks shuffles each of some epochs alike, and nowhere else.

    Neither a trial before the first epoch nor an epoch that is set late counts.
    """
    loop, samples = Loop(), torch.ones(16 if how == "few steps" else 40, 8)
    replicas = 1 if how == "one rank" else 2
    plain: Any = partial(DistributedSampler, num_replicas=replicas, rank=0, shuffle=how != "in order")
    sampler = (Grouped if how == "grouped" else plain)(samples)
    batches: Any = DataLoader(samples, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    if how == "trial before":
        loop.train(batches)
    for epoch in range(4):
        iterator = iter(batches) if how == "set after iter" else batches
        if how in {"called", "trial before", "set after iter"}:
            sampler.set_epoch(epoch)
        loop.train(iterator)
    assert run.errors() == []
    assert epochs(run) == 4 + (how == "trial before")
    assert mistaken_orders(run) == ([(20, False)] if how == "forgotten" else [])


def test_a_sampler_whose_epochs_have_several_passes_is_taken_back(run: Recording) -> None:
    """The event after the first passes of one epoch, by the next epoch."""
    loop, samples = Loop(), torch.ones(40, 8)
    sampler: Any = DistributedSampler(samples, 2, 0)  # type: ignore[arg-type]
    batches: Any = DataLoader(samples, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for _ in range(4):
            loop.train(batches)
    epochs(run)
    assert mistaken_orders(run) == [(20, False), (40, True)]
