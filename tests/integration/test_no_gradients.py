"""An optimizer without gradients is told; parts that are unused now and then, frozen or trained by other means are not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training import Recording, recording
from torchobs import catalog
from torchobs.probes.gradients.no_gradients import APART
from torchobs.probes.gradients.unreached import _experts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("seeded")

STEPS = 3 * APART


def told(
    run: Recording, kinds: tuple[str, ...] = ("no_gradients", "gradients_stopped", "gradients_cleared")
) -> list[tuple[str, int | None, list[str]]]:
    """Optimizers without any gradient: class, step, parameters."""
    run.look()
    frames = [frame for frame in run.frames(catalog.EVENT_LOOP_MISTAKE.name) if frame["attrs"]["kind"] in kinds]
    return [(frame["attrs"]["optimizer"], frame.get("step"), frame["attrs"]["parameters"]) for frame in frames]


def unreached(run: Recording) -> list[list[str]]:
    """Single parameters that never had a gradient."""
    run.look()
    return [frame["attrs"]["parameters"] for frame in run.frames(catalog.EVENT_NO_GRADIENT.name)]


def net() -> nn.Sequential:
    """A small model."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


ALL = ["0.weight", "0.bias", "2.weight", "2.bias"]


def backward(loss: torch.Tensor) -> None:
    """As ``loss.backward()`` does: looked up at each call."""
    torch.autograd.backward(loss)


def of_item(model: nn.Module) -> None:
    """The loss as a number, and a tensor of that."""
    backward(torch.tensor(model(torch.randn(4, 8)).square().mean().item(), requires_grad=True))


def detached(model: nn.Module) -> None:
    """A loss that is detached, and made to require a gradient because torch asked for it."""
    backward(model(torch.randn(4, 8)).square().mean().detach().requires_grad_())


def without_grad(model: nn.Module) -> None:
    """The model under ``no_grad``."""
    with torch.no_grad():
        made = model(torch.randn(4, 8))
    backward(made.requires_grad_().square().mean())


def never(model: nn.Module) -> None:
    """No backward pass."""
    model(torch.randn(4, 8)).square().mean()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("compute", [of_item, detached, without_grad, never], ids=lambda compute: compute.__name__)
def test_a_loss_that_is_cut_off(run: Recording, compute: Callable[[nn.Module], None], kind: Any) -> None:
    """Once, with the parameters, within some tens of steps."""
    model = net()
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        compute(model)
        optimizer.step()
    assert told(run) == [(kind.__name__, APART + 1, ALL)]


@pytest.mark.parametrize("clips", [True, False])
def test_an_optimizer_of_another_model(run: Recording, clips: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """It was made before the model was copied; the copy gets the gradients."""
    first = net()
    optimizer = torch.optim.Adam(first.parameters())
    model = copy.deepcopy(first)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model(torch.randn(4, 8)).square().mean())
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert told(run) == [("Adam", APART + 1, ALL)]


def train(optimizers: list[Any], compute: Callable[[int], torch.Tensor]) -> None:
    """Train with several optimizers that step together."""
    for number in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(compute(number))
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("compute", [of_item, detached, without_grad], ids=lambda compute: compute.__name__)
def test_a_loss_that_is_cut_off_in_the_middle_of_a_training(run: Recording, compute: Callable[[nn.Module], None]) -> None:
    """With the step since which there is no gradient."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(STEPS):
        optimizer.zero_grad()
        if number < APART:
            backward(model(torch.randn(4, 8)).square().mean())
        else:
            compute(model)
        optimizer.step()
    assert told(run, ("gradients_stopped",)) == told(run) == [("Adam", APART + 1, ALL)]


@pytest.mark.parametrize("healthy", [0, APART])
def test_gradients_that_are_gone_before_the_step(run: Recording, caplog: pytest.LogCaptureFixture, healthy: int) -> None:
    """zero_grad() stands between backward() and step(), from the first step on or later."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(STEPS):
        optimizer.zero_grad()
        backward(model(torch.randn(4, 8)).square().mean())
        if number >= healthy:
            optimizer.zero_grad()
        optimizer.step()
    assert told(run, ("gradients_cleared",)) == told(run) == [("Adam", APART + 1, ALL)]
    since = f" since step {APART + 1}" if healthy else ""
    verb = "have been" if since else "are"
    assert f"gradients {verb} gone before each step of the optimizer (Adam){since}: is" in caplog.text


class WithoutGradients(torch.autograd.Function):
    """Gives no gradient to what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        del ctx
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Return none."""
        del ctx
        return None, None


def test_gradients_that_no_function_gives_are_not_called_cleared(run: Recording) -> None:
    """The hooks of a parameter's node run even where a backward function returns None for it."""
    layer = nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())
    train([optimizer], lambda _: WithoutGradients.apply(torch.randn(4, 8), layer.weight).square().mean())  # type: ignore[no-untyped-call]
    run.look()
    kinds = [frame["attrs"]["kind"] for frame in run.frames(catalog.EVENT_LOOP_MISTAKE.name)]
    assert kinds == ["no_gradients"]


