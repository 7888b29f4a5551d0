"""Hyperparameters and schedulers: what is shown, from which step a process goes on, and which scheduler is misused."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader

import torchobs
from tests.training import Recording, StepFlag, has, loss_of, mlp, recording
from torchobs import catalog
from torchobs.probes import optimizer as probe
from torchobs.probes import schedulers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


RATE, DECAY = catalog.LEARNING_RATE.name, catalog.OPTIMIZER_WEIGHT_DECAY.name
MOMENTUM, BETA2 = catalog.OPTIMIZER_MOMENTUM.name, catalog.OPTIMIZER_BETA2.name


def train(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3) -> None:
    """Some steps."""
    for index in range(steps):
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()


def groups(values: Mapping[tuple[str, ...], Any], name: str) -> dict[str, float]:
    """What is shown of one hyperparameter, by group."""
    return {key[1]: value for key, value in values.items() if key[0] == name and value == value}  # noqa: PLR0124  # not NaN


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.5, betas=(0.8, 0.95), weight_decay=0.25), (0.5, 0.25, 0.8, 0.95)),
        (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.75), (0.5, 0.0, 0.75, None)),
        (lambda p: torch.optim.RMSprop(p, lr=0.5, momentum=0.25), (0.5, 0.0, 0.25, 0.99)),
        (lambda p: torch.optim.Adafactor(p, lr=0.5), (0.5, 0.0, None, None)),
    ],
    ids=["adamw", "sgd", "rmsprop", "adafactor"],
)
def test_one_group_of_each_optimizer(run: Recording, make: Any, expected: tuple[float | None, ...]) -> None:
    """One group is one series of each hyperparameter that the optimizer has."""
    model = mlp()
    optimizer = make(model.parameters())
    train(model, optimizer)
    values = run.look()
    shown = [groups(values, name) for name in (RATE, DECAY, MOMENTUM, BETA2)]
    assert shown == [{} if value is None else {"0": value} for value in expected]


RATES: tuple[Any, ...] = (1, np.float64(0.5), np.float32(0.5), np.int64(2), np.array(0.25), torch.tensor(0.5))


def test_a_rate_of_any_type_is_in_the_record_of_every_step(run: Recording) -> None:
    """A warm-up that is interpolated (YOLOv5's) sets numpy's numbers, ``lr=1`` is an int: no step goes without its rate."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for rate in RATES:
        for index in range(40):
            optimizer.param_groups[0]["lr"] = rate
            loss_of(model, index).backward()  # type: ignore[no-untyped-call]
            optimizer.param_groups[0]["lr"] = float(rate) if index > 30 else rate
            optimizer.step()
            optimizer.zero_grad()
        assert groups(run.look(), RATE) == {"0": float(rate)}
    steps = run.steps()
    assert all(has(record, StepFlag.LEARNING_RATE) for record in steps)
    assert [record.learning_rate for record in steps] == [float(rate) for rate in RATES for _ in range(40)]


def test_groups_are_shown_as_far_as_they_differ(run: Recording) -> None:
    """Two groups with and without weight decay, as everybody trains transformers: one series more, and not three."""
    model = mlp()
    split = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(split, lr=0.5)
    train(model, optimizer)
    values = run.look()
    assert groups(values, RATE) == {"0": 0.5, "1": 0.5}
    assert groups(values, DECAY) == {"0": 0.1, "1": 0.0}
    assert (groups(values, MOMENTUM), groups(values, BETA2)) == ({"0": 0.9}, {"0": 0.999})
    optimizer.param_groups[1].update(weight_decay=0.1, betas=(0.5, 0.999), lr=0.25)
    values = run.look()
    assert groups(values, RATE) == {"0": 0.5, "1": 0.25}
    assert (groups(values, DECAY), groups(values, MOMENTUM)) == ({"0": 0.1, "1": 0.1}, {"0": 0.9, "1": 0.5})


def test_series_are_capped(run: Recording) -> None:
    """However many groups and optimizers there are: 8 rates and 4 of everything else."""
    model, extra = mlp(), [torch.nn.Parameter(torch.ones(1)) for _ in range(40)]
    split = [
        {"params": [one], "lr": index, "weight_decay": index, "betas": (index / 100, 0.9)} for index, one in enumerate(extra)
    ]
    optimizers = [torch.optim.AdamW(split), torch.optim.AdamW(model.parameters(), lr=77.0)]
    train(model, *optimizers)
    values = run.look()
    assert groups(values, RATE) == {str(index): float(index) for index in range(probe.MAX_GROUPS)}
    assert groups(values, DECAY) == {str(index): float(index) for index in range(probe.MAX_DIFFERING)}
    assert sum(len(groups(values, name)) for name in (RATE, DECAY, MOMENTUM, BETA2)) == 8 + 4 + 4 + 1


@pytest.mark.parametrize("same", [True, False])
def test_who_goes_on_is_shown_in_place_of_who_went_before(run: Recording, *, same: bool) -> None:
    """The next stage with the same model, and the next fold with another, though the former optimizers live on."""
    kept, model = [], mlp(0)
    for rate in (0.5, 0.25, 0.125):
        model = model if same else mlp(0)
        kept.append(torch.optim.SGD(model.parameters(), lr=rate))
        train(model, kept[-1], steps=30)
        assert groups(run.look(), RATE) == {"0": rate}
    assert [record.learning_rate for record in run.steps()] == [0.5] * 30 + [0.25] * 30 + [0.125] * 30


SHOWN = ("torchobs.steps.resumed_from",)


COUNTING = {
    "adamw": torch.optim.AdamW,
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": torch.optim.Adagrad,  # has a state before its first step
}


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize("done", [0, 5])
def test_a_loaded_state_says_how_many_steps_were_done(flight_dir: Path, make: Any, done: int) -> None:
    """Three steps follow those of a checkpoint, which no session has seen; an optimizer without a past begins at 0."""
    model = mlp()
    optimizer = make(model.parameters())
    train(model, optimizer, steps=done)
    state = optimizer.state_dict()
    for run in recording(flight_dir):
        model = mlp()
        optimizer = make(model.parameters())
        if done:
            optimizer.load_state_dict(state)
        train(model, optimizer)
        other = mlp()
        train(other, make(other.parameters()))  # a second one, made later, begins anew; the run does not
        assert run.look()[SHOWN] == done


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_a_count_the_checkpoint_or_a_scheduler_says_it(flight_dir: Path, tmp_path: Path, momentum: float) -> None:
    """Its rank says when the file was saved, also under another name; a run that loads nothing begins at 0."""

    def goes_on(name: str, *, schedule: bool = False) -> float | None:
        shown = None
        for run in recording(flight_dir):
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
            parts: list[Any] = [model, optimizer, *([lrs.StepLR(optimizer, 2)] if schedule else [])]
            for part, state in zip(parts, torch.load(tmp_path / name) if name else (), strict=False):
                part.load_state_dict(state)
            train_scheduled(model, optimizer, parts[2], 10) if schedule else train(model, optimizer, steps=5)
            torch.save([part.state_dict() for part in parts], tmp_path / "last.pt")
            shown = run.look().get(SHOWN)
        return shown

    assert [goes_on(""), goes_on("last.pt")] == [0, 5]
    (tmp_path / "last.pt").rename(tmp_path / "moved.pt")
    assert [goes_on("moved.pt"), goes_on("", schedule=True)] == [10, 0]
    for path in tmp_path.iterdir():
        path.touch()
    assert [goes_on("last.pt", schedule=True), goes_on("moved.pt")] == [10, None]


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
    "StepLR": lambda o: lrs.StepLR(o, 2),
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
    "composite": lambda o: Composite(o, lrs.StepLR(o, 2)),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=2),
}


