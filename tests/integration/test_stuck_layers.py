"""Layers that learn nothing from the first step on are named; whatever else has small gradients, or none, is left in peace."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.training import Recording, has, recording
from torchobs import catalog
from torchobs.detect.stuck_layers import LASTING_STEPS
from torchobs.flight.format.step_record import StepFlag
from torchobs.probes.core.sampling_interval import SamplingInterval
from torchobs.probes.gradients import stuck_layers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("seeded")

WIDTH = 16
Built = tuple[nn.Module, torch.optim.Optimizer]


def train(run: Recording, built: Built, inputs: Callable[[], torch.Tensor], *, warm_up: int = 0) -> list[dict[str, Any]]:
    """Train for more than a hundred steps, with looks; return what was told. The learning rate rises for ``warm_up`` steps."""
    model, optimizer = built
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / warm_up) if warm_up else 1.0)
    for number in range(1, LASTING_STEPS + 61):
        optimizer.zero_grad(set_to_none=False)
        torch.autograd.backward((model(inputs()) - torch.randn(8, 1)).square().mean())
        optimizer.step()
        scheduler.step()
        if number % 40 == 0:
            run.look()
    return run.attributes(catalog.EVENT_UNMOVED_LAYERS.name)


def rows() -> torch.Tensor:
    """Inputs of a network of that width."""
    return torch.randn(8, WIDTH)


def chain(activation: type[nn.Module], depth: int) -> Any:
    """Linear layers, an activation after each but the last."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), activation()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def test_groups_that_come_and_go_are_not_mixed_up(run: Recording) -> None:
    """The same parameters in four groups, then in one: which group's rate is a parameter's is asked anew."""
    model = chain(nn.ReLU, 1)
    split = torch.optim.SGD([{"params": [one]} for one in model.parameters()], lr=0.1)
    for optimizer in (split, torch.optim.SGD(model.parameters(), lr=0.1)):
        assert train(run, (model, optimizer), rows) == []  # and no probe has failed: ``recording``


# --- what learns nothing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rate"), [(torch.optim.SGD, 0.1), (torch.optim.Adam, 1e-3)])
def test_the_first_layers_of_a_deep_sigmoid_network(run: Recording, kind: Any, rate: float) -> None:
    """Each layer divides the gradient by seven: of 25 at least the first six do not move, and Adam hardly helps."""
    model = chain(nn.Sigmoid, 24)
    (told,) = train(run, (model, kind(model.parameters(), lr=rate)), rows)
    assert told["cause"] == "vanishing"
    assert told["layers"][:3] == ["0", "2", "4"]
    assert 6 <= told["layers_affected"] < told["layers_total"] == 25
    assert run.values()[catalog.GRAD_UNMOVED_LAYERS.name,] >= told["layers_affected"]


def test_units_that_are_dead_are_found_by_the_layer_behind_them(run: Recording) -> None:
    """The bias of -10 is layer 4's: no gradient comes to 0, 2 and 4, and only zeros come into 6, which has a bias to learn."""
    model = chain(nn.ReLU, 5)
    with torch.no_grad():
        model[4].bias.fill_(-10.0)
    dead, blocked = train(run, (model, torch.optim.Adam(model.parameters(), lr=1e-3)), rows)
    assert (dead["cause"], dead["at"], dead["layers"]) == ("dead_units", "6", ["6"])
    assert (blocked["cause"], blocked["at"], blocked["layers"]) == ("cut_off", "4", ["0", "2", "4"])
    assert dead["layers_total"] == blocked["layers_total"] == 6


def test_the_layers_of_the_model_are_counted_whatever_is_trained(run: Recording) -> None:
    """Also those that are frozen, and in no optimizer; not those of another model that nothing trains."""
    teacher = chain(nn.ReLU, 9)
    frozen, trained = chain(nn.ReLU, 3), chain(nn.ReLU, 5)
    model = nn.ModuleDict({"frozen": frozen.requires_grad_(requires_grad=False), "trained": trained})
    trained[4].bias.data.fill_(-10.0)
    dead, _ = train(run, (trained, torch.optim.Adam(model["trained"].parameters(), lr=1e-3)), rows)
    assert dead["layers_total"] == 4 + 6
    assert not any(parameter.grad is not None for parameter in teacher.parameters())


