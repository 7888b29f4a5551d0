"""torchobs.tune.pipeline: the learning rate that a plateau lowers."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.tune.pipelines import PAIR, Listed, Unsized, loss_fn
from torchobs import tune


def _plateau_run(**options: Any) -> tune.Pipeline:
    run = tune.pipeline(nn.Linear(16, 4), lr=1.0, optimizer="sgd", scheduler="plateau", amp=False, **options)
    run.scheduler = ReduceLROnPlateau(run.optimizer, patience=1, factor=0.5)
    return run


def _rate(run: tune.Pipeline) -> float:
    rate: float = run.optimizer.param_groups[0]["lr"]
    return rate


def test_a_plateau_lowers_the_rate_by_what_validation_returns() -> None:
    """Promise: as torch's scheduler does it, once an epoch; validated without gradients, in evaluation mode."""
    run, metrics = _plateau_run(), iter([1.0, 2.0, torch.tensor(2.0), 0.5])
    loader = Listed([PAIR])

    def validate() -> Any:
        assert not run.model.training
        assert not torch.is_grad_enabled()
        return next(metrics)

    rates = []
    for epoch in range(1, 5):
        run.fit(loader, epoch, loss_fn, validate=validate)
        assert run.model.training
        rates.append(_rate(run))
    assert rates == [1.0, 1.0, 0.5, 0.5]


def test_a_plateau_goes_by_the_mean_loss_where_nothing_validates() -> None:
    """Promise: no argument is needed, nor the number of batches; a loss that grows lowers the rate."""
    run, calls = _plateau_run(), iter(range(1, 100))
    run.fit(Unsized([PAIR] * 2), 6, lambda output, target: loss_fn(output, target) * 0 + next(calls))
    assert _rate(run) == 0.25  # epochs 2 and 3, 4 and 5 were worse than the first
    assert run.step == 12
