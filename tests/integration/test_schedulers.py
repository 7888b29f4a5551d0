"""Every scheduler's steps are counted once, misuse is told, and torch's own bookkeeping is untouched."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader

import torchobs
from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog
from torchobs.probes import schedulers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = (catalog.SCHEDULER_STEPS.name,)


class Overriding(lrs.LRScheduler):
    """A user's own that overrides ``step`` and calls nobody."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [base * 0.5**self.last_epoch for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        del epoch
        self.last_epoch += 1
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate


class Calling(lrs.StepLR):
    """A user's own that overrides ``step`` and calls its parent."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)


class Composite(lrs.LRScheduler):
    """A user's own that steps another one, which torch knows nothing of."""

    def __init__(self, optimizer: torch.optim.Optimizer, other: lrs.LRScheduler) -> None:
        self.other = other
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if not self._is_initial:
            self.other.step()


MAKERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4]),
    "ConstantLR": lrs.ConstantLR,
    "LinearLR": lrs.LinearLR,
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.1, 0.5),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20),
    "SWALR": lambda o: SWALR(o, 0.05),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.StepLR(o, 2), lrs.CosineAnnealingLR(o, 4)], [2, 5]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)]),
    "nested": lambda o: lrs.ChainedScheduler(
        [lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.StepLR(o, 2)], [3]), lrs.ExponentialLR(o, 0.9)]
    ),
    "overriding": Overriding,
    "calling": lambda o: Calling(o, 2),
    "composite": lambda o: Composite(o, lrs.StepLR(o, 2)),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=2),
}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    """Train in the right order; return the rates."""
    rates = []
    for index in range(steps):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


def sgd() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def told(run: Recording) -> list[dict[str, Any]]:
    """The events of misuse."""
    return run.attributes(catalog.EVENT_SCHEDULER_MISUSED.name)


@pytest.mark.parametrize("name", MAKERS)
def test_every_scheduler_is_counted_once_and_does_what_it_always_did(flight_dir: Path, name: str) -> None:
    """Nine steps are nine, whatever it is made of; the rates are those of a run without us; nothing is called misuse."""
    results = []
    for recorded in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        if not recorded:
            results.append(train(model, optimizer, MAKERS[name](optimizer), 9))
            continue
        for run in recording(flight_dir):
            results.append(train(model, optimizer, MAKERS[name](optimizer), 9))
            values = run.look()
            assert values[STEPS] == 9
            assert [values[catalog.SCHEDULER_MISUSE.name, kind] for kind in catalog.SCHEDULER_MISUSES] == [0, 0, 0]
            assert told(run) == []
    assert results[0] == results[1]


def test_loading_a_state_is_no_step(run: Recording) -> None:
    """A run that goes on from a checkpoint has made no step yet, and used nothing wrongly."""
    model, optimizer = sgd()
    several = [MAKERS[name](optimizer) for name in ("StepLR", "LambdaLR", "SequentialLR")]
    for scheduler in several:
        state = scheduler.state_dict()
        for _ in range(3):
            scheduler.load_state_dict(state)
    assert run.look()[STEPS] == 0
    train(model, optimizer, several[0], 2)
    assert run.look()[STEPS] == 2
    assert told(run) == []


# --- misuse -------------------------------------------------------------------------------------------------------------------


