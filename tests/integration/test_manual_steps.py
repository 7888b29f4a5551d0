"""Trainings without an optimizer of torch's: by hand as in its tutorials, or with a framework's own class."""

from __future__ import annotations

from math import isclose
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.training import Recording, batch, loss_of, mlp, norm_of
from torchobs import catalog
from torchobs.flight.format.step_record import StepFlag

if TYPE_CHECKING:
    from collections.abc import Callable


def descend(loss: torch.Tensor) -> None:
    """The backward pass."""
    loss.backward()  # type: ignore[no-untyped-call]


def in_place(parameters: list[torch.nn.Parameter]) -> None:
    """As the tutorials do."""
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.05)
            parameter.grad = None


def by_data(parameters: list[torch.nn.Parameter]) -> None:
    """As fastai does: the parameters' own versions do not count these changes."""
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad.data, alpha=-0.05)
        parameter.grad.detach_()
        parameter.grad.zero_()


def anew(parameters: list[torch.nn.Parameter]) -> None:
    """Other memory for the parameters, and for the gradients."""
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.data = parameter.data - 0.05 * parameter.grad
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("update", [in_place, by_data, anew])
def test_each_update_is_a_step_with_its_loss_and_norm(
    run: Recording, update: Callable[[list[torch.nn.Parameter]], None]
) -> None:
    """None is lost, the first and the last included."""
    model, losses, norms = mlp(), list[float](), list[float]()
    parameters = list(model.parameters())
    for number in range(12):
        loss = loss_of(model, number)
        descend(loss)
        losses.append(loss.item())
        norms.append(norm_of(model))
        update(parameters)
    steps = run.steps()
    assert [step.step for step in steps] == list(range(1, 13))
    assert all(isclose(step.loss, loss, rel_tol=1e-6) for step, loss in zip(steps, losses, strict=True))
    measured = [(step.grad_norm, norm) for step, norm in zip(steps, norms, strict=True) if step.flags & StepFlag.GRAD_NORM]
    assert len(measured) >= 10  # not before it was clear what this is
    assert all(isclose(found, norm, rel_tol=1e-5) for found, norm in measured)


@pytest.mark.parametrize("data", [True, False])
def test_updates_that_never_clear_the_gradients(run: Recording, data: bool) -> None:  # noqa: FBT001  # of the test
    """The first three passes may be an accumulation; from then on each is a step, and the mistake is told."""
    model, losses = mlp(), list[float]()
    for number in range(20):
        loss = loss_of(model, number)
        descend(loss)
        losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            with torch.no_grad():
                (parameter.data if data else parameter).sub_(parameter.grad, alpha=0.01)
    run.look()
    steps = run.steps()
    assert len(steps) >= 17
    assert [step.loss for step in steps[1:]] == pytest.approx(losses[3:], rel=1e-6)
    assert [frame["attrs"]["kind"] for frame in run.frames(catalog.EVENT_LOOP_MISTAKE.name)] == ["gradients_kept"]


def test_backwards_whose_gradients_add_up_are_one_step(run: Recording) -> None:
    """Four micro-batches of a loader, then an update: the norm is that of all four."""
    model = mlp()
    parameters, norms = list(model.parameters()), list[float]()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(size=48)), batch_size=4)
    for number, (inputs, targets) in enumerate(loader):
        descend(mse_loss(model(inputs), targets) / 4)
        if number % 4 == 3:
            norms.append(norm_of(model))
            by_data(parameters)
    steps = run.steps()
    assert [(step.step, step.losses) for step in steps] == [(1, 4), (2, 4), (3, 4)]
    assert isclose(steps[-1].grad_norm, norms[-1], rel_tol=1e-5)
    assert steps[-1].phase_s[0] > 0.0
    assert steps[-1].phase_s[2] > 0.0


