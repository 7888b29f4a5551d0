"""Layers that learn nothing are named, and why; whatever else has small gradients, or none, is left in peace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.training import Recording, recording
from torchobs import catalog
from torchobs.detect.learning import LASTING_STEPS
from torchobs.probes.stuck_layers import APART

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("seeded")

WIDTH = 16
Built = tuple[nn.Module, torch.optim.Optimizer]


def train(run: Recording, built: Built, inputs: Callable[[], torch.Tensor], *, warm_up: int = 0) -> list[dict[str, Any]]:
    """Train for more than a hundred steps, with looks; return the findings. The learning rate rises for ``warm_up`` steps."""
    model, optimizer = built
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / warm_up) if warm_up else 1.0)
    for number in range(1, LASTING_STEPS + 61):
        optimizer.zero_grad(set_to_none=False)
        torch.autograd.backward((model(inputs()) - torch.randn(8, 1)).square().mean())
        optimizer.step()
        scheduler.step()
        if number % 40 == 0:
            run.look()
    return [attributes for attributes in run.attributes(catalog.EVENT_UNMOVED_LAYERS.name) if attributes["cause"] != "unused"]


def rows() -> torch.Tensor:
    """Inputs of a network of that width."""
    return torch.randn(8, WIDTH)


def chain(activation: type[nn.Module], depth: int) -> Any:
    """Linear layers, an activation after each but the last."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), activation()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def test_a_new_model_begins_without_findings(run: Recording) -> None:
    """The gauge of the alert does not keep the layers of the one before until gradients of the new one are measured."""
    model = chain(nn.ReLU, 2)
    model[2].bias.data.fill_(-10.0)
    assert train(run, (model, torch.optim.Adam(model.parameters(), lr=1e-3)), rows)
    assert run.values()[catalog.GRAD_UNMOVED_LAYERS.name,] == 3.0
    other = net()
    optimizer = torch.optim.Adam(other.parameters())
    for _ in range(3):
        detached(other, optimizer)
        optimizer.step()
    assert run.look()[catalog.GRAD_UNMOVED_LAYERS.name,] == 0.0


# --- what learns nothing ------------------------------------------------------------------------------------------------------


def test_the_first_layers_of_a_deep_sigmoid_network(run: Recording) -> None:
    """Each layer divides the gradient by seven: of 25 at least the first six do not move, and Adam hardly helps."""
    model = chain(nn.Sigmoid, 24)
    (attributes,) = train(run, (model, torch.optim.Adam(model.parameters(), lr=1e-3)), rows)
    assert attributes["cause"] == "vanishing"
    assert attributes["layers"][:3] == ["0", "2", "4"]
    assert 6 <= attributes["layers_affected"] < attributes["layers_total"] == 25
    assert run.values()[catalog.GRAD_UNMOVED_LAYERS.name,] >= attributes["layers_affected"]


def test_a_normalisation_counts_as_a_layer_only_if_it_learns_nothing(run: Recording) -> None:
    """Of three linear layers and two norms, the second fed nothing but zeros: four."""
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model[2].unused = nn.LazyLinear(1)  # without a shape until it is called
    with torch.no_grad():
        layers[3].bias.fill_(-100.0)  # type: ignore[operator]  # it is a tensor
    events = train(run, (model, optimizer), rows)
    assert [(attributes["layers"], attributes["layers_total"]) for attributes in events] == [(["5"], 4), (["0", "3"], 4)]


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


class Scaled(nn.Module):
    """LayerScale: branches with a factor that begins near zero."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.head = nn.ModuleList(chain(nn.ReLU, 1) for _ in range(12)), nn.Linear(WIDTH, 1)
        self.scales = nn.ParameterList(torch.full((WIDTH,), 1e-6) for _ in range(12))

    def forward(self, inputs: torch.Tensor) -> Any:
        """One number a row."""
        for branch, scale in zip(self.branches, self.scales, strict=True):
            inputs = inputs + scale * branch(inputs)
        return self.head(inputs)


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
        factors = [parameter.clamp(max=bound).exp().sum() for parameter in self.bounded]
        return self.layers(inputs) * torch.stack(factors).sum()


def normalised() -> nn.Module:
    """Biases before a normalisation: their gradient is zero but for rounding."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "zero-initialised": lambda: Branches("zero-initialised"),
    "gated": lambda: Branches("gated"),
    "unused": lambda: Branches("unused"),
    "scaled": Scaled,
    "normalised": normalised,
    "a temperature at its clamp": lambda: Clamped(()),
    "deep and linear": lambda: chain(nn.Identity, 20),
}


