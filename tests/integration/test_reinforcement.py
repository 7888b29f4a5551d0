"""Reinforcement learning without a DataLoader: nothing passes for what it is not, and one word of the script splits it."""

# mypy: disable-error-code="no-untyped-call"
# torch.distributions, Tensor.split and Tensor.backward have no annotations

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch.distributions import Categorical
from torch.nn.functional import smooth_l1_loss

import torchobs
from tests.training import Recording
from torchobs.flight.format.layout import PHASE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

ROLLOUT = 20


class Seen(NamedTuple):
    """One step of an environment."""

    state: torch.Tensor
    action: torch.Tensor
    log_prob: torch.Tensor
    reward: float


class Cart:
    """Something to balance; its time is its own."""

    def __init__(self) -> None:
        self.state = torch.zeros(4)
        self.spent_s = 0.0

    def step(self, action: torch.Tensor) -> float:
        """Move by a millisecond."""
        begun = time.monotonic()
        time.sleep(0.001)
        self.state = (0.9 * self.state + 0.1 * (action.item() - 0.5)).detach()
        self.spent_s += time.monotonic() - begun
        return 1.0 - float(self.state.abs().max())


def network(outputs: int) -> torch.nn.Sequential:
    """A policy, or a value."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, outputs))


def play(cart: Cart, policy: torch.nn.Module) -> list[Seen]:
    """Let the policy act for a while."""
    seen = []
    for _ in range(ROLLOUT):
        state, choice = cart.state, Categorical(logits=policy(cart.state))
        action = choice.sample()
        seen.append(Seen(state, action, choice.log_prob(action), cart.step(action)))
    return seen


def dqn(cart: Cart, rollout: Callable[[], AbstractContextManager[None]]) -> int:
    """Acting between the updates, batches from a replay buffer, targets without gradients."""
    online, target, chance = network(2), network(2), random.Random(0)
    optimizer, memory = torch.optim.Adam(online.parameters()), list[Seen]()
    for _ in range(6):
        with rollout(), torch.no_grad():
            memory += play(cart, online)
        batch = chance.sample(memory, 8)
        states, actions = torch.stack([one.state for one in batch]), torch.stack([one.action for one in batch])
        chosen = online(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            wanted = torch.tensor([one.reward for one in batch]) + 0.9 * target(states).amax(1)
        optimizer.zero_grad()
        smooth_l1_loss(chosen, wanted).backward()
        optimizer.step()
        target.load_state_dict(online.state_dict())
    return 6


def spent(run: Recording) -> dict[str, float]:
    """Seconds in each phase, over all steps."""
    columns = zip(*(record.phase_s for record in run.steps()), strict=True)
    return dict(zip(PHASE_NAMES, map(sum, columns), strict=True))


@pytest.mark.parametrize(
    ("name", "phase"),
    [("rollout", "other"), ("data", "data")],
)
def test_a_word_of_the_script_splits_it(run: Recording, name: str, phase: str) -> None:
    """The rollout is what it was called, all of it; what follows up to a backward is that one's forward pass."""
    cart, begun = Cart(), time.monotonic()
    assert dqn(cart, lambda: torchobs.phase(name)) == len(run.steps())
    times, took_s = spent(run), time.monotonic() - begun
    assert times[phase] >= cart.spent_s * (1 - 1e-6)
    assert 0 < times["forward"] < took_s - cart.spent_s
    assert times["evaluation"] == 0
