"""Two ranks in one process group that exchange nothing are told; ranks that do, in whatever way, are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.diagnosis.observing import read
from tests.integration.test_distributed import train

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = """
import torch, torch.distributed as dist, torchobs
from tests.training import Recording

run = Recording(torchobs.init())
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(8, 1)
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(300):
    optimizer.zero_grad()
    {model}(torch.randn(4, 8)).square().mean().backward()
    {exchange}
    optimizer.step()
    if number in (5, 290):
        run.look()
torchobs.shutdown()
dist.destroy_process_group()
print("{{}}")
"""
_BY_HAND = "[dist.all_reduce(one.grad) for one in model.parameters()]"
_NOW_AND_THEN = "number % 150 or dist.all_reduce(model.weight.data)"


def trained(start: Any, flight_dir: Path, model: str, exchange: str) -> set[str]:
    """The kinds of what is said of such a training."""
    train(start, flight_dir, "-c", _SCRIPT.format(model=model, exchange=exchange))
    return read(flight_dir).kinds()


def test_a_model_that_is_not_called_as_wrapped_is_told(start: Any, flight_dir: Path) -> None:
    """Its ``.module`` is, or it never was wrapped: each rank trains by itself after the first broadcast."""
    assert "no_exchange" in trained(start, flight_dir, "model", "pass")


@pytest.mark.parametrize(("model", "exchange"), [("wrapped", "pass"), ("model", _BY_HAND), ("model", _NOW_AND_THEN)])
def test_ranks_that_exchange_something_are_not(start: Any, flight_dir: Path, model: str, exchange: str) -> None:
    """DDP, an all-reduce of one's own, local SGD."""
    assert "no_exchange" not in trained(start, flight_dir, model, exchange)
