"""torchobs.tune.pipeline: the learning rate that a plateau lowers."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.tune.pipelines import PAIR, Listed, Unsized, loss_fn, weights
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


def test_a_plateau_s_rate_rises_first() -> None:
    """Promise: the steps of a warm-up have the rates that other schedules have; what the plateau has lowered stays lowered."""
    run, other = _plateau_run(warmup_steps=3), tune.pipeline(nn.Linear(16, 4), lr=1.0, scheduler="constant", warmup_steps=3)
    assert _rate(run) == _rate(other) == 0.25
    run.step_plateau(1.0)
    for factor in (1.0, 0.5, 0.5, 0.5):
        for each in (run, other):
            each.train_step(PAIR, loss_fn)
        assert _rate(run) == pytest.approx(_rate(other) * factor)
        for _ in range(2 if run.step == 1 else 0):
            run.step_plateau(2.0)


def test_a_plateau_that_nobody_tells_is_an_error() -> None:
    """Promise: a loop of one's own is told what to call, before the model has changed, and after that goes on."""
    run = _plateau_run()
    before = weights(run.model)
    with pytest.raises(ValueError, match=r"step_plateau\(metric\) before the first batch"):
        run.train_step(PAIR, loss_fn)
    assert all(map(torch.equal, before, weights(run.model)))
    for nonsense in ("1", None, torch.ones(2)):
        with pytest.raises(ValueError, match="metric is a number, not "):
            run.step_plateau(nonsense)
    for metric in (1.0, 2.0, 2.0):
        run.step_plateau(metric)
        run.train_step(PAIR, loss_fn)
    assert _rate(run) == 0.5
    with pytest.raises(TypeError, match="LambdaLR takes no metric"):
        tune.pipeline(nn.Linear(2, 2)).step_plateau(1.0)


def test_a_checkpoint_of_another_kind_of_scheduler_is_refused(tmp_path: Path) -> None:
    """Promise: neither is loaded into the other, which torch would do."""
    plateau, cosine = _plateau_run(), tune.pipeline(nn.Linear(16, 4), optimizer="sgd")
    for saved, other in ((plateau, cosine), (cosine, plateau)):
        saved.save(tmp_path / "run.pt")
        with pytest.raises(ValueError, match="another scheduler than"):
            other.resume(tmp_path / "run.pt")
