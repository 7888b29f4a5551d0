"""Weights of DDP's ranks that drift apart are told, with the learning rates where these differ; gradients agree meanwhile."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.diagnosis.observing import read
from tests.integration.test_distributed import train
from torchobs import catalog
from torchobs.detect.disagreement import drifted
from torchobs.probes.replica_weights import sums_of

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = """
import torch, torch.distributed as dist, torchobs

torchobs.init()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.{optimizer}
rank = dist.get_rank()
torch.manual_seed(rank)
for number in range(1, 40):
    if rank == 1 and number == 20:
        {fault}
    {step}
dist.destroy_process_group()
torchobs.shutdown()
print("{{}}")
"""
_PLAIN = "optimizer.zero_grad(); model(torch.randn(4, 8)).square().mean().backward(); optimizer.step()"
_CLOSURE = (
    "optimizer.step(lambda: (optimizer.zero_grad(), (loss := model(torch.randn(4, 8)).square().mean()).backward(), loss)[2])"
)


@pytest.mark.parametrize("step", [_PLAIN, _CLOSURE])
def test_weights_changed_on_one_rank(start: Any, flight_dir: Path, step: str) -> None:
    """As by a checkpoint that is loaded on one rank alone, after the model was wrapped."""
    fault = "torch.nn.init.normal_(model.module[0].weight)"
    train(start, flight_dir, "-c", _SCRIPT.format(optimizer="SGD(model.parameters(), lr=0.01)", fault=fault, step=step))
    observed = read(flight_dir)
    assert "weights_differ" in observed.kinds()
    assert "in step 32 the weights of ranks 0 and 1 are not the same (in step 16 they were)" in observed.text("weights_differ")


def test_ranks_that_train_one_model(start: Any, flight_dir: Path) -> None:
    """Each with data of its own: nothing is said, and what is compared was written down."""
    train(start, flight_dir, "-c", _SCRIPT.format(optimizer="AdamW(model.parameters(), lr=0.01)", fault="pass", step=_PLAIN))
    observed = read(flight_dir)
    assert observed.said() == []
    assert [fact.step for fact in observed.events(catalog.EVENT_REPLICA_WEIGHTS)] == [16, 32, 16, 32]


def weights(ranks: int, odd: dict[str, float]) -> dict[str, dict[int, list[float]]]:
    """What ranks write down in three steps; those that are odd have noise of that part of the weights' size in the last two."""
    chance = random.Random(0)
    found: dict[str, dict[int, list[float]]] = {}
    for step in (16, 32, 64):
        same = [chance.gauss(0, 1) for _ in range(128)]
        for rank in map(str, range(ranks)):
            noise = odd.get(rank, 0.0) if step > 16 else 0.0
            found.setdefault(rank, {})[step] = sums_of([value + noise * chance.gauss(0, 1) for value in same])
    return found


def test_the_odd_rank_is_named() -> None:
    """Since when, when they last were alike, and who; of two ranks, and of two halves, nobody is the odd one."""
    assert drifted(weights(4, {"2": 0.1})) == (32, 16, ("2",))
    assert drifted(weights(2, {"1": 0.1})) == (32, 16, ("0", "1"))
    assert drifted(weights(4, {"1": 0.1, "3": 0.5})) == (32, 16, ("0", "1", "2", "3"))


def test_ranks_that_agree_or_say_nothing() -> None:
    """Rounding is no drift, a rank alone has no peer, and without a common step nothing is known."""
    assert drifted(weights(8, dict.fromkeys("0123", 1e-4))) is None
    assert drifted(weights(1, {})) is None
    assert drifted({}) is None
    assert drifted({"0": {16: [1.0, 2.0]}, "1": {32: [5.0, 6.0]}}) is None
    assert drifted({"0": {16: [1.0, float("nan")]}, "1": {16: [1.0, 3.0]}}) is None