def train_scheduled(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[Any]:
    """Train in the right order; return the rates, and the names in the scheduler's state."""
    rates: list[Any] = []
    for index in range(steps):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return [*rates, *scheduler.state_dict()]


def sgd() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def misuses(run: Recording) -> list[dict[str, Any]]:
    """The events of misuse."""
    return run.attributes(catalog.EVENT_SCHEDULER_MISUSED.name)


def test_every_scheduler_is_counted_once_and_does_what_it_always_did(flight_dir: Path) -> None:
    """Nine steps are nine, whatever it is made of; rates and state are those of a run without us; nothing is called misuse."""

    def rates(name: str) -> list[Any]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        return train_scheduled(model, optimizer, MAKERS[name](optimizer), 9)

    plain = {name: rates(name) for name in MAKERS}
    for run in recording(flight_dir):
        for number, name in enumerate(MAKERS, 1):
            assert rates(name) == plain[name], name
            assert run.look()[STEPS] == 9 * number, name
        values = run.look()
        assert [values[catalog.SCHEDULER_MISUSE.name, kind] for kind in catalog.SCHEDULER_MISUSES] == [0, 0, 0]
        assert misuses(run) == []


def test_loading_a_state_is_no_step(run: Recording) -> None:
    """A run that goes on from a checkpoint has made no step yet, and used nothing wrongly."""
    model, optimizer = sgd()
    several = [MAKERS[name](optimizer) for name in ("StepLR", "LambdaLR", "SequentialLR")]
    for scheduler in several:
        state = scheduler.state_dict()
        for _ in range(3):
            scheduler.load_state_dict(state)
    assert run.look()[STEPS] == 0
    train_scheduled(model, optimizer, several[0], 2)
    assert run.look()[STEPS] == 2
    assert misuses(run) == []


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
    assert misuses(run) == [{"kind": "before_optimizer", "scheduler": "StepLR"}]
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
    assert misuses(run) == []


def test_a_scheduler_that_is_never_stepped_is_told_while_the_run_lasts(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, after many steps of its optimizer."""
    monkeypatch.setattr(schedulers, "UNUSED_STEPS", 20)
    model, optimizer = sgd()
    forgotten = lrs.CosineAnnealingLR(optimizer, 100)
    train(model, optimizer, steps=15)
    run.look()
    assert misuses(run) == []
    train(model, optimizer, steps=15)
    for _ in range(3):
        run.look()
    assert misuses(run) == [{"kind": "never_stepped", "scheduler": type(forgotten).__name__}]


@pytest.mark.parametrize("stepped", [True, False])
def test_two_whole_epochs_are_enough_to_tell(run: Recording, *, stepped: bool) -> None:
    """One that is stepped after each epoch has been by then; nothing is said before the third begins."""
    model, optimizer = sgd()
    scheduler = lrs.StepLR(optimizer, 10)
    batches: Any = DataLoader(torch.ones(6, 8), batch_size=2)  # type: ignore[arg-type]
    for epoch in range(3):
        assert misuses(run) == []
        for batch in batches:
            model(batch).sum().backward()
            optimizer.step()
        if stepped and epoch:
            scheduler.step()
        run.look()
    assert misuses(run) == ([] if stepped else [{"kind": "never_stepped", "scheduler": "StepLR"}])


@pytest.mark.filterwarnings("ignore:To get the last learning rate")
def test_one_that_a_wrapper_moves_on_or_that_waits_is_not_forgotten(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch-ignite's counts itself, asks for the rates, and sets them; a warm-up is stepped first, by hand or by torch."""
    monkeypatch.setattr(schedulers, "UNUSED_STEPS", 20)
    model, optimizer = sgd()
    wrapped = lrs.ExponentialLR(optimizer, 0.9)
    for _ in range(30):
        train(model, optimizer, steps=1)
        wrapped.last_epoch += 1
        optimizer.param_groups[0]["lr"] = wrapped.get_lr()[0]
    run.look()
    assert misuses(run) == []
    several = [torch.optim.SGD(model.parameters(), lr=0.5) for _ in range(2)]
    manual_steps, waiting = lrs.LinearLR(several[0]), lrs.StepLR(several[0], 10)
    composed = lrs.SequentialLR(several[1], [lrs.LinearLR(several[1]), lrs.StepLR(several[1], 2)], [1000])
    train_scheduled(model, several[0], manual_steps, 30)
    train_scheduled(model, several[1], composed, 30)
    also_waiting = lrs.StepLR(several[0], 10)
    train_scheduled(model, several[0], manual_steps, 30)
    run.look()
    assert misuses(run) == []
    assert (waiting.last_epoch, also_waiting.last_epoch) == (0, 0)


def test_a_scheduler_of_another_optimizer_is_told(run: Recording) -> None:
    """The optimizer was made anew and the scheduler was not: it counts on, and changes nothing that trains."""
    model = mlp()
    stale = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = lrs.StepLR(stale, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        train_scheduled(model, optimizer, scheduler, schedulers.IDLE_STEPS + 5)
    for _ in range(2):
        run.look()
    assert misuses(run) == [{"kind": "idle_optimizer", "scheduler": "StepLR"}]


# --- torch is left alone ------------------------------------------------------------------------------------------------------


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