class Translator(nn.Module):
    """An encoder whose last state a decoder carries on over a hundred steps of its own, at the end of which the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.RNN(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.RNN(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> Any:
        """Of shape (batch, time, width) to one number each."""
        _, state = self.encoder(inputs)
        states, _ = self.decoder(inputs, state)
        return self.head(states[:, -1])


def test_what_lies_before_a_long_recurrence(run: Recording) -> None:
    """The decoder's own weights have the gradient of its last steps; to the encoder it comes through all of them."""
    model = Translator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (told,) = train(run, (model, optimizer), lambda: torch.randn(8, 60, WIDTH))
    assert (told["cause"], told["layers"]) == ("vanishing", ["encoder"])


def saturated() -> Any:
    """Units of tanh at 30, whose slope is exactly zero in float32."""
    model = chain(nn.Tanh, 4)
    with torch.no_grad():
        for layer in model[:-1:2]:
            layer.bias.fill_(30.0)
    return model


class CutOff(nn.Module):
    """A backbone whose output the script multiplies by zero from step 60 on, and a head with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.calls = chain(nn.Tanh, 2), nn.Linear(WIDTH + 1, 1), 0

    def forward(self, inputs: torch.Tensor) -> Any:
        """One number a row."""
        self.calls += 1
        features = self.backbone(inputs) * (self.calls < 60)
        return self.head(torch.cat([inputs, features], 1))


class Detached(CutOff):
    """The same with a backbone that is detached: its gradients are absent, not zero."""

    def forward(self, inputs: torch.Tensor) -> Any:
        """One number a row."""
        self.calls += 1
        features = self.backbone(inputs)
        return self.head(torch.cat([inputs, features if self.calls < 60 else features.detach()], 1))


@pytest.mark.parametrize(
    ("made", "layers"),
    [
        (saturated, ["0", "2", "4", "6"]),
        (CutOff, ["backbone.0", "backbone.2", "backbone.4"]),
        (Detached, ["backbone.0", "backbone.2", "backbone.4"]),
    ],
    ids=["saturated", "cut off later", "detached later"],
)
def test_layers_that_no_gradient_comes_to(run: Recording, made: Callable[[], nn.Module], layers: list[str]) -> None:
    """Within 200 steps of a run that is over in less than a second: nobody waits for a clock."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(190):
        optimizer.zero_grad()
        torch.autograd.backward((model(rows()) - torch.randn(8, 1)).square().mean())
        optimizer.step()
    run.look()
    (told,) = run.attributes(catalog.EVENT_UNMOVED_LAYERS.name)
    assert (told["cause"], told["layers"], told["at"]) == ("cut_off", layers, layers[-1])


