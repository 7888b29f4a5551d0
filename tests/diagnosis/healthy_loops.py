"""Healthy training loops that look like a mistake, of which nothing may be said."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tests.diagnosis.observing import Look

STEPS = 120
Run = Callable[[Look, random.Random], None]


def _net(chance: random.Random) -> nn.Sequential:
    torch.manual_seed(chance.randrange(1 << 30))
    width = chance.choice((8, 16, 24))
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(8, 6)
    optimizer.zero_grad()
    torch.autograd.backward(functional.mse_loss(model(x), x.sum(1, keepdim=True)))
    optimizer.step()


def plain_descent(look: Look, chance: random.Random) -> None:
    """SGD without momentum, which keeps nothing, made anew for each step."""
    model = _net(chance)
    for _ in range(STEPS):
        _step(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        look.stepped()


def optimizer_by_epoch(look: Look, chance: random.Random) -> None:
    """A new optimizer for each short epoch."""
    model, length = _net(chance), chance.randrange(2, 6)
    for _ in range(STEPS // length):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(length):
            _step(model, optimizer)
            look.stepped()


def adaptation(look: Look, chance: random.Random) -> None:
    """Test-time adaptation: a step for each sample, after which the weights are set back."""
    model = _net(chance)
    kept = copy.deepcopy(model.state_dict())
    for _ in range(STEPS):
        _step(model, torch.optim.Adam(model.parameters(), lr=1e-3))
        model.load_state_dict(kept)
        look.stepped()


def inner_loops(look: Look, chance: random.Random) -> None:
    """Meta-learning: an optimizer for each copy of the model."""
    model = _net(chance)
    outer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        task = copy.deepcopy(model)
        _step(task, torch.optim.Adam(task.parameters(), lr=1e-3))
        _step(model, outer)
        look.stepped()


def waiting_for_thaw(look: Look, chance: random.Random) -> None:
    """A frozen body, whose optimizer steps from the beginning, and is thawed in the end."""
    body, head = _net(chance), nn.Linear(1, 1)
    body.requires_grad_(requires_grad=False)
    optimizers = [torch.optim.Adam(body.parameters(), lr=1e-3), torch.optim.Adam(head.parameters(), lr=1e-3)]
    for number in range(STEPS):
        body.requires_grad_(requires_grad=number >= STEPS - 20)
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(8, 6)
        torch.autograd.backward(functional.mse_loss(head(body(x)), x.sum(1, keepdim=True)))
        for optimizer in optimizers:
            optimizer.step()
        look.stepped()


def dummy_optimizer(look: Look, chance: random.Random) -> None:
    """An optimizer of nobody's tensor, for the sake of its scheduler."""
    model, dummy = _net(chance), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    optimizer, scheduler = torch.optim.Adam(model.parameters(), lr=1e-3), torch.optim.lr_scheduler.StepLR(dummy, 50)
    for _ in range(STEPS):
        _step(model, optimizer)
        dummy.step()
        scheduler.step()
        look.stepped()


def delayed_actor(look: Look, chance: random.Random) -> None:
    """TD3: the actor steps in every second or third step."""
    torch.manual_seed(chance.randrange(1 << 30))
    actor, critic, delay = nn.Linear(6, 2), nn.Linear(8, 1), chance.randrange(2, 4)
    first, second = torch.optim.Adam(critic.parameters(), lr=1e-3), torch.optim.Adam(actor.parameters(), lr=1e-3)
    for number in range(2 * STEPS):
        x = torch.randn(8, 6)
        first.zero_grad()
        torch.autograd.backward(functional.mse_loss(critic(torch.cat([x, torch.rand(8, 2)], 1)), x.sum(1, keepdim=True)))
        first.step()
        if not number % delay:
            second.zero_grad()
            torch.autograd.backward(-critic(torch.cat([x, actor(x).tanh()], 1)).mean())
            second.step()
        look.stepped()


def _distilled(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    soft = (functional.one_hot(labels, 5) * 2.0 / 4).softmax(1)
    return 16 * functional.kl_div((made / 4).log_softmax(1), soft, reduction="batchmean") + functional.cross_entropy(
        made, labels
    )


def _focal(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    wanted = functional.one_hot(labels, 5).float()
    each = functional.binary_cross_entropy_with_logits(made, wanted, reduction="none")
    return ((made.sigmoid() - wanted).square() * each).mean()


def _contrastive(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    alike, own = made @ (made + 0.1 * labels[:, None]).T, torch.arange(len(made))
    return functional.nll_loss(alike.log_softmax(0), own) + functional.nll_loss(alike.log_softmax(1), own)


def _smoothed(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(made.log_softmax(1), labels, label_smoothing=0.1)


def losses(look: Look, chance: random.Random) -> None:
    """Distillation, focal and contrastive losses, and a log-softmax before the loss, which changes nothing."""
    torch.manual_seed(chance.randrange(1 << 30))
    model, loss = (
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)),
        chance.choice((_distilled, _focal, _contrastive)),
    )
    loss = _smoothed if chance.random() < 0.25 else loss
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        torch.autograd.backward(loss(model(x), x[:, :5].argmax(1)))
        optimizer.step()
        look.stepped()


LOOPS: dict[str, Run] = {
    "plain descent, made anew": plain_descent, "an optimizer for each epoch": optimizer_by_epoch,
    "test-time adaptation": adaptation, "inner loops": inner_loops,
    "a body that waits for its thaw": waiting_for_thaw, "a dummy optimizer": dummy_optimizer, "a delayed actor": delayed_actor,
    "losses of probabilities": losses, "losses of probabilities, again": losses,
}  # fmt: skip
