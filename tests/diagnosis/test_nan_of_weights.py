"""Weights that are not finite, and what the script itself sees first: only what was seen is blamed, and dated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchobs
from tests.diagnosis.observing import Look, Observed, observe, read
from torchobs import catalog
from torchobs.diagnosis.health import diagnose
from torchobs.ranks.runs import load

if TYPE_CHECKING:
    from pathlib import Path


AT = 7
RARELY, ALWAYS = 100, 1


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """It keeps nothing of the gradients."""
    return torch.optim.SGD(parameters, lr=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an ``eps`` that float16 can hold."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def train(kind: str, make: Callable[..., torch.optim.Optimizer], directory: Path, interval: int = RARELY) -> Observed:
    """Train in float16 with one loss that is multiplied, so that gradients do not fit and the loss itself does.

    `half`: the weights are float16; `autocast`: they are float32, and their gradients pass float16; `scaled`: as that, and a
    scaler leaves such steps out; `spoiled`: nothing overflows, and one weight is overwritten after that step.
    """
    torch.manual_seed(0)
    autocast = kind in {"autocast", "scaled"}
    with torchobs.init(flight_dir=directory, grad_interval=interval, log_level="CRITICAL"):
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
        model = model if autocast else model.half()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if kind == "scaled" else None
        for number in range(1, AT + 4):
            x, target = torch.randn(8, 16), torch.randn(8, 4)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                output = model(x if autocast else x.half())
            loss = (output.float() - target).square().mean() * (1e8 if number == AT and kind != "spoiled" else 1.0)
            if scaler is None:
                torch.autograd.backward(loss)
                optimizer.step()
            else:
                torch.autograd.backward(scaler.scale(loss))
                scaler.step(optimizer)
                scaler.update()
            if number == AT and kind == "spoiled":
                model.get_parameter("3.weight").data[1, 2] = float("inf")
    return read(directory)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("kind", ["half", "autocast"])
@pytest.mark.parametrize("interval", [RARELY, ALWAYS])
def test_an_overflow_is_told_with_its_step(kind: str, make: Any, interval: int, tmp_path: Path) -> None:
    """Of that step, measured or not: by what the next loss finds in the weights."""
    events = train(kind, make, tmp_path, interval).events(catalog.EVENT_NONFINITE_ORIGIN)
    assert [(event.attributes["origin"], event.attributes["parameter"], event.step) for event in events] == [
        ("overflow", "0.weight", AT)
    ]
    (report,), _ = load(list(tmp_path.glob("*.flight")))
    text = next(finding.long for finding in diagnose(report) if finding.kind.startswith("nonfinite_origin"))
    assert text.startswith(
        f"The NaN or infinity of step {AT} is most likely gradients that overflowed in float16, in 0.weight and 5 more"
    )
    assert "GradScaler" in text


def test_an_overflow_of_the_very_first_step_is_told(tmp_path: Path) -> None:
    """The optimizer is about to step, and none is known yet."""
    torch.manual_seed(0)
    with torchobs.init(flight_dir=tmp_path, grad_interval=ALWAYS, log_level="CRITICAL"):
        model = nn.Linear(16, 4, bias=False).half()
        optimizer = sgd(model.parameters())
        loss = model(torch.randn(8, 16).half()).float().square().mean()
        torch.autograd.backward(loss * 1e8)
        optimizer.step()
    (event,) = read(tmp_path).events(catalog.EVENT_NONFINITE_ORIGIN)
    assert (event.attributes["origin"], event.attributes["parameter"], event.step) == ("overflow", "weight", 1)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_one_spoiled_weight_is_told_as_that(make: Any, tmp_path: Path) -> None:
    """It is not what a step makes of its gradients: that is in every layer, or in what the optimizer keeps."""
    (event,) = train("spoiled", make, tmp_path).events(catalog.EVENT_NONFINITE_ORIGIN)
    assert (event.attributes["origin"], event.attributes["parameter"], event.step) == ("parameter", "3.weight", AT + 1)


@pytest.mark.parametrize("interval", [RARELY, ALWAYS])
def test_what_a_scaler_skips_is_no_fault(interval: int, tmp_path: Path) -> None:
    """Nothing is told of it."""
    assert train("scaled", sgd, tmp_path, interval).events(catalog.EVENT_NONFINITE_ORIGIN) == []


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
    (event,) = observed.events(catalog.EVENT_NONFINITE_ORIGIN)
    assert (event.attributes["origin"], event.step) == ("unknown", 2)
    text = observed.text("nonfinite_origin")
    assert text.startswith("The parameters 0.weight and ")
    assert text.endswith(" held the NaN or infinity of step 2 already; what made them so was not seen.")


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
    (event,) = observed.events(catalog.EVENT_NONFINITE_ORIGIN)
    assert (event.attributes["origin"], event.step) == ("unknown" if bias else "parameter", AT + 1)
    assert "sqrt" not in observed.text("nonfinite_origin")


Script = Callable[["Model", torch.optim.Optimizer, int], object]


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


def end_of(train: Script, directory: Path, **settings: object) -> Observed:
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


def loss_of(model: Model, number: int, *, logs: bool = False, alike: bool = False) -> torch.Tensor:
    """One of a step's batch; in the step in question it is not finite if ``logs``, and its gradient is not if ``alike``."""
    model.offset, model.alike = 0.0 if logs and number == AT else 1.0, alike and number == AT
    return torch.as_tensor(model(torch.randn(8, 4)).mean())


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor, *, steps: bool = True) -> None:
    """Go backward, and step."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    if steps:
        optimizer.step()


def checked(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The loss is looked at before its backward pass."""
    loss = loss_of(model, number, logs=True)
    if not torch.isfinite(loss):
        raise ValueError(number)
    descend(optimizer, loss)