def test_rounds_without_time_lose_no_sample(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a millisecond may be over before it begins: the newest step is not judged before earlier ones."""
    monkeypatch.setattr(stuck_layers, "_ZEROS_S", 0.0)
    model: Any = Detached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for number in range(190):
        optimizer.zero_grad()
        torch.autograd.backward((model(rows()) - torch.randn(8, 1)).square().mean())
        optimizer.step()
        if number == 150:
            time.sleep(1.3)  # once a second the newest step is looked at
    run.look()
    (told,) = run.attributes(catalog.EVENT_UNMOVED_LAYERS.name)
    assert told["at"] == "backbone.4"


def test_a_fast_training_is_measured_more_often_while_in_doubt(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured every 80th step it would have no three samples within 200 steps; in doubt it is every 25th, for 200 steps."""
    monkeypatch.setattr(SamplingInterval, "_set_interval", lambda pace, _: setattr(pace, "interval", 80))
    with contextlib.contextmanager(recording)(flight_dir, grad_interval="auto") as run:
        model: Any = CutOff()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for number in range(500):
            optimizer.zero_grad()
            torch.autograd.backward((model(rows()) - torch.randn(8, 1)).square().mean())
            optimizer.step()
            if number % 10 == 0:
                run.look()
        (told,) = run.frames(catalog.EVENT_UNMOVED_LAYERS.name)
        assert told["attrs"]["at"] == "backbone.4"
        assert told["step"] <= 60 + 80 + 80 + LASTING_STEPS
        measured = [record.step for record in run.steps() if has(record, StepFlag.GRAD_NORM)]
        apart = [later - earlier for earlier, later in itertools.pairwise(measured)]
        assert set(apart) == {25, 80}
        assert apart[-1] == 80
        assert apart.count(25) <= 2 * LASTING_STEPS / 25


def test_a_backbone_that_is_frozen_is_left_in_peace(run: Recording) -> None:
    """Its gradients stay what ``zero_grad(set_to_none=False)`` made of them."""
    model = chain(nn.Tanh, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(LASTING_STEPS + 100):
        if step == 40:
            model[:-1].requires_grad_(requires_grad=False)
        optimizer.zero_grad(set_to_none=False)
        torch.autograd.backward((model(rows()) - torch.randn(8, 1)).square().mean())
        optimizer.step()
    run.look()
    assert not run.frames(catalog.EVENT_UNMOVED_LAYERS.name)


# --- what is healthy ----------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three blocks ``x + f(x)``, each by another habit that leaves gradients of nothing in the first steps or for good."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.blocks = nn.ModuleList(chain(nn.ReLU, 2) for _ in range(3))
        block: Any
        for block in self.blocks:
            block[-1] = nn.Linear(WIDTH, WIDTH)
            if habit == "zero-initialised":
                nn.init.zeros_(block[-1].weight)
                nn.init.zeros_(block[-1].bias)
        self.gates = nn.Parameter(torch.zeros(3)) if habit == "gated" else None
        self.table = nn.Embedding(5_000, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> Any:
        """One number a row."""
        state = inputs + self.table(torch.randint(0, 5_000, (8,)))
        for index, block in enumerate(self.blocks):
            state = state + block(state) * (1.0 if self.gates is None else self.gates[index])
        if self.habit == "unused":
            state = state + 0.0 * sum(parameter.sum() for parameter in self.unused.parameters())
        return self.head(state)


class Adapted(nn.Module):
    """A frozen layer with a LoRA beside it, whose second matrix begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 1)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> Any:
        """One number a row."""
        return self.head(torch.relu(self.base(inputs) + self.up(self.down(inputs))))


class Clamped(nn.Module):
    """Parameters without a matrix that come to the bound of their clamp at once, first in the order of the optimizer."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.bounded = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.layers = chain(nn.Tanh, 2)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> Any:
        """One number a row."""
        self.calls += 1
        bound = 1.0 if self.calls < 40 else -1.0
        factors = [one.clamp(max=bound).exp().sum() for one in self.bounded]
        return self.layers(inputs) * torch.stack(factors).sum()


def normalised() -> nn.Module:
    """Biases before a normalisation, whose gradient is zero but for rounding."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "zero-initialised": lambda: Branches("zero-initialised"),
    "gated": lambda: Branches("gated"),
    "unused": lambda: Branches("unused"),
    "adapted": Adapted,
    "normalised": normalised,
    "a temperature at its clamp": lambda: Clamped(()),
    "a temperature and a bias at their clamps": lambda: Clamped((), (1,)),
    "a temperature for each head at its clamp": lambda: Clamped((4, 1, 1)),
    "the deviations of a policy at their clamp": lambda: Clamped((1, 6)),
    "deep and rectified": lambda: chain(nn.ReLU, 6),
    "deep and linear": lambda: chain(nn.Identity, 20),
    "eight layers of tanh": lambda: chain(nn.Tanh, 8),
}


@pytest.mark.parametrize(("kind", "warm_up"), [(torch.optim.SGD, 0), (torch.optim.AdamW, 2000)])
@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_left_in_peace(run: Recording, name: str, kind: Any, warm_up: int) -> None:
    """Frozen, unused, adapted, gated, seldom used, normalised: also while the learning rate is next to nothing."""
    model = HEALTHY[name]()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert train(run, (model, kind(trained, lr=0.02 if kind is torch.optim.SGD else 1e-3)), rows, warm_up=warm_up) == []
    assert run.values()[catalog.GRAD_UNMOVED_LAYERS.name,] == 0.0
