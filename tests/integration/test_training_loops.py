"""Loops of well-known trainings, in our own words: what is one step of each, and which loss it has."""

# mypy: disable-error-code="no-untyped-call"
# Tensor.backward has no annotations

from __future__ import annotations

import pytest
import torch

from tests.training import Recording, loss_of, mlp, norm_of


class PartitionedOptimizer:
    """As DeepSpeed's ZeRO: the optimizer is given one parameter group at a time, and steps once for each."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        for group in self.groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
        self.optimizer.param_groups = self.groups


@pytest.mark.parametrize("groups", [2, 3])
def test_an_optimizer_that_steps_for_each_parameter_group_makes_one_step(run: Recording, groups: int) -> None:
    """No backward comes between: the loss is one backward's, the norm all groups'."""
    model, losses, norms = mlp(), list[float](), list[float]()
    parts = [list(model.parameters())[index::groups] for index in range(groups)]
    zero = PartitionedOptimizer(torch.optim.Adam([{"params": part, "lr": 1e-3} for part in parts]))
    for index in range(10):
        model.zero_grad()
        loss = loss_of(model, index)
        loss.backward()
        losses.append(loss.item())
        norms.append(norm_of(model))
        zero.step()
    steps = run.steps()
    assert [step.loss for step in steps] == losses
    assert [step.losses for step in steps] == [1] * 10
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-4)


def test_without_any_backward_each_step_is_one(run: Recording) -> None:
    """Evolution strategies: an optimizer that is handed its gradients."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert len(run.steps()) == 20


def test_an_actor_that_is_updated_twice_has_a_step_of_its_own(run: Recording) -> None:
    """Soft actor-critic: every other iteration actor and temperature are updated twice. Each update of either player counts."""
    critic, actor, temperature = mlp(0), mlp(1), mlp(2)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, actor, temperature)]
    for index in range(98):
        update(critic, optimizers[0], index)
        if index % 2:
            for _ in range(2):
                update(actor, optimizers[1], index)
                update(temperature, optimizers[2], index)
    steps = run.steps()
    assert sum(step.losses for step in steps) == 98 + 4 * 49
    assert [step.losses for step in steps[4:]] == [1, 1, 2, 2] * 48


def test_the_next_model_is_no_delayed_actor(run: Recording) -> None:
    """Two trainings behind each other, the first kept alive: each step of each is one."""
    kept = []
    for seed in range(3):
        model = mlp(seed)
        optimizer = torch.optim.Adam(model.parameters())
        for index in range(20):
            update(model, optimizer, index)
        kept.append(optimizer)
    steps = run.steps()
    assert len(steps) == 60
    assert {step.losses for step in steps} == {1}


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    """One plain update; return the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, seed)
    loss.backward()
    optimizer.step()
    return loss.item()


class SharpnessAware:
    """Climbs to the worst point nearby, and goes down from where it was by the gradient there."""

    def __init__(self, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.parameters, self.optimizer, self.moved = parameters, optimizer, list[torch.Tensor]()

    @torch.no_grad()
    def shift(self, sign: int) -> None:
        for parameter, moved in zip(self.parameters, self.moved, strict=True):
            parameter.add_(moved, alpha=sign)

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack([parameter.grad.norm() for parameter in self.parameters if parameter.grad is not None]).norm()
        self.moved = [0.05 / norm * (torch.zeros_like(p) if p.grad is None else p.grad) for p in self.parameters]
        self.shift(1)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        self.shift(-1)
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_sharpness_aware_minimisation_is_one_step_of_two_passes(run: Recording) -> None:
    """With the parameters moved in between: both losses are summed, the norm is that of the gradients which it goes down by."""
    model, losses, norms = mlp(), list[float](), list[float]()
    sharp = SharpnessAware(list(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for index in range(32):
        loss = loss_of(model, index)
        loss.backward()
        sharp.climb()
        worst = loss_of(model, index)
        worst.backward()
        losses.append(loss.item() + worst.item())
        norms.append(norm_of(model))
        sharp.descend()
    steps = run.steps()
    assert [step.loss for step in steps] == pytest.approx(losses)
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-4)
    assert {(step.losses, step.learning_rate) for step in steps} == {(2, 0.05)}


def test_an_accumulation_and_an_adversary_add_up_as_before(run: Recording) -> None:
    """Parameters that stay as they are between two backward passes: all losses are the step's."""
    model, losses = mlp(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index in range(24):
        total = 0.0
        for micro in range(4):
            if index > 12:
                model.zero_grad()
            loss = loss_of(model, micro)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert [step.loss for step in run.steps()] == losses


ALL, FIRST, LAST = range(12), range(7), range(5, 12)


@pytest.mark.parametrize(
    "passes",
    [
        [ALL, ALL, ALL, FIRST],
        [ALL, ALL, ALL, LAST],
        [ALL, ALL, ALL, FIRST, ALL, ALL],
        [ALL, ALL, ALL, LAST, LAST, LAST, ALL],
        [ALL, ALL, ALL, FIRST, FIRST, LAST, ALL, FIRST],
        [ALL, ALL, ALL, range(6), range(6, 12), ALL],
    ],
)
def test_of_optimizers_in_backward_some_may_be_left_out(run: Recording, passes: list[range]) -> None:
    """Layers frozen or unused in a step: it has its own loss, and ends before the next backward."""
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in ALL)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=1e-3) for parameter in model.parameters()}

    def update(parameter: torch.nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    losses = []
    for index, layers in enumerate(passes):
        values = torch.full((2, 4), 0.1 * (index + 1))
        for layer in layers:
            values = torch.tanh(model[layer](values))
        loss = values.square().mean() + index
        loss.backward()
        losses.append(loss.item())
    steps = run.steps()
    assert [step.losses for step in steps] == [1] * len(passes)
    assert [step.loss for step in steps] == pytest.approx(losses)
