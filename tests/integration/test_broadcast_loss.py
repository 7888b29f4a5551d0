"""A loss of [N, 1] against [N] is told; pairwise losses and matrices of targets are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.diagnosis.observing import Observed
from tests.loss_trainings import SAMPLES, observe_loss
from torchobs import catalog

N = SAMPLES


def run(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], outputs: int = 1) -> Observed:
    """Train with a loss of predictions [N, outputs] and targets [N]."""
    return observe_loss(lambda made, x: loss_of(made, x.sum(1)), outputs)


WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "by hand": lambda made, wanted: (made - wanted).square().mean(),
    "reversed": lambda made, wanted: (wanted - made).abs().sum(),
    "row and column": lambda made, wanted: (made.squeeze(1) - wanted[:, None]).pow(2).mean(),
    "mse_loss": functional.mse_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "one of several terms": lambda made, wanted: 0.5 * (made - wanted).pow(2).mean() + 0.1 * made.abs().mean(),
    "weighed in a stack": lambda made, wanted: (torch.stack([(made - wanted).pow(2).mean(), made.abs().mean()]) * 0.5).sum(),
}


@pytest.mark.parametrize("how", WRONG)
def test_every_prediction_with_every_target(how: str) -> None:
    """Once, with the shape of the predictions."""
    observed = run(WRONG[how])
    (told,) = observed.events(catalog.EVENT_LOOP_MISTAKE)
    assert told.attributes["kind"] == "loss_broadcast"
    assert told.attributes["shape"] in ([N, 1], [N])
    assert "loss_broadcast" in observed.kinds()


def pairwise(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A ranking loss: all pairs of predictions."""
    order = (wanted[:, None] > wanted).float()
    return functional.softplus(-(made - made.squeeze(1)) * order).mean()


def matrix(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A row effect against a matrix of targets, which is there."""
    table = wanted[:, None] * wanted
    return (made - table).square().mean()


RIGHT: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], int]] = {
    "squeezed": (lambda made, wanted: (made.squeeze(1) - wanted).square().mean(), 1),
    "unsqueezed": (lambda made, wanted: functional.mse_loss(made, wanted[:, None]), 1),
    "pairwise": (pairwise, 1),
    "matrix": (matrix, 1),
    "contrastive": (lambda made, _: functional.cross_entropy(made @ made.T / 0.1, torch.arange(N)), 8),
    "distances": (lambda made, _: (made[:, None] - made).square().sum(2).mean(), 8),
    "a square of outputs": (lambda made, wanted: (made - wanted).square().mean(), N),
    "ones": (lambda made, _: functional.mse_loss(made, torch.ones(N)), 1),
    "a constant": (lambda made, _: (made - torch.ones(1)).square().mean(), 1),
}


@pytest.mark.parametrize("how", RIGHT)
def test_what_is_meant_so_is_left_alone(how: str) -> None:
    """Shapes that fit, pairs, matrices."""
    assert run(*RIGHT[how]).said() == []
