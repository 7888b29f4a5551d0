"""A NaN that a training has recovered from is past after fifty healthy steps; what it has left in the model is not."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.diagnosis.observing import Look, observe
from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.diagnosis.observing import Observed

AT, WIDTH = 20, 8
NAN = float("nan")


def trained(model: nn.Module, ill: Callable[[nn.Module, int, torch.Tensor], None], steps: int) -> Observed:
    """Train; before each step ``ill`` may change the model or the batch. A step whose loss is not finite is skipped."""

    def train(look: Look) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for number in range(1, steps + 1):
            x = torch.randn(16, WIDTH)
            ill(model, number, x)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            else:
                optimizer.zero_grad()
            look.stepped()

    return observe(train, grad_interval=1)


def bad_batch(_model: nn.Module, number: int, x: torch.Tensor) -> None:
    """One batch with a NaN."""
    if number == AT:
        x[3, 2] = NAN


def test_a_batch_that_was_skipped_is_past_after_fifty_healthy_steps() -> None:
    """On page, in ``inspect`` and in the report alike; the event says where it was, and the finding that it is over."""
    observed = trained(nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)), bad_batch, AT + 80)
    assert observed.diagnosis.verdict.long.startswith("All well.")
    assert not observed.kinds()
    assert "Past: 1 loss that was not finite" in observed.diagnosis.health.text
    assert "It is past" in observed.text("nonfinite_origin")
    (rest,) = observed.events(catalog.EVENT_NONFINITE_REST)
    assert rest.attributes["parameters_affected"] == 0


def test_a_running_mean_that_took_the_batch_in_stays_trouble() -> None:
    """Every loss of the training is finite, and evaluation is NaN for ever."""
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    observed = trained(model, bad_batch, AT + 80)
    assert model.training
    assert observed.diagnosis.verdict.long.startswith("Trouble.")
    assert "1.running_mean holds NaN or infinity" in observed.diagnosis.health.text


class Rows(nn.Module):
    """Four embeddings; a batch has those that the script names."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, 1)
        self.rows: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        out: torch.Tensor = self.head(self.table(torch.tensor(self.rows)).mean(0) + x)
        return out


@pytest.mark.parametrize("restored", [True, False])
def test_a_weight_that_is_not_finite_stays_trouble_until_it_is(*, restored: bool) -> None:
    """Whether any loss shows it or not: the row is in no batch after that."""
    model = Rows()
    good = copy.deepcopy(model.state_dict())

    def ill(_model: nn.Module, number: int, _x: torch.Tensor) -> None:
        if number == AT:
            model.table.weight.data[3, 1] = NAN
        if number == AT + 2:
            model.rows = (0, 1, 2)
            if restored:
                model.load_state_dict(good)

    observed = trained(model, ill, AT + 90)
    assert observed.diagnosis.verdict.long.startswith("All well." if restored else "Trouble.")
    said = "table.weight holds NaN or infinity, and was not found to be finite since."
    assert (said in observed.diagnosis.health.text) != restored
