"""A weight that its optimizer has spoiled, with a NaN gradient that nobody measured, is not where the NaN was born."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.diagnosis.observing import Look, Observed, observe
from torchobs import catalog, debug

if TYPE_CHECKING:
    from collections.abc import Callable

AT = 7
Make = Any
ADAM = partial(torch.optim.Adam, lr=1e-3)
MOMENTUM = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
PLAIN = partial(torch.optim.SGD, lr=1e-3)


class Players:
    """A critic with a gradient penalty, whose root has no derivative at 0, and a maker."""

    clears = False
    """Whether gradients are set to zero at once"""

    def __init__(self, make: Make) -> None:
        self.maker = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizers = [make(model.parameters()) for model in (self.critic, self.maker)]

    def criticise(self, *, ill: bool) -> None:
        """A step of the critic; its loss is finite, and if ``ill`` its gradient is not."""
        real, made = torch.randn(16, 2), self.maker(torch.randn(16, 8)).detach()
        between = ((real + made) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between * (0.0 if ill else 1.0)).sum(), between, create_graph=True)
        penalty = (slope.square().sum(1).sqrt() - 1).square().mean()
        self.step(0, self.critic(made).mean() - self.critic(real).mean() + 10 * penalty)

    def make(self) -> None:
        """A step of the maker."""
        self.step(1, -self.critic(self.maker(torch.randn(16, 8))).mean())

    def step(self, index: int, loss: torch.Tensor) -> None:
        """Of one optimizer."""
        self.optimizers[index].zero_grad()
        torch.autograd.backward(loss)
        self.optimizers[index].step()
        if self.clears:
            self.optimizers[index].zero_grad()


def run(make: Make, spoil: Callable[[Players, int], None]) -> Observed:
    """Train, without a measurement of the steps in question."""

    def train(look: Look) -> None:
        players = Players(make)
        for number in range(1, AT + 4):
            spoil(players, number)
            look.stepped()

    torch.manual_seed(0)
    return observe(train, grad_interval=100)


def one(players: Players, number: int) -> None:
    """The critic alone: its next loss is the first that is not finite."""
    players.criticise(ill=number == AT)


def two(players: Players, number: int) -> None:
    """Both: the maker's loss of the same step is."""
    players.criticise(ill=number == AT)
    players.make()


def overwritten(players: Players, number: int) -> None:
    """A weight that no optimizer has spoiled."""
    if number == AT:
        with torch.no_grad():
            next(players.critic.parameters())[0, 0] = float("nan")
    two(players, number)


@pytest.mark.parametrize("spoil", [one, two])
@pytest.mark.parametrize(("make", "name"), [(ADAM, "Adam"), (MOMENTUM, "SGD")], ids=["adam", "momentum"])
def test_the_gradient_is_told_and_the_optimizer_that_used_it(
    make: Make, name: str, spoil: Callable[[Players, int], None]
) -> None:
    """What the optimizer keeps is not finite; with what names the operator, and no guess at it."""
    observed = run(make, spoil)
    told = observed.events(catalog.EVENT_NONFINITE_ORIGIN)[0]
    assert (told.attributes["origin"], told.step) == ("backward", AT + (spoil is one))
    assert told.attributes["parameter"].endswith("0.weight")
    assert "operator" not in told.attributes
    text = observed.text("nonfinite_origin")
    assert f"came with the gradient of {told.attributes['parameter']}: it was not finite in the last backward pass" in text
    assert f"the optimizer ({name}) wrote it into the weights" in text
    assert "sqrt" not in text
    assert "measured" not in text
    assert 'torchobs.debug.context("step", anomaly="warn")' in text
    assert "born" not in text
    assert "before the step" not in text


def test_what_is_said_to_name_the_operator_does() -> None:
    """The derivative within a derivative, too."""
    players = Players(ADAM)
    with debug.context("step", anomaly="warn") as seen:
        players.criticise(ill=True)
    assert any("SqrtBackward" in each for each in seen.anomalies), seen.anomalies


def test_a_gradient_that_is_not_set_to_zero_says_so_itself() -> None:
    """Of an optimizer that keeps nothing."""
    model = nn.Linear(4, 1, bias=False)

    def train(look: Look) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, AT + 3):
            loss = model(torch.randn(8, 4)).mean()
            optimizer.zero_grad() if number != AT + 1 else None
            (0.0 * loss + (0.0 * loss).sqrt() if number == AT else loss).backward()
            optimizer.step()
            look.stepped()

    told = observe(train, grad_interval=100).events(catalog.EVENT_NONFINITE_ORIGIN)[0]
    assert (told.attributes["origin"], told.attributes["parameter"]) == ("backward", "weight")


@pytest.mark.parametrize(("spoil", "dated"), [(one, "before the step"), (two, "before this loss")])
def test_a_spoiled_weight_of_which_nothing_is_left_is_dated_right(
    spoil: Callable[[Players, int], None], dated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other player may have stepped in the same step."""
    monkeypatch.setattr(Players, "clears", True)
    observed = run(PLAIN, spoil)
    told = observed.events(catalog.EVENT_NONFINITE_ORIGIN)[0]
    assert (told.attributes["origin"], told.step) == ("parameter", AT + (spoil is one))
    assert f"0.weight, {dated}" in observed.text("nonfinite_origin")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, of a graph that begins within a graph
def test_a_spoiled_weight_of_a_compiled_model_is_told_alike() -> None:
    """One that was overwritten, too, whose note says how it was found."""

    def train(look: Look, *, overwrites: bool) -> None:
        head = nn.Linear(4, 1, bias=False)
        model = nn.Sequential(nn.Linear(4, 4), head)
        compiled: Any = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for number in range(1, AT + 3):
            loss = compiled(torch.randn(8, 4)).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            if number == AT and overwrites:
                head.weight.data[0, 1] = float("nan")
            elif number == AT and head.weight.grad is not None:
                head.weight.grad[0, 1] = float("nan")  # as a derivative leaves it
            optimizer.step()
            look.stepped()

    for overwrites, wanted in ((False, "backward"), (True, "parameter")):
        observed = observe(partial(train, overwrites=overwrites), grad_interval=100)
        told = observed.events(catalog.EVENT_NONFINITE_ORIGIN)[0]
        assert (told.attributes["origin"], told.attributes["parameter"]) == (wanted, "1.weight")
        assert ("1.weight, before the step" in observed.text("nonfinite_origin")) == overwrites


@pytest.mark.parametrize("make", [ADAM, MOMENTUM, PLAIN])
def test_an_overwritten_weight_is_told_as_before(make: Make) -> None:
    """Its optimizer has had finite gradients alone."""
    observed = run(make, overwritten)
    told = observed.events(catalog.EVENT_NONFINITE_ORIGIN)[0]
    assert (told.attributes["origin"], told.step) == ("parameter", AT)
    assert "0.weight, before the step" in observed.text("nonfinite_origin")
