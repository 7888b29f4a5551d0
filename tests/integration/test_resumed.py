"""From which step a process goes on is known from its optimizer's state, or from the script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchobs
from tests.training import Recording, loss_of, mlp
from torchobs.probes.optimizer.optimizer import counted_steps

if TYPE_CHECKING:
    from collections.abc import Callable

SHOWN = ("torchobs.steps.resumed_from",)


def train(optimizer: torch.optim.Optimizer, model: torch.nn.Module, steps: int) -> None:
    """Some steps."""
    for index in range(steps):
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def saved(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> dict[str, Any]:
    """The state of an optimizer that has made so many steps, in another run."""
    model = mlp()
    optimizer = make(model.parameters())
    train(optimizer, model, steps)
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
    train(optimizer, model, 3)
    values = run.look()
    assert values[SHOWN] == 5
    assert values[("torchobs.steps",)] == 3


def test_an_optimizer_without_a_past_begins_at_0(run: Recording, counting: Any) -> None:
    """Its state is empty before its first step."""
    model = mlp()
    optimizer = counting(model.parameters())
    train(optimizer, model, 3)
    assert run.look()[SHOWN] == 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_counts_nothing_is_not_guessed(run: Recording, momentum: float) -> None:
    """SGD, with and without a state: it may have been loaded."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    train(optimizer, model, 3)
    assert SHOWN not in run.look()


def test_the_script_knows_best(state: dict[str, Any], run: Recording, counting: Any) -> None:
    """Given before the first step."""
    torchobs.log(resumed_from=400)
    model = mlp()
    optimizer = counting(model.parameters())
    optimizer.load_state_dict(state)
    train(optimizer, model, 2)
    assert run.look()[SHOWN] == 400


def test_the_first_optimizer_is_asked_alone(run: Recording) -> None:
    """A second one, made later, begins anew; the run does not."""
    model, other = mlp(), mlp()
    first, second = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    for parameter in model.parameters():
        first.state[parameter] = {
            "step": torch.tensor(12.0), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter),
        }  # fmt: skip
    train(first, model, 2)
    train(second, other, 2)
    assert run.look()[SHOWN] == 12


def test_a_count_in_the_group_is_found_and_other_things_are_none() -> None:
    """Fused optimizers of other libraries count there."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert counted_steps(optimizer) is None
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"step": "seven"}
    assert counted_steps(optimizer) is None
    optimizer.param_groups[0]["step"] = 7
    assert counted_steps(optimizer) == 7