def test_an_evaluation_of_many_batches_between_two_steps(run: Recording) -> None:
    """So many that the boundaries seen have to be taken in before it ends; it is part of no step."""
    model, many = mlp(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(size=2200)))
    for number in range(8):
        descend(loss_of(model, number))
        in_place(list(model.parameters()))
        if number in {0, 5}:
            model.eval()
            with torch.no_grad():
                for inputs, _ in many:
                    model(inputs)
            model.train()
    steps = run.steps()
    assert [step.losses for step in steps] in ([1] * 8, [2, *[1] * 6])  # before the second it is not known what this is
    assert sum(step.phase_s[5] > 0.0 for step in steps) == 2


def test_plain_tensors_without_a_module(run: Recording) -> None:
    """`requires_grad=True` is all that a first lesson has; these have no dimension at all."""
    slope, offset = torch.tensor(0.0, requires_grad=True), torch.tensor(0.0, requires_grad=True)
    inputs = torch.linspace(-1, 1, 20)
    for _ in range(7):
        descend(mse_loss(slope * inputs + offset, 3 * inputs + 1))
        for value in (slope, offset):
            assert value.grad is not None
            value.data -= 0.1 * value.grad
            value.grad.zero_()
    assert len(run.steps()) == 7


def test_gradients_that_nobody_follows_are_no_steps(run: Recording) -> None:
    """Saliency: the parameters stay as they are."""
    model = mlp()
    for number in range(8):
        inputs = batch(number)[0].requires_grad_()
        model.zero_grad()
        descend(model(inputs).sum())
    assert run.steps() == []


def test_an_optimizer_of_torch_s_has_the_last_word(run: Recording) -> None:
    """What was by hand before is counted; from its first step on the steps are its own, accumulation and adversary or not."""
    model = mlp()
    for number in range(5):
        descend(loss_of(model, number))
        in_place(list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(6):
        for _ in range(2 if number else 0):
            descend(loss_of(model, number))
            model.zero_grad()
        descend(loss_of(model, number))
        optimizer.step()
    assert run.session._probe_manager is not None
    step_probe: Any = run.session._probe_manager._probes["step"]
    assert not step_probe._manual_steps.active
    assert len(run.steps()) == 5 + 6


def test_the_user_s_word_counts_more(run: Recording) -> None:
    """`torchobs.step()` says where steps end, here after two updates each."""
    import torchobs

    model = mlp()
    for number in range(8):
        descend(loss_of(model, number))
        in_place(list(model.parameters()))
        if number % 2:
            torchobs.step()
    steps = run.steps()
    assert sum(bool(step.flags & StepFlag.DIRECT) for step in steps) == 4


def test_another_model_is_said_to_be_one(run: Recording) -> None:
    """A sweep by hand: the second model's losses are not judged by the first's."""
    for _ in range(2):
        model = mlp()
        for number in range(60):
            descend(loss_of(model, number))
            in_place(list(model.parameters()))
    steps = run.steps()
    flagged = [step.step for step in steps if step.flags & StepFlag.NEW_MODEL]
    assert (flagged, len(steps)) == ([61], 120)


def test_what_clipping_has_computed_is_the_norm_of_every_step(run: Recording) -> None:
    """And the step was clipped: clipping comes after the backward, which is where such a step ends."""
    model, norms = mlp(), list[float]()
    for number in range(10):
        descend(loss_of(model, number))
        norms.append(norm_of(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 if number % 2 else 1e9)
        in_place(list(model.parameters()))
    steps = run.steps()[2:-1]  # what is behind the last backward nobody has judged yet
    assert [step.grad_norm for step in steps] == pytest.approx(norms[2:-1], rel=1e-4)
    assert [bool(step.flags & StepFlag.CLIPPED) for step in steps] == [
        norm > 0.5 and bool(number % 2) for number, norm in enumerate(norms)
    ][2:-1]


def test_no_model_is_kept_alive(run: Recording) -> None:
    """Nor its gradients."""
    import gc
    import weakref

    model = mlp()
    for number in range(4):
        descend(loss_of(model, number))
        in_place(list(model.parameters()))
    gone = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    run.look()
    gc.collect()
    assert [known() for known in gone] == [None] * 4
