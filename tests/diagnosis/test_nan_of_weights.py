"""Weights that are not finite: overflows in float16 are told as that, and of all other steps only what was seen."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchobs
from tests.diagnosis.observing import Look, Observed, observe, read
from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose
from torchobs.diagnosis.load import load_reports

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

AT = 7
RARELY, ALWAYS = 100, 1


class Half:
    """A training in float16 whose loss is multiplied in one step, so that gradients do not fit and the loss itself does."""

    autocast = False
    factor = 1e8

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
        if not self.autocast:
            self.model.half()
        self.optimizer = make(self.model.parameters())

    def step(self, number: int) -> None:
        """One step."""
        x, target = torch.randn(8, 16), torch.randn(8, 4)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16) if self.autocast else nullcontext():
            output = self.model(x if self.autocast else x.half())
        loss = (output.float() - target).square().mean()
        self.backward(loss * self.factor if number == AT else loss)

    def backward(self, loss: torch.Tensor) -> None:
        """And the optimizer's step."""
        torch.autograd.backward(loss)
        self.optimizer.step()


class Autocast(Half):
    """Weights in float32, whose gradients pass float16."""

    autocast = True


class Scaled(Autocast):
    """A scaler leaves such steps out."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(make)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    def backward(self, loss: torch.Tensor) -> None:
        """By the scaler."""
        torch.autograd.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Spoiled(Half):
    """One weight is overwritten between two steps; nothing overflows."""

    factor = 1.0

    def step(self, number: int) -> None:
        """One step."""
        super().step(number)
        if number == AT:
            linear: Any = self.model[3]
            linear.weight.data[1, 2] = float("inf")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """It keeps nothing of the gradients."""
    return torch.optim.SGD(parameters, lr=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an ``eps`` that float16 can hold."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def train(kind: type[Half], make: Callable[..., torch.optim.Optimizer], directory: Path, interval: int = RARELY) -> Observed:
    """Some steps; what is said of them."""
    torch.manual_seed(0)
    with torchobs.init(flight_dir=directory, grad_interval=interval, log_level="CRITICAL"):
        training = kind(make)
        for number in range(1, AT + 4):
            training.step(number)
    return read(directory)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("kind", [Half, Autocast])
@pytest.mark.parametrize("interval", [RARELY, ALWAYS])
def test_an_overflow_is_told_with_its_step(kind: type[Half], make: Any, interval: int, tmp_path: Path) -> None:
    """Of that step, measured or not: by what the next loss finds in the weights."""
    told = train(kind, make, tmp_path, interval).events(catalog.EVENT_NONFINITE_ORIGIN)
    assert [(each.attributes["origin"], each.attributes["parameter"], each.step) for each in told] == [
        ("overflow", "0.weight", AT)
    ]
    (report,), _ = load_reports(list(tmp_path.glob("*.flight")))
    text = next(finding.text for finding in diagnose(report) if finding.kind == "nonfinite_origin")
    assert text.startswith(
        f"The NaN or infinity of step {AT} is most likely gradients that overflowed in float16, in 0.weight and 5 more"
    )
    assert "GradScaler" in text


@pytest.mark.parametrize("make", [sgd, adamw])
def test_one_spoiled_weight_is_told_as_that(make: Any, tmp_path: Path) -> None:
    """It is not what a step makes of its gradients: that is in every layer, or in what the optimizer keeps."""
    (told,) = train(Spoiled, make, tmp_path).events(catalog.EVENT_NONFINITE_ORIGIN)
    assert (told.attributes["origin"], told.attributes["parameter"], told.step) == ("parameter", "3.weight", AT + 1)


@pytest.mark.parametrize("interval", [RARELY, ALWAYS])
def test_what_a_scaler_skips_is_no_fault(interval: int, tmp_path: Path) -> None:
    """Nothing is told of it."""
    assert train(Scaled, sgd, tmp_path, interval).events(catalog.EVENT_NONFINITE_ORIGIN) == []


class Root(nn.Module):
    """Divides by a root, whose derivative is infinite at 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of any length."""
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-3).to(x.dtype)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("interval", [RARELY, ALWAYS])
def test_weights_that_finite_gradients_have_spoiled_are_blamed_on_nothing(make: Any, interval: int) -> None:
    """Promise: an ``eps`` that is 0 in float16 makes 0 / 0; neither an overflow nor a derivative is named, nor one weight."""

    def steps(look: Look) -> None:
        linear = nn.Linear(16, 16)
        nn.init.constant_(linear.bias[:2], -100.0)  # dead units, whose gradients are 0
        model = nn.Sequential(linear, nn.ReLU(), Root(), nn.Linear(16, 4)).half()
        optimizer = make(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(
                nn.functional.cross_entropy(model(torch.randn(32, 16).half()).float(), torch.ones(32).long())
            )
            optimizer.step()
            look.stepped()

    torch.manual_seed(0)
    observed = observe(steps, grad_interval=interval)
    (told,) = observed.events(catalog.EVENT_NONFINITE_ORIGIN)
    assert (told.attributes["origin"], told.step) == ("unknown", 2)
    text = observed.text("nonfinite_origin")
    assert text.startswith("Parameters (0.weight and ")
    assert text.endswith(" were NaN or infinite already in step 2; what made them so was not seen.")


class Players:
    """A critic with a gradient penalty, whose root has no derivative at 0, and a maker."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.maker = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizers = [make(model.parameters(), lr=1e-3) for model in (self.critic, self.maker)]

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


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("spoil", "origin", "step", "name"),
    [
        (one, "unknown", AT + 1, "Parameters (0.weight and 1 more) were"),
        (two, "unknown", AT, "Parameters (0.weight and 1 more) were"),
        (overwritten, "parameter", AT, "The parameter Sequential.0.weight held"),
    ],
)
def test_a_spoiled_weight_is_dated_and_not_called_the_birthplace(
    spoil: Callable[[Players, int], None], origin: str, step: int, name: str, make: Any
) -> None:
    """Promise: of a gradient that nobody measured, in a step of another player, or from elsewhere: what did it was not seen."""

    def steps(look: Look) -> None:
        players = Players(make)
        for number in range(1, AT + 4):
            spoil(players, number)
            look.stepped()

    torch.manual_seed(0)
    observed = observe(steps, grad_interval=RARELY)
    told = observed.events(catalog.EVENT_NONFINITE_ORIGIN)[0]
    assert (told.attributes["origin"], told.step) == (origin, step)
    text = observed.text("nonfinite_origin")
    assert text.startswith(name)
    assert "was not seen" in text
    assert "born" not in text
    assert "sqrt" not in text


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_weights_that_are_overwritten_are_blamed_on_no_derivative(make: Any, bias: bool) -> None:  # noqa: FBT001  # a parameter
    """Promise: after a step with sound gradients, of which plain SGD keeps nothing; a root in the loss has not made them so."""

    def steps(look: Look) -> None:
        model = nn.Linear(8, 4, bias=bias)
        optimizer = make(model.parameters(), lr=1e-3)
        for number in range(1, AT + 3):
            optimizer.zero_grad()
            torch.autograd.backward((model(torch.randn(8, 8)).square() + 1.0).sqrt().mean())
            optimizer.step()
            if number == AT:
                for parameter in model.parameters():
                    parameter.data.fill_(float("nan"))
            look.stepped()

    torch.manual_seed(0)
    observed = observe(steps, grad_interval=RARELY)
    (told,) = observed.events(catalog.EVENT_NONFINITE_ORIGIN)
    assert (told.attributes["origin"], told.step) == ("unknown" if bias else "parameter", AT + 1)
    assert "sqrt" not in observed.text("nonfinite_origin")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_first_steps_are_numbered_right(at: int) -> None:
    """While it is not known yet where a step ends."""

    def steps(look: Look) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for number in range(1, 5):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            torch.autograd.backward((loss - loss.detach() - 1.0).log() if number == at else loss)
            optimizer.step()
            look.stepped()

    told = observe(steps, grad_interval=ALWAYS).events(catalog.EVENT_NONFINITE_ORIGIN)
    assert [(origin.step, origin.attributes["operator"]) for origin in told] == [(at, "log")]