def test_a_scheduler_stepped_first_is_told(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """The order of before PyTorch 1.1: counted, an event, one line; and torch's warning names the user's line."""
    model, optimizer = sgd()
    scheduler = lrs.StepLR(optimizer, 2)
    with caplog.at_level(logging.WARNING, "torchobs"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(4):
            scheduler.step()
            loss_of(model, index).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        values = run.look()
        run.look()
    assert [(warning.category, warning.filename) for warning in caught] == [(UserWarning, __file__)]
    assert told(run) == [{"kind": "before_optimizer", "scheduler": "StepLR"}]
    assert (values[STEPS], values[catalog.SCHEDULER_MISUSE.name, "before_optimizer"]) == (4, 1)
    (line,) = (line.getMessage() for line in caplog.records)
    assert line.startswith("torchobs: A learning-rate scheduler (StepLR) is stepped before its optimizer's first step")


def test_a_first_step_that_the_loss_scaler_skips_is_no_misuse(run: Recording) -> None:
    """PyTorch warns of it, wrongly; we know that the optimizer's turn came first."""
    model, optimizer = sgd()
    scheduler, scaler = lrs.StepLR(optimizer, 2), torch.amp.GradScaler("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for index in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, index)).backward()  # type: ignore[no-untyped-call]
            if index < 2:
                next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert run.look()[STEPS] == 4
    assert told(run) == []


def unscheduled(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train without a scheduler's step."""
    for index in range(steps):
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def test_a_scheduler_that_is_never_stepped_is_told_while_the_run_lasts(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, after many steps of its optimizer."""
    monkeypatch.setattr(schedulers, "UNUSED_STEPS", 20)
    model, optimizer = sgd()
    forgotten = lrs.CosineAnnealingLR(optimizer, 100)
    unscheduled(model, optimizer, 15)
    run.look()
    assert told(run) == []
    unscheduled(model, optimizer, 15)
    for _ in range(3):
        run.look()
    assert told(run) == [{"kind": "never_stepped", "scheduler": type(forgotten).__name__}]


@pytest.mark.parametrize("stepped", [True, False])
def test_two_whole_epochs_are_enough_to_tell(run: Recording, *, stepped: bool) -> None:
    """One that is stepped after each epoch has been by then; nothing is said before the third begins."""
    model, optimizer = sgd()
    scheduler = lrs.StepLR(optimizer, 10)
    batches: Any = DataLoader(torch.ones(6, 8), batch_size=2)  # type: ignore[arg-type]
    for epoch in range(3):
        assert told(run) == []
        for batch in batches:
            model(batch).sum().backward()
            optimizer.step()
        if stepped and epoch:
            scheduler.step()
        run.look()
    assert told(run) == ([] if stepped else [{"kind": "never_stepped", "scheduler": "StepLR"}])


@pytest.mark.filterwarnings("ignore:To get the last learning rate")
def test_one_that_a_wrapper_moves_on_is_not_forgotten(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytorch-ignite's does: it counts itself, asks for the rates, and sets them."""
    monkeypatch.setattr(schedulers, "UNUSED_STEPS", 20)
    model, optimizer = sgd()
    wrapped = lrs.ExponentialLR(optimizer, 0.9)
    for _ in range(30):
        unscheduled(model, optimizer, 1)
        wrapped.last_epoch += 1
        optimizer.param_groups[0]["lr"] = wrapped.get_lr()[0]
    run.look()
    assert told(run) == []


def test_a_scheduler_that_waits_for_its_turn_is_not_forgotten(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up is stepped first, by hand or by a ``SequentialLR``: what comes after it has its time."""
    monkeypatch.setattr(schedulers, "UNUSED_STEPS", 20)
    model = mlp()
    several = [torch.optim.SGD(model.parameters(), lr=0.5) for _ in range(2)]
    manual_steps, waiting = lrs.LinearLR(several[0]), lrs.StepLR(several[0], 10)
    composed = lrs.SequentialLR(several[1], [lrs.LinearLR(several[1]), lrs.StepLR(several[1], 2)], [1000])
    train(model, several[0], manual_steps, 30)
    train(model, several[1], composed, 30)
    also_waiting = lrs.StepLR(several[0], 10)
    train(model, several[0], manual_steps, 30)
    run.look()
    assert told(run) == []
    assert (waiting.last_epoch, also_waiting.last_epoch) == (0, 0)


def test_a_scheduler_of_another_optimizer_is_told(run: Recording) -> None:
    """The optimizer was made anew and the scheduler was not: it counts on, and changes nothing that trains."""
    model = mlp()
    stale = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = lrs.StepLR(stale, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        train(model, optimizer, scheduler, schedulers.IDLE_STEPS + 5)
    for _ in range(2):
        run.look()
    assert told(run) == [{"kind": "idle_optimizer", "scheduler": "StepLR"}]


def test_two_optimizers_with_a_scheduler_each_are_right(run: Recording) -> None:
    """A GAN's, stepped in turn."""
    models = [mlp(0), mlp(1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    several = [lrs.StepLR(optimizer, 10) for optimizer in optimizers]
    for _ in range(schedulers.IDLE_STEPS + 5):
        for model, optimizer, scheduler in zip(models, optimizers, several, strict=True):
            train(model, optimizer, scheduler, 1)
    assert run.look()[STEPS] == 2 * schedulers.IDLE_STEPS + 10
    assert told(run) == []


# --- torch is left alone ------------------------------------------------------------------------------------------------------


def test_torch_s_own_bookkeeping_is_exact(run: Recording) -> None:
    """What a scheduler puts around ``optimizer.step``, its counts, its state and its pickle are those of a run without us."""
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.5)
    scheduler = lrs.StepLR(optimizer, 2)
    assert optimizer.step._wrapped_by_lr_sched  # type: ignore[attr-defined]
    assert not getattr(optimizer, "_opt_called", False)
    optimizer.step()
    assert optimizer._opt_called  # type: ignore[attr-defined]
    scheduler.step()
    assert (scheduler._step_count, scheduler.last_epoch) == (2, 1)
    assert set(scheduler.state_dict()) == set(vars(scheduler)) - {"optimizer"}
    assert vars(lrs.LRScheduler)["step"].__qualname__ == "LRScheduler.step"
    assert not hasattr(vars(lrs.LRScheduler)["step"], "__wrapped__")
    assert run.errors() == []


def test_a_class_defined_later_is_wrapped_when_first_made_and_restored(flight_dir: Path) -> None:
    """A user's own scheduler in the training script, below ``init()``."""
    torchobs.init(flight_dir=flight_dir)

    class Late(Overriding):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)

    plain = vars(Late)["step"]
    for run in recording(flight_dir):
        optimizer = torch.optim.SGD(mlp().parameters(), lr=0.5)
        scheduler = Late(optimizer)
        assert vars(Late)["step"] is not plain
        optimizer.step()
        scheduler.step()
        assert run.look()[STEPS] == 1
    assert vars(Late)["step"] is plain
