"""torchobs.tune.pipeline: a run goes on from its checkpoint, and a damaged one is refused."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.tune.models import blocks
from tests.tune.pipelines import Listed, StoppedError, loss_fn, weights
from torchobs import tune


@pytest.mark.parametrize("scheduler", ["cosine", "plateau"])
@pytest.mark.parametrize("stop_at", [2, 5, 6, 7])
def test_resumed_is_the_run_that_was_not_interrupted(tmp_path: Path, stop_at: int, scheduler: str) -> None:
    """Promise: to the bit, within an epoch or not, where neither loader nor model draws a random number."""
    path, batches = tmp_path / "run.pt", [(torch.randn(4, 16), torch.randn(4, 4)) for _ in range(5)]
    first_weights = blocks(dropout=0.0).state_dict()

    def made() -> tune.Pipeline:
        model = blocks(dropout=0.0)
        model.load_state_dict(first_weights)
        run = tune.pipeline(model, lr=1e-2, scheduler=scheduler, accumulate=2, warmup_steps=2, amp=torch.bfloat16)
        if scheduler == "plateau":
            run.scheduler = ReduceLROnPlateau(run.optimizer, patience=0, threshold=0.9)  # lowers the rate in epoch 2
        return run

    run = made()
    losses = run.fit(Listed(batches), 3, loss_fn)
    calls = 0

    def stopping(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 5 * (stop_at // 3) + 2 * (stop_at % 3):  # an epoch has three steps, of 2, 2 and 1 batches
            raise StoppedError
        return loss_fn(output, target)

    with pytest.raises(StoppedError):
        made().fit(Listed(batches), 3, stopping, checkpoint=path, every=1)
    second = made().resume(path)
    assert second.step == stop_at
    rest = second.fit(Listed(batches), 3, loss_fn)
    assert rest == losses[-len(rest) :]
    assert all(map(torch.equal, weights(run.model), weights(second.model)))
    assert run.scheduler.state_dict() == second.scheduler.state_dict()
    assert run.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]