def left(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The same, and the process is left with a status."""
    loss = loss_of(model, number, logs=True)
    if not torch.isfinite(loss):
        sys.exit(1)
    descend(optimizer, loss)


def spoiled(model: Model, optimizer: torch.optim.Optimizer, number: int) -> object:
    """Weights that a step has spoiled are refused by the next forward pass."""
    if not torch.isfinite(model.inner.weight).all():
        raise ValueError(number)
    loss = loss_of(model, number, alike=True)
    descend(optimizer, loss)
    return loss


def refused(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Clipping refuses the gradients."""
    loss = loss_of(model, number, alike=True)
    descend(optimizer, loss, steps=False)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()


def overwritten(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One weight is not finite since something between two steps."""
    descend(optimizer, loss_of(model, number))
    if number == AT:
        model.inner.weight.data[1, 2] = float("inf")
        raise ValueError(number)


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
def test_the_culprit_is_named_where_the_script_ends(train: Script, wanted: dict[str, str], tmp_path: Path) -> None:
    """By the values that are still there: the loss with its graph, the weights, the gradients."""
    observed = end_of(train, tmp_path)
    (event,) = observed.events(catalog.EVENT_NONFINITE_ORIGIN)
    assert {name: event.attributes.get(name) for name in wanted} == wanted
    assert event.step in {AT, AT + 1}
    assert "nonfinite_origin" in observed.kinds()


def bug(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """An exception of another kind, with values around that are not finite and do no harm."""
    mask = torch.full((4,), float("-inf"))
    worst = model(torch.randn(8, 4)).detach().max() * float("inf")
    loss = loss_of(model, number)
    descend(optimizer, loss)
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
    loss = loss_of(model, number, logs=True)
    if number == AT:
        raise KeyboardInterrupt
    descend(optimizer, loss)


@pytest.mark.parametrize("train", [bug, overflowing, interrupted])
def test_other_ends_are_not_blamed_on_a_value(train: Script, tmp_path: Path) -> None:
    """Infinities are ordinary in masks, maxima and scaled gradients."""
    assert end_of(train, tmp_path).events(catalog.EVENT_NONFINITE_ORIGIN) == []


def last_gradient(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The last backward pass gives NaN, whatever becomes of it; the loss is finite, and nobody holds it."""
    descend(optimizer, loss_of(model, number, alike=True), steps=False)
    if number == AT:
        raise SystemExit
    optimizer.step()


def last_step(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The same, and the optimizer still steps."""
    descend(optimizer, loss_of(model, number, alike=True))
    if number == AT:
        raise KeyError(number)


@pytest.mark.parametrize("train", [last_gradient, last_step])
def test_a_gradient_of_the_last_backward_is_of_its_step(train: Script, tmp_path: Path) -> None:
    """Though it was not measured, and its record perhaps never written: when the training ends it is still there."""
    observed = end_of(train, tmp_path)
    (event,) = observed.events(catalog.EVENT_NONFINITE_GRADIENT)
    assert (event.step, event.attributes["kinds"], event.attributes["layers"]) == (AT, ["nan"], ["inner"])
    assert "nonfinite_gradient" in observed.kinds()


def test_the_log_has_a_line_of_a_step_that_does_not_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One, for whoever reads the job's log alone."""
    end_of(last_gradient, tmp_path, log_level="WARNING")
    said = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert said == [f"torchobs: Gradients are not finite in step {AT}."]


def skipping(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A script that leaves such steps out itself."""
    descend(optimizer, loss_of(model, number, alike=True), steps=False)
    if all(parameter.grad is None or bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters()):
        optimizer.step()


@pytest.mark.parametrize("train", [skipping, overflowing, bug])
def test_no_gradient_is_told_that_the_end_does_not_leave(
    train: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of an earlier step are gone, those of a scaled loss overflow as they should."""
    observed = end_of(train, tmp_path, log_level="WARNING")
    assert not observed.events(catalog.EVENT_NONFINITE_GRADIENT)
    assert not [record for record in caplog.records if "nonfinite" in record.getMessage()]
