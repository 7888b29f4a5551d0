"""Losses that are kept with their graphs are told; numbers, detached losses, and graphs that are meant to stay are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.diagnosis.observing import Look, Observed, observe
from torchobs import catalog

STEPS = 150
Keep = Callable[[torch.Tensor, torch.Tensor], None]


def run(make: Callable[[], Keep], *, scaled: bool = False) -> Observed:
    """Train; what ``make`` returns is called with each loss and the outputs that it was made of."""

    def train(look: Look) -> None:
        model, keep = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), make()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            optimizer.zero_grad()
            made = model(torch.randn(4, 8))
            loss = made.square().mean()
            torch.autograd.backward(loss * 1024 / 4 if scaled else loss)
            optimizer.step()
            keep(loss, made)
            look.stepped()

    return observe(train)


def in_list() -> Keep:
    """The mistake in the books."""
    kept: list[torch.Tensor] = []
    return lambda loss, _: kept.append(loss)


def in_sum() -> Keep:
    """Its other form."""
    total: list[Any] = [0.0]

    def add(loss: torch.Tensor, _: torch.Tensor) -> None:
        total[0] = total[0] + loss

    return add


def outputs() -> Keep:
    """For a metric at the end."""
    kept: list[torch.Tensor] = []
    return lambda _, made: kept.append(made)


@pytest.mark.parametrize(("make", "scaled"), [(in_list, False), (in_sum, True), (outputs, False)])
def test_a_graph_that_is_kept(make: Callable[[], Keep], scaled: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """Once, within 200 steps, with the remedy; also below a loss scale."""
    observed = run(make, scaled=scaled)
    (told,) = observed.events(catalog.EVENT_LOOP_MISTAKE)
    assert told.attributes["kind"] == "losses_kept"
    assert "detach()" in observed.text("losses_kept")


def numbers() -> Keep:
    """Numbers."""
    kept: list[float] = []
    return lambda loss, _: kept.append(loss.item())


def detached() -> Keep:
    """Tensors without a graph."""
    kept: list[torch.Tensor] = []
    return lambda loss, made: kept.extend([loss.detach(), made.detach()])


def the_last_ones() -> Keep:
    """A window of the last losses."""
    kept: list[torch.Tensor] = []

    def keep(loss: torch.Tensor, _: torch.Tensor) -> None:
        kept.append(loss)
        del kept[:-20]

    return keep


@pytest.mark.parametrize("make", [numbers, detached, the_last_ones], ids=lambda make: make.__name__)
def test_what_does_not_grow_is_left_alone(make: Callable[[], Keep]) -> None:
    """Nothing is said."""
    assert run(make).said() == []


def test_a_graph_that_is_meant_to_stay() -> None:
    """Weights derived once, of which each backward pass retains the graph."""

    def train(look: Look) -> None:
        weight = nn.Parameter(torch.randn(8, 8))
        optimizer = torch.optim.SGD([weight], lr=1e-2)
        derived = (weight.detach().clone().requires_grad_() * 2.0).tanh()
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.autograd.backward((derived @ weight).square().mean(), retain_graph=True)
            optimizer.step()
            look.stepped()

    assert observe(train).said() == []
