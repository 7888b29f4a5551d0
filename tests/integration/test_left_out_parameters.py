"""Parameters that get gradients and are in no optimizer that steps are told; those that are trained by other means are not."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.training import Recording
from torchobs import catalog
from torchobs.detect.learning import LASTING_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("seeded")


def backward(model: nn.Module) -> None:
    """One pass over a batch."""
    torch.autograd.backward(model(torch.randn(8, 8)).square().mean())


class Heads(nn.Module):
    """A body and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both heads."""
        found: torch.Tensor = self.first(self.body(x)) + self.second(self.body(x))
        return found


def left_out(
    run: Recording,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    each: Callable[[], object],
    count: int = 5 * LASTING_STEPS,
) -> list[Any]:
    """Train with looks; what is told."""
    for number in range(count):
        model.zero_grad()
        backward(model)
        optimizer.step()
        each()
        if number % (LASTING_STEPS // 2) == 1:
            run.look()
    return [frame["attrs"]["parameters"] for frame in run.frames(catalog.EVENT_LEFT_OUT_PARAMETERS.name)]


def test_a_head_that_no_optimizer_has(run: Recording) -> None:
    """Told once, by name."""
    model = Heads()
    optimizer = torch.optim.SGD([*model.body.parameters(), *model.first.parameters()], lr=1e-3)
    assert left_out(run, model, optimizer, lambda: None) == [["second.weight", "second.bias"]]


def test_what_is_trained_by_other_means_or_later(run: Recording) -> None:
    """Stepped by hand, frozen, or in an optimizer that has not stepped yet."""
    model = Heads()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=1e-3)
    later = torch.optim.SGD(model.first.parameters(), lr=1e-3)

    def step() -> None:
        for one in model.second.parameters():
            assert one.grad is not None
            one.data -= 1e-3 * one.grad

    assert left_out(run, model, optimizer, step) == []
    assert later.param_groups


def test_an_optimizer_that_never_steps_beside_one_that_does(run: Recording) -> None:
    """The step of the second one was forgotten: told when hundreds of steps have gone by, not as soon."""
    model = Heads()
    optimizer = torch.optim.SGD([*model.body.parameters(), *model.first.parameters()], lr=1e-3)
    forgotten = torch.optim.AdamW(model.second.parameters(), lr=1e-3)
    assert left_out(run, model, optimizer, lambda: None) == []
    assert left_out(run, model, optimizer, lambda: None, 8 * LASTING_STEPS) == [["second.weight", "second.bias"]]
    (frame,) = run.frames(catalog.EVENT_LEFT_OUT_PARAMETERS.name)
    assert frame["attrs"]["optimizer"] == type(forgotten).__name__


def test_an_optimizer_that_begins_to_step_late(run: Recording) -> None:
    """What was told of it is taken back, one part after the other."""
    model = Heads()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=1e-3)
    late = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (model.first, model.second)]
    left_out(run, model, optimizer, lambda: None, 13 * LASTING_STEPS)
    left_out(run, model, optimizer, late[0].step, LASTING_STEPS)
    told = left_out(run, model, optimizer, lambda: [one.step() for one in late], LASTING_STEPS)
    assert told == [["first.weight", "first.bias", "second.weight", "second.bias"], ["second.weight", "second.bias"], []]


def test_a_teacher_gets_gradients_for_nothing(run: Recording) -> None:
    """Without ``no_grad``, in evaluation mode."""
    model, teacher = nn.Linear(8, 1), nn.Linear(8, 1).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def distil() -> None:
        torch.autograd.backward((teacher(torch.randn(8, 8)) - model(torch.randn(8, 8))).square().mean())

    assert left_out(run, model, optimizer, distil) == []


_GRADIENT: Any = torch.Tensor.grad


class Watched(nn.Parameter):
    """Notes the threads that ask for its gradient."""

    readers: set[int] = set()  # noqa: RUF012  # of all of them

    @property
    def grad(self) -> Any:
        """The gradient."""
        self.readers.add(threading.get_ident())
        return _GRADIENT.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRADIENT.__set__(self, value)


def test_no_other_thread_reads_a_gradient(run: Recording) -> None:
    """A backward pass replaces gradients without holding the GIL: whoever reads one meanwhile may crash the process."""
    Watched.readers.clear()
    model = Heads()
    for module in (model.body, model.first, model.second):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, Watched(parameter.detach()))
    optimizer = torch.optim.SGD([*model.body.parameters(), *model.first.parameters()], lr=1e-3)
    for number in range(5 * LASTING_STEPS):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        if number % (LASTING_STEPS // 4) == 1:
            other = threading.Thread(target=run.look)
            other.start()
            other.join()
    assert run.frames(catalog.EVENT_LEFT_OUT_PARAMETERS.name), "it was looked at"
    assert Watched.readers == {threading.get_ident()}
