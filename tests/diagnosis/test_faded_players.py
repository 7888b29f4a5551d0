"""Of several optimizers the one whose gradients alone vanish is told; those that rest or differ on purpose are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.diagnosis.observing import Look, Observed, observe
from torchobs import catalog

AT, STEPS = 40, 70


def play(strength: Callable[[int], float], *, critic_only: Callable[[int], bool] = lambda _: False) -> Observed:
    """Train a generator and a critic. ``strength``: factor of the generator's loss in a step."""

    def train(look: Look) -> None:
        torch.manual_seed(0)
        maker, critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), nn.Linear(2, 1)
        making, judging = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (maker, critic))
        for number in range(STEPS):
            fake, real = maker(torch.randn(16, 4)), torch.randn(16, 2)
            judging.zero_grad()
            torch.autograd.backward((functional.softplus(critic(fake.detach())) + functional.softplus(-critic(real))).mean())
            judging.step()
            if not critic_only(number):
                making.zero_grad()
                torch.autograd.backward(functional.softplus(-critic(fake)).mean() * strength(number))
                making.step()
            look.stepped()

    return observe(train, grad_interval=1)


@pytest.mark.parametrize("factor", [0.0, 1e-6])
def test_the_player_that_fades_is_told(factor: float) -> None:
    """By its layers and its class, soon after it began; the other player's norm is as it was."""
    observed = play(lambda number: factor if number >= AT else 1.0)
    (told,) = observed.events(catalog.EVENT_FADED_OPTIMIZER)
    assert told.attributes["layers_affected"] == 2
    assert "Sequential" in str(told.attributes["layers"])
    assert "gradient_vanishing" in observed.kinds()
    assert "Sequential" in observed.text("gradient_vanishing")


@pytest.mark.parametrize("how", ["rests", "rarely", "weaker", "from_zero"])
def test_players_that_rest_are_left_alone(how: str) -> None:
    """One that does not step, or seldom, or more weakly, or whose loss is warmed up from zero."""
    observed = {
        "rests": lambda: play(lambda _: 1.0, critic_only=lambda number: number >= AT),
        "rarely": lambda: play(lambda _: 1.0, critic_only=lambda number: number % 5 > 0),
        "weaker": lambda: play(lambda number: 0.05 if number >= AT else 1.0),
        "from_zero": lambda: play(lambda number: min(1.0, max(0.0, (number - 15) / 30))),
    }[how]()
    assert observed.said() == []


def test_a_temperature_beside_a_policy_is_left_alone() -> None:
    """A single number whose gradient changes its sign."""

    def train(look: Look) -> None:
        torch.manual_seed(0)
        policy, temperature = nn.Linear(3, 2), torch.zeros(1, requires_grad=True)
        acting, tempering = torch.optim.Adam(policy.parameters(), 3e-3), torch.optim.Adam([temperature], 3e-3)
        for _ in range(400):
            mean, log_std = policy(torch.randn(64, 3)).chunk(2, 1)
            action = mean + log_std.exp() * torch.randn_like(mean)
            likely = -(((action - mean) / log_std.exp()).square() / 2 + log_std)
            acting.zero_grad()
            torch.autograd.backward((temperature.exp().detach() * likely + action.square()).mean())
            acting.step()
            tempering.zero_grad()
            torch.autograd.backward(-(temperature * (likely.detach() - 1)).mean())
            tempering.step()
            look.stepped()

    assert observe(train, grad_interval=1).events(catalog.EVENT_FADED_OPTIMIZER) == []
