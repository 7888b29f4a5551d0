"""What was not finite is traced, too, where the script itself sees it first, and ends by an exception or a status."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import torchobs
from tests.diagnosis.observing import Observed, read
from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

AT = 7


class Distance(nn.Module):
    """Its derivative is infinite where the distance is zero."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Any two tensors of one shape."""
        return torch.sqrt((x - y).square().sum(1))


class Model(nn.Module):
    """A linear layer, a logarithm in the forward pass, and a distance."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.distance, self.outer = nn.Linear(4, 4), Distance(), nn.Linear(5, 1)
        self.offset = 1.0
        self.alike = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of four."""
        inner = self.inner(x)
        logs = torch.log(inner.square() * self.offset + self.offset)
        far = self.distance(inner, inner if self.alike else inner + 1.0)
        return torch.as_tensor(self.outer(torch.cat([logs, far[:, None]], 1)))


def end_of(train: Callable[[Model, torch.optim.Optimizer, int], object], directory: Path, **settings: object) -> Observed:
    """Train until it ends by itself; return what is said of it."""
    torch.manual_seed(0)
    # gradients of the steps in question are not measured, as in a fast training
    settings = {"log_level": "CRITICAL", **settings}
    with suppress(BaseException), torchobs.init(flight_dir=directory, grad_interval=100, **settings):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = None  # of the last step, as loops have it
        for number in range(1, AT + 5):
            loss = train(model, optimizer, number)
        del loss
    return read(directory)


def checked(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The loss is looked at before its backward pass."""
    model.offset = 0.0 if number == AT else 1.0
    loss = model(torch.randn(8, 4)).mean()
    if not torch.isfinite(loss):
        message = "loss"
        raise ValueError(message)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def left(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The same, and the process is left with a status."""
    model.offset = 0.0 if number == AT else 1.0
    loss = model(torch.randn(8, 4)).mean()
    if not torch.isfinite(loss):
        sys.exit(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def spoiled(model: Model, optimizer: torch.optim.Optimizer, number: int) -> object:
    """Weights that a step has spoiled are refused by the next forward pass."""
    if not torch.isfinite(model.inner.weight).all():
        message = "weights"
        raise ValueError(message)
    model.alike = number == AT
    loss = model(torch.randn(8, 4)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def refused(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Clipping refuses the gradients."""
    model.alike = number == AT
    loss = model(torch.randn(8, 4)).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()


def overwritten(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One weight is not finite since something between two steps."""
    loss = model(torch.randn(8, 4)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number == AT:
        model.inner.weight.data[1, 2] = float("inf")
        message = "later"
        raise ValueError(message)


@pytest.mark.parametrize(
    ("train", "wanted"),
    [
        (checked, {"origin": "operator", "operator": "log", "module": "Model"}),
        (left, {"origin": "operator", "operator": "log", "module": "Model"}),
        (spoiled, {"origin": "backward", "operator": "sqrt", "module": "distance"}),
        (refused, {"origin": "backward", "operator": "sqrt", "module": "distance"}),
        (overwritten, {"origin": "parameter", "parameter": "inner.weight"}),
    ],
)
def test_the_culprit_is_named_where_the_script_ends(
    train: Callable[[Model, torch.optim.Optimizer, int], object], wanted: dict[str, str], tmp_path: Path
) -> None:
    """By the values that are still there: the loss with its graph, the weights, the gradients."""
    observed = end_of(train, tmp_path)
    (told,) = observed.events(catalog.EVENT_NONFINITE_ORIGIN)
    assert {name: told.attributes.get(name) for name in wanted} == wanted
    assert told.step in {AT, AT + 1}
    assert "nonfinite_origin" in observed.kinds()


def bug(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """An exception of another kind, with values around that are not finite and do no harm."""
    mask = torch.full((4,), float("-inf"))
    worst = model(torch.randn(8, 4)).detach().max() * float("inf")
    loss = model(torch.randn(8, 4)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number == AT:
        raise KeyError(mask, worst)


def overflowing(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """An exception right after gradients that a loss scale has made infinite, which its scaler would skip."""
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    loss = model(torch.randn(8, 4)).square().mean() * 10
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if number == AT:
        raise KeyError(number)
    scaler.step(optimizer)
    scaler.update()


def interrupted(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Ctrl-C is nobody's fault."""
    model.offset = 0.0 if number == AT else 1.0
    loss = model(torch.randn(8, 4)).mean()
    if number == AT:
        raise KeyboardInterrupt
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("train", [bug, overflowing, interrupted])
def test_other_ends_are_not_blamed_on_a_value(
    train: Callable[[Model, torch.optim.Optimizer, int], object], tmp_path: Path
) -> None:
    """Infinities are ordinary in masks, maxima and scaled gradients."""
    assert end_of(train, tmp_path).events(catalog.EVENT_NONFINITE_ORIGIN) == []


def last_gradient(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The last backward pass gives NaN, whatever becomes of it; the loss is finite, and nobody holds it."""
    model.alike = number == AT
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    if number == AT:
        raise SystemExit
    optimizer.step()


def last_step(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The same, and the optimizer still steps."""
    model.alike = number == AT
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    if number == AT:
        raise KeyError(number)


@pytest.mark.parametrize("train", [last_gradient, last_step])
def test_a_gradient_of_the_last_backward_is_of_its_step(
    train: Callable[[Model, torch.optim.Optimizer, int], object], tmp_path: Path
) -> None:
    """Though it was not measured, and its record perhaps never written: when the training ends it is still there."""
    observed = end_of(train, tmp_path)
    (told,) = observed.events(catalog.EVENT_NONFINITE_GRADIENT)
    assert (told.step, told.attributes["kinds"], told.attributes["layers"]) == (AT, ["nan"], ["inner"])
    assert "nonfinite_gradient" in observed.kinds()


def last_loss(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The loss of the last backward pass is NaN, and no step ends after it."""
    model.offset = 0.0 if number == AT else 1.0
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    if number == AT:
        raise KeyboardInterrupt
    optimizer.step()


@pytest.mark.parametrize(("train", "told"), [(last_loss, "nonfinite loss"), (last_gradient, "nonfinite gradient")])
def test_the_log_has_a_line_of_a_step_that_does_not_end(
    train: Callable[[Model, torch.optim.Optimizer, int], object], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One, for whoever reads the job's log alone."""
    end_of(train, tmp_path, log_level="WARNING")
    assert [one.getMessage() for one in caplog.records if "nonfinite" in one.getMessage()] == [f"torchobs: {told} in step {AT}"]


def skipping(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A script that leaves such steps out itself."""
    model.alike = number == AT
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    if all(one.grad is None or bool(torch.isfinite(one.grad).all()) for one in model.parameters()):
        optimizer.step()


@pytest.mark.parametrize("train", [skipping, overflowing, bug])
def test_no_gradient_is_told_that_the_end_does_not_leave(
    train: Callable[[Model, torch.optim.Optimizer, int], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of an earlier step are gone, those of a scaled loss overflow as they should."""
    observed = end_of(train, tmp_path, log_level="WARNING")
    assert not observed.events(catalog.EVENT_NONFINITE_GRADIENT)
    assert not [one for one in caplog.records if "nonfinite" in one.getMessage()]