def test_parameters_are_let_go_of_with_their_optimizer(run: Recording) -> None:
    """Also if it had no gradient at the last look, and got some later: the next fold needs the memory."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.step()
    backward(model(torch.randn(4, 8)).square().mean())
    parameters = [weakref.ref(one) for one in model.parameters()]
    del model, optimizer
    gc.collect()
    run.look()
    assert [one() for one in parameters] == [None] * len(parameters)


def batches(count: int) -> DataLoader[Any]:
    """Of one sample each; each is fetched for a step."""
    loader: DataLoader[Any] = DataLoader(list(torch.randn(count, 8)))  # type: ignore[arg-type]
    return loader


@pytest.mark.parametrize("interval", [1, 16])
def test_an_optimizer_that_steps_in_each_of_many_micro_batches(flight_dir: Path, interval: int) -> None:
    """Only every fortieth has a gradient: more apart than it is waited for, and no look may fall on one."""
    for run in recording(flight_dir, grad_interval=interval):
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        for number, batch in enumerate(batches(6 * APART)):
            optimizer.zero_grad()
            if not number % (APART + 7):
                backward(model(batch).square().mean())
            optimizer.step()
        assert told(run) == []


def test_gradients_that_come_again_are_told(run: Recording) -> None:
    """After a pause that nothing announced, by an event of the same kind about no parameter."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for number, batch in enumerate(batches(5 * APART)):
        optimizer.zero_grad()
        if not APART <= number < 3 * APART:
            backward(model(batch).square().mean())
        optimizer.step()
        if number == 3 * APART - 1:
            assert told(run) == [("Adam", APART + 1, ALL)]
    (_, (_, step, parameters)) = told(run)
    assert not parameters
    assert step is not None
    assert 3 * APART < step < 4 * APART


@pytest.mark.parametrize("turns", [1, APART + 20])
def test_players_that_train_in_turn(run: Recording, turns: int) -> None:
    """Both step in each iteration, with the gradients of one of them, for many steps in a row."""
    first, second = net(), net()
    optimizers = [torch.optim.Adam(first.parameters()), torch.optim.Adam(second.parameters())]
    both = nn.Sequential(first, nn.Linear(1, 8), second)
    train(optimizers, lambda number: (both, first, second)[1 + number // turns % 2 if number else 0](torch.randn(4, 8)).mean())
    assert told(run) == []


def test_a_training_that_ends_with_frozen_weights(run: Recording) -> None:
    """Its optimizer goes on stepping, for the sake of a scheduler."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(STEPS):
        optimizer.zero_grad()
        model.requires_grad_(requires_grad=number < APART)
        loss = model(torch.randn(4, 8)).square().mean()
        if loss.requires_grad:
            backward(loss)
        optimizer.step()
    assert told(run) == []


def test_a_frozen_part_that_waits_for_its_thaw(run: Recording) -> None:
    """Its optimizer steps from the beginning."""
    body, head = net(), nn.Linear(1, 1)
    body.requires_grad_(requires_grad=False)
    optimizers = [torch.optim.Adam(body.parameters()), torch.optim.Adam(head.parameters())]
    train(optimizers, lambda _: head(body(torch.randn(4, 8))).square().mean())
    assert told(run) == []
    assert unreached(run) == []


def test_a_dummy_for_a_scheduler(run: Recording) -> None:
    """An optimizer of a tensor that is nobody's."""
    model, dummy = net(), torch.zeros(1, requires_grad=True)
    optimizers = [torch.optim.Adam(model.parameters()), torch.optim.SGD([dummy], lr=0.1)]
    train(optimizers, lambda _: model(torch.randn(4, 8)).square().mean())
    assert told(run) == []


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


def test_an_optimizer_that_needs_no_gradients(run: Recording) -> None:
    """It changes its parameters all the same."""
    model = net()
    optimizer = Evolution(model.parameters())
    for _ in range(STEPS):
        model(torch.randn(4, 8))
        optimizer.step()
    assert told(run) == []


def test_a_delayed_actor(run: Recording) -> None:
    """TD3: the actor steps in every second step only, and its gradient reaches the critic too."""
    actor, critic = nn.Linear(8, 4), nn.Linear(12, 1)
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.Adam(actor.parameters())
    for number in range(STEPS):
        x = torch.randn(4, 8)
        first.zero_grad()
        backward(critic(torch.cat([x, torch.randn(4, 4)], 1)).square().mean())
        first.step()
        if number % 2:
            second.zero_grad()
            backward(-critic(torch.cat([x, actor(x)], 1)).mean())
            second.step()
    assert told(run) == []
    assert unreached(run) == []


def test_closures_that_do_the_backward_pass(run: Recording) -> None:
    """Their gradients are seen within the step."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        backward(loss)
        return loss  # type: ignore[no-any-return]

    for _ in range(STEPS):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert told(run) == []


def test_layers_before_a_detach(run: Recording) -> None:
    """As information, by name; those behind it train."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train([optimizer], lambda _: model[2](model[1](model[0](torch.randn(4, 8))).detach()).square().mean())
    assert told(run) == []
    assert unreached(run) == [["0.weight", "0.bias"]]


@pytest.mark.parametrize("chosen", [lambda number: number % 4, lambda number: 0 if number % 50 else 3])
def test_experts_that_are_chosen_now_and_then(run: Recording, chosen: Callable[[int], int]) -> None:
    """Some of them seldom."""
    experts, head = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*experts.parameters(), *head.parameters()])
    train([optimizer], lambda number: head(experts[chosen(number)](torch.randn(4, 8))).square().mean())
    assert told(run) == []
    assert unreached(run) == []


def test_peers_are_known_by_their_names() -> None:
    """Of the same name but for the last number, the smaller one trained."""
    trained = ["layers.0.experts.1.up.weight", "layers.3.norm.weight", "head.weight"]
    without = [
        "layers.0.experts.7.up.weight", "layers.0.experts.0.up.weight", "layers.0.norm.weight", "pooler.weight", "2.weight",
    ]  # fmt: skip
    assert _experts(without, trained) == {"layers.0.experts.7.up.weight"}
    assert _experts(["2.weight"], ["0.weight"]) == {"2.weight"}
