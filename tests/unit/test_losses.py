"""One ``loss_fn`` in all toolboxes: ``compute_loss``."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody does

from torchobs.tensors.losses import check_trained, compute_loss

X, Y = torch.ones(3, 2), torch.zeros(3, 1)


def model(inputs: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Sums of the rows: 2 each."""
    return scale * inputs.sum(1, keepdim=True)


def whole(model: Any, batch: Any) -> torch.Tensor:
    """The first form."""
    loss: torch.Tensor = (model(batch[0]) - batch[1]).square().mean()
    return loss


@pytest.mark.parametrize(
    ("batch", "loss_fn", "target", "expected"),
    [
        ((X, Y), whole, None, 4.0),
        ((X, Y), nn.MSELoss(), None, 4.0),
        ((X, Y), torch.dist, None, 12.0**0.5),
        ((X, Y), partial(F.mse_loss, reduction="sum"), None, 12.0),
        ((X, 2.0, Y), nn.MSELoss(), None, 16.0),
        (X, nn.MSELoss(), Y, 4.0),
        ({"inputs": X, "scale": 2.0}, lambda output: output.mean(), None, 4.0),
        ({"inputs": X}, lambda output, batch: (output - batch["inputs"].sum(1, keepdim=True)).sum(), None, 0.0),
        (X, lambda *arguments: arguments[0].mean() + arguments[1].mean(), None, 3.0),
        (X, None, None, 6.0),
    ],
)
def test_a_loss_function_of_each_form_is_called_as_it_asks(batch: Any, loss_fn: Any, target: Any, expected: float) -> None:
    """A model's name first asks for model and batch; everything else gets the output, and a target if it takes one."""
    assert compute_loss(model, batch, loss_fn, target=target).item() == pytest.approx(expected)


def test_without_a_function_the_output_has_the_loss_or_nothing_has() -> None:
    """As models of Transformers return it."""
    loss = torch.tensor(3.0)
    assert compute_loss(lambda _: SimpleNamespace(loss=loss), X) is loss
    assert compute_loss(lambda _: "no tensor", X) is None


def test_a_function_that_takes_the_model_takes_no_target() -> None:
    """It would get the output in the model's place."""
    with pytest.raises(TypeError, match="takes no target"):
        compute_loss(model, (X, Y), whole, target=Y)


@pytest.mark.parametrize("loss_fn", ["mse", 3, lambda: 0, lambda _first, _second, _third: 0])
def test_what_is_no_loss_function_is_refused_with_both_forms(loss_fn: Any) -> None:
    """Before the model runs."""
    with pytest.raises(TypeError, match=r"loss_fn\(model, batch\), or loss_fn\(output, target\)"):
        compute_loss(lambda _: pytest.fail("the model has run"), X, loss_fn)


def test_a_model_that_is_offloaded_computes() -> None:
    """Promise: a model on the device meta is refused, but not one whose weights accelerate brings when they are needed."""
    offloaded: Any = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="on the device meta, where nothing is computed"):
        check_trained(offloaded)
    offloaded._hf_hook = object()
    check_trained(offloaded)
    check_trained(nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)))