@pytest.mark.parametrize(("kind", "warm_up"), [(torch.optim.SGD, 0), (torch.optim.AdamW, 2000)])
@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_left_in_peace(run: Recording, name: str, kind: Any, warm_up: int) -> None:
    """Unused, gated, seldom used, normalised: also while the learning rate is next to nothing."""
    model = HEALTHY[name]()
    assert (
        train(run, (model, kind(model.parameters(), lr=0.02 if kind is torch.optim.SGD else 1e-3)), rows, warm_up=warm_up) == []
    )
    assert run.values()[catalog.GRAD_UNMOVED_LAYERS.name,] == 0.0


# --- an optimizer that gets no gradient at all --------------------------------------------------------------------------------

Step = Callable[[nn.Module, torch.optim.Optimizer], None]
NET = ["0", "2"]
"""Layers of :func:`net`"""


def net() -> nn.Sequential:
    """A small model."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def backward(loss: torch.Tensor) -> None:
    """As ``loss.backward()`` does: looked up at each call."""
    torch.autograd.backward(loss)


def sound(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As it should be."""
    optimizer.zero_grad()
    backward(model(torch.randn(4, 8)).square().mean())


def detached(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """A loss that is detached, and made to require a gradient because torch asked for it."""
    model.zero_grad()
    backward(model(torch.randn(4, 8)).square().mean().detach().requires_grad_())


def never(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """No backward pass."""
    model.zero_grad()
    model(torch.randn(4, 8)).square().mean()


def cleared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """``zero_grad()`` after ``backward()``."""
    sound(model, optimizer)
    optimizer.zero_grad()


def without(run: Recording, cause: str = "no_gradient") -> list[tuple[int | None, list[str]]]:
    """Layers that get no gradient, and since when."""
    run.look()
    frames = [frame for frame in run.frames(catalog.EVENT_UNMOVED_LAYERS.name) if frame["attrs"]["cause"] == cause]
    return [(frame.get("step"), frame["attrs"]["layers"]) for frame in frames]


@pytest.mark.parametrize(("compute", "healthy"), [(never, 0), (detached, APART), (cleared, APART)])
def test_an_optimizer_that_gets_no_gradient(run: Recording, compute: Step, healthy: int) -> None:
    """Once, from the first step on or later, with its layers, within some hundred steps; the gauge of the alert counts them."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(healthy + (LASTING_STEPS if healthy else APART) + 10):
        (sound if number < healthy else compute)(model, optimizer)
        optimizer.step()
    assert without(run) == [(healthy + 1, NET)]
    assert run.values()[catalog.GRAD_UNMOVED_LAYERS.name,] == 2.0


def test_parameters_of_no_model_are_no_more_than_there_are(run: Recording) -> None:
    """The model was replaced after the optimizer was made: its parameters alone are left."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model = copy.deepcopy(model)
    for _ in range(APART + 10):
        sound(model, optimizer)
        optimizer.step()
    assert without(run) == [(1, [f"parameter{number}" for number in range(4)])]
    (said,) = run.frames(catalog.EVENT_UNMOVED_LAYERS.name)
    assert said["attrs"]["layers_affected"] == said["attrs"]["layers_total"] == 4


def test_gradients_that_come_again_take_it_back(run: Recording) -> None:
    """After a pause that nothing announced, by an event of the same cause about no layer."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    ill = range(APART, 2 * APART + LASTING_STEPS)
    for number in range(ill.stop + APART):
        (detached if number in ill else sound)(model, optimizer)
        optimizer.step()
        if number == ill.stop - 1:
            assert without(run) == [(APART + 1, NET)]
    (_, (step, layers)) = without(run)
    assert not layers
    assert step is not None
    assert ill.stop < step < ill.stop + APART
    assert run.values()[catalog.GRAD_UNMOVED_LAYERS.name,] == 0.0


def test_the_optimizer_of_the_next_model_is_looked_at_as_closely_as_the_first_one(flight_dir: Path) -> None:
    """A fast training is measured every hundredth step by then; the next model's steps are 1 ms, and there are 100 of them."""
    with contextmanager(recording)(flight_dir, grad_interval="auto") as run:
        model = net()
        for stepped in (model, net()):
            optimizer = torch.optim.Adam(stepped.parameters())
            for _ in range(100):
                sound(model, optimizer)
                optimizer.step()
        ((since, layers),) = without(run)
        assert (since, len(layers)) == (101, 2)


@pytest.mark.parametrize("interval", [1, 16])
def test_an_optimizer_that_steps_in_each_of_many_micro_batches(flight_dir: Path, interval: int) -> None:
    """Only every fortieth has a gradient, and no look may fall on one."""
    for run in recording(flight_dir, grad_interval=interval):
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        for number in range(3 * LASTING_STEPS):
            (never if number % 40 else sound)(model, optimizer)
            optimizer.step()
        assert without(run) == []


def train_all(optimizers: list[Any], compute: Callable[[int], torch.Tensor]) -> None:
    """Train with several optimizers that step together; a loss without a graph has no backward pass."""
    for number in range(LASTING_STEPS + 2 * APART):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = compute(number)
        if loss.requires_grad:
            backward(loss)
        for optimizer in optimizers:
            optimizer.step()


def players(turns: int) -> None:
    """Both step in each iteration, with the gradients of one of them, for many steps in a row."""
    first, second = net(), net()
    both = nn.Sequential(first, nn.Linear(1, 8), second)
    train_all(
        [torch.optim.Adam(first.parameters()), torch.optim.Adam(second.parameters())],
        lambda number: (both, first, second)[1 + number // turns % 2 if number else 0](torch.randn(4, 8)).mean(),
    )


def frozen_at_the_end() -> None:
    """The optimizer goes on stepping, for the sake of a scheduler."""
    model = net()

    def compute(number: int) -> torch.Tensor:
        model.requires_grad_(requires_grad=number < APART)
        return model(torch.randn(4, 8)).square().mean()  # type: ignore[no-any-return]

    train_all([torch.optim.Adam(model.parameters())], compute)


class Evolution(torch.optim.Optimizer):
    """Needs no gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move at random, by ``.data``, which torch does not count as a change."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(group["lr"] * torch.randn_like(parameter))


def evolution() -> None:
    """It changes its parameters all the same."""
    model = net()
    train_all([Evolution(model.parameters())], lambda _: model(torch.randn(4, 8)).mean().detach())


def delayed_actor() -> None:
    """TD3: the actor steps in every second step only, and its gradient reaches the critic, too."""
    actor, critic = nn.Linear(8, 4), nn.Linear(12, 1)
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.Adam(actor.parameters())
    for number in range(LASTING_STEPS + APART):
        x = torch.randn(4, 8)
        first.zero_grad()
        backward(critic(torch.cat([x, torch.randn(4, 4)], 1)).square().mean())
        first.step()
        if number % 2:
            second.zero_grad()
            backward(-critic(torch.cat([x, actor(x)], 1)).mean())
            second.step()


def experts(chosen: Callable[[int], int], kind: Any = torch.optim.Adam, *, fused: bool = False) -> object:
    """Of four one is chosen in each step. A fused optimizer raises no version of what it steps, and SGD keeps no state."""
    some, head = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1)
    optimizer = kind([*some.parameters(), *head.parameters()], lr=0.001, fused=fused)
    train_all([optimizer], lambda number: head(some[chosen(number)](torch.randn(4, 8))).square().mean())
    return some, head, optimizer  # alive, or else nothing of it has a name


AT_TIMES: dict[str, Callable[[], object]] = {
    "players in long turns": lambda: players(APART + 20),
    "a delayed actor": delayed_actor,
    "frozen at the end": frozen_at_the_end,
    "evolution": evolution,
    "experts": lambda: experts(lambda number: number % 4),
    "experts that are chosen seldom": lambda: experts(lambda number: 3 if number % 15 else number // 15 % 3),
    "experts of a fused optimizer without a state": lambda: experts(
        lambda number: 3 if number % 15 else number // 15 % 3, torch.optim.SGD, fused=True
    ),
}


@pytest.mark.parametrize("name", AT_TIMES)
def test_what_gets_no_gradient_for_a_while_or_on_purpose(run: Recording, name: str) -> None:
    """No layer of it is said to learn nothing, nor to be unused."""
    trained = AT_TIMES[name]()
    run.look()
    del trained
    assert run.attributes(catalog.EVENT_UNMOVED_LAYERS.name) == []


def test_layers_that_never_had_a_gradient_are_information(run: Recording) -> None:
    """Those before a ``detach`` are named, for they may be unused on purpose; nobody is alerted."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train_all([optimizer], lambda _: model[2](model[1](model[0](torch.randn(4, 8))).detach()).square().mean())
    assert without(run) == []
    ((_, layers),) = without(run, "unused")
    assert layers == ["0"]
    (attributes,) = run.attributes(catalog.EVENT_UNMOVED_LAYERS.name)
    assert catalog.event_severity(catalog.EVENT_UNMOVED_LAYERS.name, attributes) is catalog.Severity.INFO
    assert run.values()[catalog.GRAD_UNMOVED_LAYERS.name,] == 0.0
