"""A ``torch.autograd.Function`` of the user's is blamed for a NaN only where all that went into it was seen to be finite."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.diagnosis.observing import Look, Observed, observe
from torchobs import catalog
from torchobs.debug import trace_nan

if TYPE_CHECKING:
    from collections.abc import Callable

AT = 5


class Shift(torch.autograd.Function):
    """Keeps nothing of what it was given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A sum."""
        del ctx
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Of the weight alone."""
        del ctx
        return None, gradients[0].sum(0)


class Log(torch.autograd.Function):
    """Keeps nothing, and is none of torch's logarithms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A sum."""
        return Shift.forward(ctx, x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Of the weight alone."""
        return Shift.backward(ctx, *gradients)


class Scale(torch.autograd.Function):
    """Keeps what it was given, what it made on its way, and its result."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A product."""
        between = x * Scale.factor
        result = between * weight
        ctx.save_for_backward(x, weight, between, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Of the weight, and of what is given with a gradient."""
        _, weight, between, _ = ctx.saved_tensors
        return gradients[0] * weight if ctx.needs_input_grad[0] else None, (gradients[0] * between).sum(0)


class Mean(torch.autograd.Function):
    """Keeps what it was given; one bad sample spoils all results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A product with the batch's mean."""
        ctx.save_for_backward(x)
        return x.mean() * weight.expand(len(x), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Of the weight alone."""
        return None, gradients[0].sum(0) * ctx.saved_tensors[0].mean()


class Net(nn.Module):
    """Gives its input to a function at once, or behind a layer."""

    def __init__(self, function: Any, *, behind: bool = False) -> None:
        super().__init__()
        self.function, self.behind = function, behind
        self.weight, self.first, self.out = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of four."""
        return torch.as_tensor(self.out(self.function.apply(self.first(x) if self.behind else x, self.weight)))


def held(model: nn.Module, number: int, look: Look, step: Callable[[torch.Tensor], None]) -> None:
    """A batch that a variable of the loop holds, with a NaN."""
    x = torch.randn(8, 4)
    if number == AT:
        x[3, 1] = float("nan")
    step(model(x).square().mean())
    look.stepped()


def gone(model: nn.Module, number: int, look: Look, step: Callable[[torch.Tensor], None]) -> None:
    """A batch that nobody holds any more."""

    def loss() -> torch.Tensor:
        x = torch.randn(8, 4)
        if number == AT:
            x[3, 1] = float("nan")
        return torch.as_tensor(model(x).square().mean())

    step(loss())
    look.stepped()


def faulty(model: nn.Module, number: int, look: Look, step: Callable[[torch.Tensor], None]) -> None:
    """A batch that is finite, and labels of which some are missing."""
    x, labels = torch.randn(8, 4), torch.randn(8, 1)
    labels[2] = float("nan")
    Scale.factor = float("inf") if number == AT else 1.0
    x[1:] *= 0.0 if number == AT else 1.0  # times infinity: NaN
    made = model(x)
    step(torch.where(labels.isnan(), 0.0, made - labels.nan_to_num()).square().mean())
    look.stepped()


def changed(model: nn.Module, number: int, look: Look, step: Callable[[torch.Tensor], None]) -> None:
    """The NaN is removed after the function has been given it; torch refuses the backward pass."""
    x = torch.randn(8, 4)
    if number == AT:
        x[3, 1] = float("nan")
    loss = model(x).square().mean()
    if number == AT:
        x.nan_to_num_()
    with suppress(RuntimeError):
        step(loss)
    look.stepped()


Script = Any


def run(model: nn.Module, script: Script) -> Observed:
    """Train with the faults of a script."""

    def train(look: Look) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(loss: torch.Tensor) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()

        for number in range(1, AT + 3):
            script(model, number, look, step)
        Scale.factor = 1.0

    torch.manual_seed(0)
    return observe(train)


@pytest.mark.parametrize(
    ("function", "behind", "script", "wanted"),
    [
        (Shift, False, held, {"origin": "input", "parameter": "x", "sample": 3}),
        (Log, False, held, {"origin": "input", "parameter": "x", "sample": 3}),
        (Scale, False, held, {"origin": "input", "parameter": "x", "sample": 3}),
        (Mean, False, held, {"origin": "input", "parameter": "x", "sample": 3}),
        (Shift, False, gone, {"origin": "unknown", "operator": "shift", "module": "Net"}),
        (Scale, False, gone, {"origin": "unknown", "operator": "scale", "module": "Net"}),
        (Scale, False, faulty, {"origin": "operator", "operator": "scale", "module": "Net"}),
        (Scale, True, faulty, {"origin": "operator", "operator": "scale", "module": "Net"}),
        (Scale, False, changed, {"origin": "unknown", "operator": "scale", "module": "Net"}),
    ],
)
def test_a_function_is_blamed_for_what_it_makes_of_finite_inputs(
    function: Any, script: Script, wanted: dict[str, object], *, behind: bool
) -> None:
    """What it was given is looked for among what it has saved and in variables; else it is said that it was not seen."""
    observed = run(Net(function, behind=behind), script)
    told = observed.events(catalog.EVENT_NONFINITE_ORIGIN)[0]
    assert {name: told.attributes.get(name) for name in wanted} == wanted
    assert told.step == AT
    text = observed.text("nonfinite_origin")
    if wanted["origin"] == "unknown":
        assert f"Where the NaN or infinity of step {AT} began was not found: it passed {wanted['operator']} in Net" in text
        assert "not all inputs of this function were seen" in text
        assert "born in" not in text


def test_hooks_on_what_a_function_has_saved_are_left_alone() -> None:
    """Those of the user's may be run once only: by the backward pass."""
    calls = [0, 0]

    def unpack(value: Any) -> Any:
        calls[1] += 1
        return value

    def pack(value: Any) -> Any:
        calls[0] += 1
        return value

    def hooked(*given: Any) -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            held(*given)

    model = Net(Scale)
    assert run(model, hooked).events(catalog.EVENT_NONFINITE_ORIGIN)
    assert calls[0] == calls[1]


def test_the_tool_says_so_too() -> None:
    """``trace_nan`` has the batch, which a function that keeps nothing was given."""
    x = torch.randn(8, 4)
    x[3, 1] = float("nan")
    told = trace_nan(Net(Shift), x)
    assert told is not None
    assert (told.kind, told.parameter, told.sample) == ("input", "batch", 3)
    told = trace_nan(Net(Shift), x, partial(_of_another, x.clone()))
    assert told is not None
    assert told.kind in {"input", "unknown"}


def _of_another(x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return output.mean() + x.nan_to_num().mean()
