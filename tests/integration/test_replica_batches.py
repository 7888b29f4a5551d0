"""Ranks of DDP that are given the same batches are told; sampled, sliced, repeated and evaluated data is not."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.diagnosis.observing import read
from tests.integration.test_distributed import train
from torchobs import catalog
from torchobs.cli.top import Watch, screen
from torchobs.detect.disagreement import LOOKED_BATCHES, same_batches
from torchobs.diagnosis.health import health
from torchobs.document.text import TerminalStyle
from torchobs.exporter.config import ExporterConfig
from torchobs.probes.replica_batches import number_of
from torchobs.ranks.live import DetailsReader, RunsReader
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = """
import torch, torch.distributed as dist, torchobs
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torchobs.init()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rank = dist.get_rank()
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
torch.manual_seed({seed})
loader = DataLoader({data}, batch_size=8, {loader})

def step(x, y):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

for epoch in range(2):
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)
    for x, y in loader:
        {step}
dist.destroy_process_group()
torchobs.shutdown()
print("{{}}")
"""
_EVALUATED = """\
step(torch.randn(8, 8) + rank, torch.randn(8, 1))
        for u, v in DataLoader(data, batch_size=8):
            model.module(u)
"""


def script(*, data: str = "data", loader: str = "shuffle=True", seed: str = "0", step: str = "step(x, y)") -> str:
    """A training with a data loader."""
    return _SCRIPT.format(data=data, loader=loader, seed=seed, step=step)


def said_live(flight_dir: Path) -> tuple[str, str]:
    """What the live page and `torchobs top` say of the run."""
    with closing(Scanner(ExporterConfig(flight_dir=str(flight_dir)))) as scanner:
        snapshot = scanner.scan()
        (shown,) = RunsReader().runs(snapshot, DetailsReader().gather(scanner, snapshot, ()))
        runs, _ = Watch(scanner).look()
    return health(shown).text, "\n".join(screen(runs, TerminalStyle(1000), 100).lines)


@pytest.mark.parametrize("loader", ["shuffle=True", "shuffle=False, num_workers=1"])
def test_a_sampler_that_is_missing(start: Any, flight_dir: Path, loader: str) -> None:
    """All ranks read all data, in one order; the remedy is named."""
    train(start, flight_dir, "-c", script(loader=loader))
    observed = read(flight_dir)
    assert "same_batches" in observed.kinds()
    assert "DistributedSampler" in observed.text("same_batches")
    assert all("DistributedSampler" in text for text in said_live(flight_dir))


@pytest.mark.parametrize(
    "given",
    [
        {"loader": "sampler=DistributedSampler(data)"},
        {"seed": "rank"},
        {"step": "step(x[rank::2], y[rank::2])"},
        {"data": "torch.utils.data.Subset(data, [0] * 256)"},
        {"step": _EVALUATED, "loader": "sampler=DistributedSampler(data)"},
    ],
    ids=["sampler", "orders", "parts of a batch", "one sample", "an evaluation"],
)
def test_ranks_with_data_of_their_own(start: Any, flight_dir: Path, given: dict[str, str]) -> None:
    """Nothing is said."""
    train(start, flight_dir, "-c", script(**given))
    assert read(flight_dir).said() == []
    assert not any("same data" in text for text in said_live(flight_dir))


def test_what_is_compared_is_written_down(start: Any, flight_dir: Path) -> None:
    """For each of the first iterations, on every rank."""
    train(start, flight_dir, "-c", script(loader="sampler=DistributedSampler(data)"))
    told = read(flight_dir).events(catalog.EVENT_REPLICA_BATCHES)
    assert [fact.step for fact in told] == [1, 17, 1, 17]


def test_batches_are_told_apart() -> None:
    """By values and by their order; nested, of any type."""
    x = torch.arange(12.0).view(3, 4)
    batches: list[Any] = [x, x.flip(0), [x, x], {"ids": x.long(), "mask": x > 2}]
    assert len({number_of(each) for each in batches}) == len(batches)
    assert number_of((x, [x.half()])) == number_of([x, x])
    assert number_of({"text": "a", "n": 3}) is None
    assert number_of([x, torch.full((2,), torch.nan)]) is None


def test_the_verdict_needs_batches_and_losses() -> None:
    """Eight batches that differ from each other, and losses equal to the bit."""
    batches = [float(number) for number in range(LOOKED_BATCHES)]
    losses = {step: 1.0 / (1 + step) for step in range(1, 20)}
    other = losses | {19: losses[19] * (1 + 2**-50)}
    assert same_batches({"0": {1: batches}, "1": {1: batches}}, {"0": losses, "1": losses}) == 1
    assert same_batches({"0": {1: batches}, "1": {1: batches}}, {"0": losses, "1": other}) is None
    assert same_batches({"0": {1: batches}, "1": {1: batches[::-1]}}, {"0": losses, "1": losses}) is None
    assert same_batches({"0": {1: [1.0] * 8}, "1": {1: [1.0] * 8}}, {"0": losses, "1": losses}) is None
    assert same_batches({"0": {1: batches}, "1": {}}, {"0": losses, "1": losses}) is None
    assert same_batches({"0": {1: batches}}, {"0": losses}) is None
    assert same_batches({}, {}) is None
