"""Hyperparameters of every group are shown as the optimizer has them, and from which step a process goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import torchobs
from tests.training import Recording, StepFlag, has, loss_of, mlp
from torchobs import catalog
from torchobs.flight.step_record import RecordKind
from torchobs.probes import optimizer as probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


RATE, DECAY, MOMENTUM, BETA2 = (
    metric.name
    for metric in (
        catalog.LEARNING_RATE, catalog.OPTIMIZER_WEIGHT_DECAY, catalog.OPTIMIZER_MOMENTUM, catalog.OPTIMIZER_BETA2,
    )
)  # fmt: skip


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
        (lambda p: torch.optim.AdamW(p, lr=0.5, fused=True), (0.5, 0.01, 0.9, 0.999)),
        (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.75), (0.5, 0.0, 0.75, None)),
        (lambda p: torch.optim.RMSprop(p, lr=0.5, momentum=0.25), (0.5, 0.0, 0.25, 0.99)),
        (lambda p: torch.optim.Adagrad(p, lr=0.5), (0.5, 0.0, None, None)),
        (lambda p: torch.optim.Adafactor(p, lr=0.5), (0.5, 0.0, None, None)),
        (lambda p: torch.optim.SGD(p, lr=torch.tensor(0.5)), (0.5, 0.0, 0.0, None)),
        (lambda p: torch.optim.SGD(p, lr=1), (1.0, 0.0, 0.0, None)),
    ],
    ids=["adamw", "adamw fused", "sgd", "rmsprop", "adagrad", "adafactor", "a rate in a tensor", "a whole number"],
)
def test_one_group_of_each_optimizer(run: Recording, make: Any, expected: tuple[float | None, ...]) -> None:
    """One group is one series of each hyperparameter that the optimizer has."""
    model = mlp()
    optimizer = make(model.parameters())
    train(model, optimizer)
    values = run.look()
    shown = [groups(values, name) for name in (RATE, DECAY, MOMENTUM, BETA2)]
    assert shown == [{} if value is None else {"0": value} for value in expected]


RATES: dict[str, Any] = {
    "int": 1,
    "numpy's double": np.float64(0.5),
    "numpy's float": np.float32(0.5),
    "numpy's int": np.int64(2),
    "interpolated": np.interp(5, [0, 10], [0.0, 0.1]),
    "an array": np.array(0.25),
    "a tensor": torch.tensor(0.5),
}


@pytest.mark.parametrize("name", RATES)
def test_a_rate_of_any_type_is_in_the_record_of_every_step(run: Recording, name: str) -> None:
    """A warm-up that is interpolated (YOLOv5's) sets numpy's numbers, ``lr=1`` is an int: no step goes without its rate."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for index in range(100):
        optimizer.param_groups[0]["lr"] = RATES[name]
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.param_groups[0]["lr"] = float(RATES[name]) if index > 80 else RATES[name]
        optimizer.step()
        optimizer.zero_grad()
    steps = run.steps()
    assert len(steps) == 100
    assert all(has(record, StepFlag.LEARNING_RATE) for record in steps)
    assert {record.learning_rate for record in steps} == {float(RATES[name])}
    assert groups(run.look(), RATE) == {"0": float(RATES[name])}


@pytest.mark.parametrize(
    "rate",
    [None, "0.5", np.array([0.5, 0.5]), np.array("x"), torch.tensor([0.5, 0.5]), torch.tensor(0.5, device="meta")],
)
def test_what_is_no_rate_is_none(rate: Any) -> None:
    """And breaks nothing. One on a device is never read: that would wait for it."""
    assert probe.number_of(rate) is None


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


def test_a_rate_on_its_way_from_a_device_belongs_to_its_step(run: Recording) -> None:
    """It is written as a late value of the step in which it was taken, and shown as the first group's."""
    context = run.session.context
    assert context is not None
    model = mlp()
    train(model, torch.optim.Adagrad(model.parameters(), lr=0.5))
    watching = probe.OptimizerProbe(probe.RateSource())
    watching.install(context)
    watching._write_first(2, 0.125)
    late = [record for record in run.records() if record.kind == RecordKind.LATE]
    assert [(record.step, record.learning_rate, has(record, StepFlag.LOSS)) for record in late] == [(2, 0.125, False)]
    assert groups(run.look(), RATE) == {"0": 0.125}


SHOWN = ("torchobs.steps.resumed_from",)


def saved(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> dict[str, Any]:
    """The state of an optimizer that has made so many steps, in another run."""
    model = mlp()
    optimizer = make(model.parameters())
    train(model, optimizer, steps=steps)
    return optimizer.state_dict()


COUNTING: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,  # has a state before its first step
    "adafactor": torch.optim.Adafactor,
}


@pytest.fixture(params=list(COUNTING.values()), ids=list(COUNTING))
def counting(request: pytest.FixtureRequest) -> Any:
    """An optimizer that counts its steps."""
    return request.param


@pytest.fixture
def state(counting: Any) -> dict[str, Any]:
    """Its state after five steps, which no session has seen: fixtures are made in this order."""
    return saved(counting, 5)


def test_a_loaded_state_says_how_many_steps_were_done(state: dict[str, Any], run: Recording, counting: Any) -> None:
    """A checkpoint of step five is loaded; three steps follow."""
    model = mlp()
    optimizer = counting(model.parameters())
    optimizer.load_state_dict(state)
    train(model, optimizer)
    other = mlp()
    train(other, counting(other.parameters()))  # a second one, made later, begins anew; the run does not
    values = run.look()
    assert values[SHOWN] == 5


def test_an_optimizer_without_a_past_begins_at_0(run: Recording, counting: Any) -> None:
    """Its state is empty before its first step."""
    model = mlp()
    optimizer = counting(model.parameters())
    train(model, optimizer)
    assert run.look()[SHOWN] == 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_counts_nothing_is_not_guessed(run: Recording, momentum: float) -> None:
    """SGD, with and without a state: it may have been loaded."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    train(model, optimizer)
    assert SHOWN not in run.look()


def test_the_script_knows_best(state: dict[str, Any], run: Recording, counting: Any) -> None:
    """Given before the first step."""
    torchobs.log(resumed_from=400)
    model = mlp()
    optimizer = counting(model.parameters())
    optimizer.load_state_dict(state)
    train(model, optimizer, steps=2)
    assert run.look()[SHOWN] == 400
