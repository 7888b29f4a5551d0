"""Gradients that overflow in float16 are told as that, though their step was not measured; and a spoiled weight as a weight."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchobs
from tests.diagnosis.observing import Observed, read
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


class Refused(Half):
    """The script looks at the weights and ends."""

    def step(self, number: int) -> None:
        """One step."""
        if not all(bool(each.isfinite().all()) for each in self.model.parameters()):
            message = "weights"
            raise ValueError(message)
        super().step(number)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """It keeps nothing of the gradients."""
    return torch.optim.SGD(parameters, lr=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an ``eps`` that float16 can hold."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def train(kind: type[Half], make: Callable[..., torch.optim.Optimizer], directory: Path, interval: int = RARELY) -> Observed:
    """Some steps; what is said of them."""
    torch.manual_seed(0)
    with suppress(ValueError), torchobs.init(flight_dir=directory, grad_interval=interval, log_level="CRITICAL"):
        training = kind(make)
        for number in range(1, AT + 4):
            training.step(number)
    return read(directory)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("kind", [Half, Autocast, Refused])
@pytest.mark.parametrize("interval", [RARELY, ALWAYS])
def test_an_overflow_is_told_with_its_step(kind: type[Half], make: Any, interval: int, tmp_path: Path) -> None:
    """Of that step, measured or not: by what the next loss, or an exception, finds in the weights."""
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


def test_other_types_are_not_called_an_overflow(tmp_path: Path) -> None:
    """A float32 holds 1e38: weights that are not finite are told as before."""

    class Single(Spoiled):
        autocast = True

        def step(self, number: int) -> None:
            self.optimizer.zero_grad()
            self.backward(self.model(torch.randn(8, 16)).square().mean())
            if number == AT:
                for index in (0, 3):
                    linear: Any = self.model[index]
                    linear.weight.data[1, 2] = float("nan")

    (told,) = train(Single, sgd, tmp_path).events(catalog.EVENT_NONFINITE_ORIGIN)
    assert told.attributes["origin"] in {"parameter", "unknown"}
