"""``debug.trace_nan`` sees every operator of the forward pass, and every tensor of what a model returns."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, no-any-return"

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchobs import debug

Forward = Callable[[nn.Module, torch.Tensor], Any]


class Net(nn.Module):
    """A layer, and what a function makes of it and the input."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layer, self.made_by = nn.Linear(4, 4), forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.made_by(self.layer, x)


def batch() -> torch.Tensor:
    """Six samples."""
    return torch.randn(6, 4)


def feature(x: torch.Tensor) -> torch.Tensor:
    """Something without a gradient, which is not finite."""
    return torch.log(-1 - x.square())


def written(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Write parts of memory that nobody has written to: one is not finite."""
    out = torch.empty(6, 8)
    out.view(torch.int32).fill_(0x7FC00000)  # what happens to be there: NaN
    fresh = torch.empty_like(out)
    fresh[:, :4] = layer(x)
    fresh[:, 4:] = x
    fresh[:, 4:].neg_().square_().add_(1).neg_().log_()
    return fresh


def attention(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Attend to what a mask allows: to nothing."""
    return layer(x).masked_fill(torch.ones(6, 4).bool(), float("-inf")).softmax(-1)


def noted(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Have a statistic that is not finite beside a sound result, then a fault."""
    torch.log(x * 0)
    sound = torch.where(x > 9, torch.log(x * 0), layer(x))
    return sound.float().half() * 6e4 * 6e4


FAULTS: dict[str, tuple[Forward, str, str]] = {
    "multiplied": (lambda layer, x: layer(x) * feature(x), "log", "torch.log(-1 - x"),
    "chosen": (lambda layer, x: torch.maximum(layer(x), feature(x)), "log", "torch.log(-1 - x"),
    "infinite": (lambda layer, x: layer(x) * (1 / (x * 0).abs()), "reciprocal", "1 / (x * 0)"),
    "in_place": (written, "log", "log_()"),
    "masked": (attention, "softmax", "softmax(-1)"),
    "harmless_before": (noted, "mul", "6e4"),
    "sparse": (lambda layer, x: layer(x) + feature(x).to_sparse().to_dense(), "log", "torch.log(-1 - x"),
    "constant": (lambda layer, x: layer(x) + torch.full((4,), float("nan")), "full", "torch.full"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("loss_fn", [None, functional.mse_loss])
def test_the_operator_that_made_it_is_named(name: str, loss_fn: Any) -> None:
    """Promise: whether or not it has a gradient, in whatever precision, with the user's line; the loss is not blamed."""
    torch.manual_seed(0)
    forward, operator, code = FAULTS[name]
    pair = (batch(), torch.zeros(6, 4))
    loss = None if loss_fn is None else lambda out, target: loss_fn(out.float()[:, -4:], target)
    origin = debug.trace_nan(Net(forward), pair if loss else pair[0], loss)
    assert origin is not None
    assert (origin.kind, origin.operator, origin.module) == ("operator", operator, "Net")
    file, _, number = origin.line.rpartition(":")
    assert code in Path(file).read_text().splitlines()[int(number) - 1]
    assert all(not stats.nan_count and ((stats.min or 0.0) > -1e9 or name == "masked") for stats in origin.inputs)


@dataclass
class Output:
    """What a model may return."""

    logits: torch.Tensor
    auxiliary: Any = None


def nested(layer: nn.Module, x: torch.Tensor, *, odd: bool) -> list[Any]:
    """A sound tensor in a dictionary, and one in a dataclass that may be not finite."""
    sound = layer(x)
    imaginary = torch.log(-1 - sound.square()) if odd else sound
    return [{"boxes": sound}, Output(sound, ({"masks": torch.complex(sound, imaginary)},))]


def test_every_tensor_of_an_output_is_looked_at() -> None:
    """Promise: a NaN is found at any depth of what a model returns; the same without one is healthy."""
    origin = debug.trace_nan(Net(partial(nested, odd=True)), batch())
    assert origin is not None
    assert (origin.kind, origin.operator) == ("operator", "log")
    assert debug.trace_nan(Net(partial(nested, odd=False)), batch()) is None


def test_what_was_given_is_named() -> None:
    """Promise: a sample of the batch, the target, a frozen weight, each by its name, through views and casts."""
    x, target = batch(), torch.zeros(6, 4)
    x[3, 1] = float("nan")
    cast_up: Forward = lambda layer, x: layer(x.double().view(6, 4).float())  # noqa: E731
    origin = debug.trace_nan(Net(cast_up), (x, target), functional.mse_loss)
    assert origin is not None
    assert (origin.kind, origin.parameter, origin.sample, origin.operator) == ("input", "batch[0]", 3, "addmm")
    origin = debug.trace_nan(Net(cast_up), (target, x), functional.mse_loss)
    assert origin is not None
    assert (origin.kind, origin.parameter, origin.sample) == ("input", "batch[1]", 3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.get_parameter("0.weight").requires_grad = False
    model.get_parameter("0.weight")[1, 2] = float("inf")
    origin = debug.trace_nan(model, target + 1)
    assert origin is not None
    assert (origin.kind, origin.parameter, origin.elements) == ("parameter", "0.weight", ((1, 2),))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # by a step before, which was not seen: no derivative is blamed
    origin = debug.trace_nan(model, target, loss_fn=lambda output: (output.square() + 1).sqrt().mean())
    assert origin is not None
    assert origin.kind == "parameter"


def region(layer: nn.Module, x: torch.Tensor, *, by: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A part that is computed again in the backward pass."""
    inner = checkpoint(lambda z: by(layer(z)), layer(x), use_reentrant=True)
    return cast("torch.Tensor", inner)


def test_reentrant_checkpointing_is_looked_into() -> None:
    """Promise: healthy or not, in forward or backward, it is run; afterwards checkpointing is what it was."""
    healthy = Net(partial(region, by=torch.tanh))
    assert debug.trace_nan(healthy, batch()) is None
    for by, kind, operator in (
        (lambda z: torch.log(-1 - z.square()), "operator", "log"),
        (lambda z: torch.sqrt(z * 0), "backward", "sqrt"),
    ):
        origin = debug.trace_nan(Net(partial(region, by=by)), batch())
        assert origin is not None
        assert (origin.kind, origin.operator) == (kind, operator)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        torch.autograd.grad(healthy(batch()).sum(), list(healthy.parameters()))


def test_the_sum_of_a_healthy_output_does_not_overflow() -> None:
    """Promise: what stands for a loss is computed wide enough."""
    assert debug.trace_nan(Net(lambda layer, x: (layer(x).square() + 4e4).half()), batch()) is None
    assert debug.trace_nan(Net(lambda layer, x: layer(x).square() + 2e38), batch()) is None


def test_running_statistics_are_not_read_in_training() -> None:
    """Promise: those that a step before has spoiled are no origin in train mode, where the result does not depend on them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Net(lambda layer, x: torch.log(-1 - layer(x).square())))
    cast("Any", model[1]).running_mean.fill_(float("nan"))
    origin = debug.trace_nan(model, batch())
    assert origin is not None
    assert (origin.kind, origin.operator) == ("operator", "log")
    origin = debug.trace_nan(model.eval(), batch())
    assert origin is not None
    assert (origin.kind, origin.parameter) == ("parameter", "1.running_mean")


def test_a_nan_that_attention_covers_up_is_found_by_the_gradients() -> None:
    """Promise: torch's fused attention gives zeros for a query of NaN on the CPU; the origin is the weight."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    model = Attention()
    with torch.no_grad():
        model.query.weight[0, 0] = float("nan")
    origin = debug.trace_nan(model, torch.randn(2, 5, 8))
    assert origin is not None
    assert (origin.kind, origin.parameter) == ("parameter", "query.weight")
