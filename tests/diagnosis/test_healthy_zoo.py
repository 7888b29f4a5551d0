"""Trainings of 33 kinds that go well, as people write them: nothing is said of any, however closely it is looked at."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as every script has it

from tests.diagnosis.observing import Look, observe

STEPS = 500
Train = Callable[[Look], None]


def _mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), activation()]
    return nn.Sequential(*layers[:-1])


def _descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor, clip: float | None = None) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    if clip is not None:
        nn.utils.clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], clip)
    optimizer.step()


def _step(look: Look, optimizer: torch.optim.Optimizer, loss: torch.Tensor, clip: float | None = None) -> None:
    _descend(optimizer, loss, clip)
    look.stepped()


def _moons(count: int, noise: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    label = torch.randint(0, 2, (count,))
    angle = math.pi * torch.rand(count)
    sign = 1.0 - 2.0 * label
    x = torch.stack([sign * angle.cos() + label, sign * angle.sin() + 0.5 * label], 1)
    return x + noise * torch.randn(count, 2), label


def _digits(count: int, classes: int = 10, noise: float = 0.8) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy pictures of 8 by 8, the same classes in every call."""
    prototypes = torch.randn(classes, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(0, classes, (count,))
    return prototypes[labels] + noise * torch.randn(count, 1, 8, 8), labels


def _sequences(count: int, length: int, words: int = 16) -> torch.Tensor:
    return (torch.randint(0, words, (count, 1)) + torch.randint(1, 3, (count, length)).cumsum(1)).remainder(words)


class Convolutions(nn.Sequential):
    """A small classifier of pictures."""

    def __init__(self, classes: int = 10, width: int = 8) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2),
            nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, classes),
        )  # fmt: skip


class Coupling(nn.Module):
    """A layer of RealNVP."""

    def __init__(self, size: int, *, flipped: bool) -> None:
        super().__init__()
        self.net, self.flipped = _mlp(size // 2, 32, size), flipped

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out, and the logarithm of the determinant."""
        kept, moved = x.flip(1).chunk(2, 1) if self.flipped else x.chunk(2, 1)
        scale, shift = self.net(kept).chunk(2, 1)
        scale = scale.tanh()
        y = torch.cat([kept, moved * scale.exp() + shift], 1)
        return (y.flip(1) if self.flipped else y), scale.sum(1)


def _flow_loss(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    determinant = torch.zeros(len(x))
    for layer in layers:
        x, more = layer(x)
        determinant = determinant + more
    return (0.5 * x.square().sum(1) + 0.5 * x.shape[1] * math.log(2 * math.pi) - determinant).mean()


def flow_of_heavy_tails(look: Look) -> None:
    """A flow of returns: most days are quiet, and some are far from that."""
    layers = nn.ModuleList(Coupling(4, flipped=bool(number % 2)) for number in range(4))
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    tail = torch.distributions.StudentT(5.0)
    mixing = torch.randn(4, 4) / 2
    for _ in range(STEPS):
        _step(look, optimizer, _flow_loss(layers, tail.sample((32, 4)) @ mixing))


def curriculum_of_noise(look: Look) -> None:
    """Pictures with more noise in each stage, and classes that are added."""
    model = Convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        stage = step * 5 // STEPS
        x, y = _digits(32, classes=2 * (stage + 1), noise=0.2 + 0.3 * stage)
        _step(look, optimizer, F.cross_entropy(model(x), y))


def contrastive(look: Look) -> None:
    """SimCLR: two views of each picture, every other one of the batch is a negative."""
    body, head = nn.Sequential(nn.Flatten(), _mlp(64, 64, 32)), _mlp(32, 32, 16)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-3, weight_decay=1e-4)
    for _ in range(STEPS):
        x, _ = _digits(32)
        views = torch.cat([x + 0.3 * torch.randn_like(x), x * (0.7 + 0.6 * torch.rand(32, 1, 1, 1))])
        z = F.normalize(head(body(views)), dim=1)
        alike = (z @ z.T / 0.2).masked_fill(torch.eye(64, dtype=torch.bool), -1e9)
        _step(look, optimizer, F.cross_entropy(alike, torch.arange(64).roll(32)))


def momentum_contrast(look: Look) -> None:
    """MoCo: a queue of keys of a slow copy of the encoder, which begins empty."""
    encoder = _mlp(64, 64, 16)
    slow = copy.deepcopy(encoder).requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    queue: deque[torch.Tensor] = deque(maxlen=16)
    for _ in range(STEPS):
        x = _digits(32)[0].flatten(1)
        query = F.normalize(encoder(x + 0.3 * torch.randn_like(x)), dim=1)
        with torch.no_grad():
            for mine, other in zip(slow.parameters(), encoder.parameters(), strict=True):
                mine.lerp_(other, 0.01)
            key = F.normalize(slow(x), dim=1)
        negatives = [query @ torch.cat(list(queue)).T] if queue else []
        logits = torch.cat([(query * key).sum(1, keepdim=True), *negatives], 1) / 0.2
        _descend(optimizer, F.cross_entropy(logits, torch.zeros(32, dtype=torch.long)))
        queue.append(key)
        look.stepped()


def distillation(look: Look) -> None:
    """A teacher is trained, then its softened outputs are learned by a smaller student."""
    teacher, student = nn.Sequential(nn.Flatten(), _mlp(64, 64, 10)), nn.Sequential(nn.Flatten(), _mlp(64, 12, 10))
    optimizer = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for _ in range(STEPS // 2):
        x, y = _digits(32)
        _step(look, optimizer, F.cross_entropy(teacher(x), y))
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    teacher.eval()
    for _ in range(STEPS // 2):
        x, y = _digits(32)
        with torch.no_grad():
            soft = (teacher(x) / 4).softmax(1)
        logits = student(x)
        loss = 16 * F.kl_div((logits / 4).log_softmax(1), soft, reduction="batchmean") + 0.5 * F.cross_entropy(logits, y)
        _step(look, optimizer, loss)


def folds(look: Look) -> None:
    """Cross-validation: five models, one after the other, each evaluated after every epoch."""
    data, labels = _moons(200, 0.25)
    for fold in range(5):
        held_out = torch.arange(200) % 5 == fold
        model = _mlp(2, 32, 32, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _epoch in range(20):
            model.train()
            for part in torch.randperm(160).view(-1, 32):
                _step(look, optimizer, F.cross_entropy(model(data[~held_out][part]), labels[~held_out][part]))
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(data[held_out]), labels[held_out])


def wasserstein_gan(look: Look) -> None:
    """Five steps of the critic, with a penalty on its gradient, for one of the generator."""
    generator, critic = _mlp(4, 32, 32, 2), _mlp(2, 32, 32, 1, activation=nn.Softplus)
    first = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for step in range(STEPS):
        real, fake = _moons(32)[0], generator(torch.randn(32, 4)).detach()
        mixed = torch.lerp(real, fake, torch.rand(32, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        _descend(first, critic(fake).mean() - critic(real).mean() + penalty)
        if step % 5 == 4:
            _descend(second, -critic(generator(torch.randn(32, 4))).mean())
        look.stepped()


def actor_critic(look: Look) -> None:
    """A2C on a pole that is balanced on a cart: episodes end, and grow longer."""
    body, policy, value = _mlp(4, 32, 32), nn.Linear(32, 2), nn.Linear(32, 1)
    optimizer = torch.optim.Adam([*body.parameters(), *policy.parameters(), *value.parameters()], lr=3e-3)
    state = 0.05 * torch.randn(8, 4)
    for _ in range(STEPS):
        states, logs, rewards, alive, spread = [], [], [], [], torch.zeros(())
        for _ in range(5):
            chosen = torch.distributions.Categorical(logits=policy(body(state)))
            action = chosen.sample()  # type: ignore[no-untyped-call]
            logs.append(chosen.log_prob(action))  # type: ignore[no-untyped-call]
            spread = spread + chosen.entropy().mean()  # type: ignore[no-untyped-call]
            states.append(state)
            force = 20.0 * action - 10.0
            turn = 9.8 * state[:, 2].sin() - force * state[:, 2].cos()
            state = state + 0.02 * torch.stack([state[:, 1], force, state[:, 3], turn], 1)
            fallen = (state[:, 2].abs() > 0.2) | (state[:, 0].abs() > 2.4)
            rewards.append(torch.ones(8))
            alive.append((~fallen).float())
            state = torch.where(fallen[:, None], 0.05 * torch.randn(8, 4), state)
        with torch.no_grad():
            goal = value(body(state)).squeeze(1)
        loss = -0.01 * spread / 5
        for reward, on, log, visited in zip(reversed(rewards), reversed(alive), reversed(logs), reversed(states), strict=True):
            goal = reward + 0.99 * on * goal
            advantage = goal - value(body(visited)).squeeze(1)
            loss = loss + (-log * advantage.detach() + 0.5 * advantage.square()).mean() / 5
        _step(look, optimizer, loss, clip=0.5)


def reinforcement(look: Look) -> None:
    """REINFORCE on a bandit with ten arms whose rewards come seldom, with a moving baseline and an entropy term."""
    policy, usual = _mlp(6, 32, 10, activation=nn.Tanh), 0.0
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    goals = torch.randn(6, 10)
    for _ in range(STEPS):
        x = torch.randn(32, 6)
        chosen = torch.distributions.Categorical(logits=policy(x))
        action = chosen.sample()  # type: ignore[no-untyped-call]
        reward = 10.0 * ((x @ goals).argmax(1) == action) * (torch.rand(32) < 0.5)
        log, spread = chosen.log_prob(action), chosen.entropy()  # type: ignore[no-untyped-call]
        _descend(optimizer, -(log * (reward - usual)).mean() - 0.01 * spread.mean())
        usual += 0.05 * (float(reward.mean()) - usual)
        look.stepped()


def averaged_weights(look: Look) -> None:
    """SWA: a rate that anneals to a constant one, an average of the weights, and its batch statistics in the end."""
    model = Convolutions()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    constant = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=20)
    for step in range(STEPS):
        x, y = _digits(32)
        _descend(optimizer, F.cross_entropy(model(x), y))
        if step >= 300:
            constant.step()
            if step % 10 == 0:
                average.update_parameters(model)
        else:
            schedule.step()
        look.stepped()
    torch.optim.swa_utils.update_bn([_digits(32)[0] for _ in range(5)], average)


def meta_learning(look: Look) -> None:
    """MAML on sines: two inner steps whose graph is kept, for each of four tasks."""
    weights = [torch.nn.Parameter(weight.detach().clone()) for weight in _mlp(1, 24, 24, 1).parameters()]
    optimizer = torch.optim.Adam(weights, lr=1e-3)

    def net(x: torch.Tensor, with_: list[Any]) -> torch.Tensor:
        hidden = F.relu(F.linear(F.relu(F.linear(x, with_[0], with_[1])), with_[2], with_[3]))
        return F.linear(hidden, with_[4], with_[5])

    for _ in range(STEPS):
        total = torch.zeros(())
        for _task in range(4):
            height, phase, fast = random.uniform(0.1, 5.0), random.uniform(0, math.pi), list[Any](weights)
            x = torch.rand(20, 1) * 10 - 5
            y = height * (x + phase).sin()
            for _ in range(2):
                inner = F.mse_loss(net(x[:10], fast), y[:10])
                slopes = torch.autograd.grad(inner, fast, create_graph=True)
                fast = [weight - 0.01 * slope for weight, slope in zip(fast, slopes, strict=True)]
            total = total + F.mse_loss(net(x[10:], fast), y[10:]) / 4
        _step(look, optimizer, total)


def variational_autoencoder(look: Look) -> None:
    """The divergence's weight goes from 0 to 1 four times."""
    encoder, decoder = _mlp(64, 48, 8), _mlp(4, 48, 64)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=2e-3)
    for step in range(STEPS):
        x = _digits(32)[0].flatten(1)
        mean, log_variance = encoder(x).chunk(2, 1)
        out = decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())
        divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(1).mean()
        weight = min(1.0, step % 125 / 60)
        _step(look, optimizer, F.mse_loss(out, x, reduction="sum") / len(x) + weight * divergence)


def recurrent_language_model(look: Look) -> None:
    """Truncated backpropagation through time: the state goes on from chunk to chunk, gradients are clipped."""
    words, body, head = nn.Embedding(16, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 16)
    optimizer = torch.optim.SGD([*words.parameters(), *body.parameters(), *head.parameters()], lr=1.0)
    text, state = _sequences(16, 25 * 12 + 1), None
    for step in range(STEPS):
        if step and step % 25 == 0:
            text, state = _sequences(16, 25 * 12 + 1), None
        at = 12 * (step % 25)
        out, state = body(words(text[:, at : at + 12]), state)
        state = (state[0].detach(), state[1].detach())
        loss = F.cross_entropy(head(out).flatten(0, 1), text[:, at + 1 : at + 13].flatten())
        _step(look, optimizer, loss, clip=0.25)


def large_batches(look: Look) -> None:
    """Eight micro-batches for a step, a warm-up of 100 steps to a high rate, and a polynomial decay."""
    model = Convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, nesterov=True, weight_decay=1e-4)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=50)
    decay = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=STEPS - 50, power=2.0)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[50])
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _micro in range(4):
            x, y = _digits(16)
            torch.autograd.backward(F.cross_entropy(model(x), y) / 4)
        optimizer.step()
        schedule.step()
        look.stepped()


def gradual_unfreezing(look: Look) -> None:
    """ULMFiT: a body trained on other classes; the head first, then a layer more every hundred steps, with smaller rates."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
    first = nn.Linear(48, 10)
    optimizer: torch.optim.Optimizer = torch.optim.Adam([*body.parameters(), *first.parameters()], lr=2e-3)
    for _ in range(150):
        x, y = _digits(32)
        _step(look, optimizer, F.cross_entropy(first(body(x)), y))
    head, layers = nn.Linear(48, 2), [body[3], body[1]]
    body.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
    for step in range(STEPS - 150):
        if step % 120 == 119 and layers:
            layer = layers.pop(0).requires_grad_(requires_grad=True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3 / 2 ** (2 - len(layers))})
        x, y = _digits(32)
        _step(look, optimizer, F.cross_entropy(head(body(x)), y % 2))


class LowRank(nn.Module):
    """A layer that is kept, and a product of two matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., in)`` to ``(..., out)``."""
        out: torch.Tensor = self.layer(x) + 2.0 * self.up(self.down(x))
        return out


def low_rank_adapters(look: Look) -> None:
    """A language model is trained, then adapted to another language by LoRA alone."""
    words, inner, outer = nn.Embedding(16, 32), nn.Linear(32, 48), nn.Linear(48, 16)
    optimizer = torch.optim.AdamW([*words.parameters(), *inner.parameters(), *outer.parameters()], lr=3e-3)
    for _ in range(200):
        text = _sequences(16, 9)
        _step(look, optimizer, F.cross_entropy(outer(inner(words(text[:, :-1])).relu()).flatten(0, 1), text[:, 1:].flatten()))
    words.requires_grad_(requires_grad=False)
    first, second = LowRank(inner), LowRank(outer)
    optimizer = torch.optim.AdamW(
        [parameter for part in (first, second) for parameter in part.parameters() if parameter.requires_grad], lr=5e-3
    )
    for _ in range(STEPS - 200):
        text = 15 - _sequences(16, 9)
        _step(look, optimizer, F.cross_entropy(second(first(words(text[:, :-1])).relu()).flatten(0, 1), text[:, 1:].flatten()))


def mean_teacher(look: Look) -> None:
    """Few labels, and a teacher that is the student's moving average, whose weight is ramped up."""
    student = _mlp(2, 32, 32, 2)
    teacher = copy.deepcopy(student).requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    samples, labels = _moons(8)
    for step in range(STEPS):
        x, _ = _moons(64)
        with torch.no_grad():
            goal = teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        agrees = F.mse_loss(student(x + 0.1 * torch.randn_like(x)).softmax(1), goal)
        weight = 20 * math.exp(-5 * (1 - min(1.0, step / 200)) ** 2)
        _descend(optimizer, F.cross_entropy(student(samples), labels) + weight * agrees)
        with torch.no_grad():
            for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(other, 0.01)
        look.stepped()


def self_distillation(look: Look) -> None:
    """BYOL: no negatives, a predictor, and a target that follows slowly."""
    online, predictor = _mlp(64, 48, 16), _mlp(16, 32, 16)
    target = copy.deepcopy(online).requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        x = _digits(32)[0].flatten(1)
        first, second = x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x)
        with torch.no_grad():
            goals = target(second), target(first)
        alike = [
            F.cosine_similarity(predictor(online(view)), goal).mean() for view, goal in zip((first, second), goals, strict=True)
        ]
        _descend(optimizer, 4 - 2 * sum(alike, torch.zeros(())))
        with torch.no_grad():
            for mine, other in zip(target.parameters(), online.parameters(), strict=True):
                mine.lerp_(other, 0.02)
        look.stepped()


def sparse_embeddings(look: Look) -> None:
    """Skip-grams with negative samples; both tables have sparse gradients."""
    inner, outer = nn.Embedding(400, 16, sparse=True), nn.Embedding(400, 16, sparse=True)
    nn.init.zeros_(outer.weight)
    optimizer = torch.optim.SparseAdam([*inner.parameters(), *outer.parameters()], lr=0.02)
    for _ in range(STEPS):
        words = (400 * torch.rand(64).pow(3)).long()
        near, far = (words + torch.randint(1, 4, (64,))).remainder(400), torch.randint(0, 400, (64, 5))
        close = (inner(words) * outer(near)).sum(1)
        apart = (inner(words)[:, None] * outer(far)).sum(2)
        _step(look, optimizer, -F.logsigmoid(close).mean() - F.logsigmoid(-apart).sum(1).mean())


def sequence_to_sequence(look: Look) -> None:
    """Sequences are reversed; the decoder gets more and more of what it made itself."""
    words, encoder, decoder, head = (
        nn.Embedding(17, 24),
        nn.GRU(24, 32, batch_first=True),
        nn.GRUCell(24, 32),
        nn.Linear(32, 16),
    )
    parts = nn.ModuleList([words, encoder, decoder, head])
    optimizer = torch.optim.Adam(parts.parameters(), lr=3e-3)
    for step in range(STEPS):
        text = torch.randint(0, 16, (24, 4))
        state = encoder(words(text))[1][0]
        word, losses = torch.full((24,), 16), []
        for goal in text.flip(1).unbind(1):
            state = decoder(words(word), state)
            logits = head(state)
            losses.append(F.cross_entropy(logits, goal))
            word = logits.argmax(1) if random.random() < step / STEPS else goal
        _step(look, optimizer, torch.stack(losses).mean(), clip=1.0)


def fitted_by_heart(look: Look) -> None:
    """All of 32 samples in each step, until the loss is next to nothing."""
    x, y = _digits(32)
    model = nn.Sequential(nn.Flatten(), _mlp(64, 64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        _step(look, optimizer, F.cross_entropy(model(x), y))


class Attention(nn.Module):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(16, 32), nn.Embedding(32, 32)
        self.layer, self.head = nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True, norm_first=True), nn.Linear(32, 16)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """``(N, T)`` to ``(N, T, 16)``."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        out: torch.Tensor = self.head(self.layer(self.words(text) + self.places.weight[:length], mask, is_causal=True))
        return out


def half_precision(look: Look) -> None:
    """A transformer in bfloat16 autocast, with a warm-up and a cosine."""
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        text = _sequences(16, 13)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        _descend(optimizer, loss, clip=1.0)
        schedule.step()
        look.stepped()


def line_search(look: Look) -> None:
    """L-BFGS with strong Wolfe conditions on a batch that is changed every 50 steps."""
    model = _mlp(1, 16, 16, 1, activation=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2, line_search_fn="strong_wolfe")
    for step in range(STEPS // 2):
        if step % 50 == 0:
            x = torch.rand(64, 1) * 4 - 2

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), (2 * x).sin())  # noqa: B023  # it is called within the step
            torch.autograd.backward(loss)
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        look.stepped()


def several_tasks(look: Look) -> None:
    """Three tasks weighed by uncertainties that are learned: the loss becomes negative."""
    body, heads = _mlp(8, 32, 32), nn.ModuleList(nn.Linear(32, 1) for _ in range(3))
    doubts = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters(), doubts], lr=3e-3)
    for _ in range(STEPS):
        x = torch.randn(32, 8)
        goals = (x.sum(1, keepdim=True), 0.1 * x[:, :1], (x[:, 1:2] * x[:, 2:3]).sin())
        losses = torch.stack([F.mse_loss(head(body(x).relu()), goal) for head, goal in zip(heads, goals, strict=True)])
        _step(look, optimizer, (losses * (-doubts).exp() + doubts).sum())


def speech(look: Look) -> None:
    """CTC: labels without times, from frames that show them."""
    shown, body, head = torch.randn(9, 12), nn.GRU(12, 24, batch_first=True, bidirectional=True), nn.Linear(48, 9)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(STEPS):
        labels = torch.randint(1, 9, (12, 4))
        frames = shown[labels.repeat_interleave(4, dim=1)] + 0.5 * torch.randn(12, 16, 12)
        scores = head(body(frames)[0]).log_softmax(2).transpose(0, 1)
        lengths = torch.full((12,), 16), torch.full((12,), 4)
        _step(look, optimizer, F.ctc_loss(scores, labels, *lengths, zero_infinity=True), clip=5.0)


def energies(look: Look) -> None:
    """Contrastive divergence: Langevin steps from a buffer make the negatives, the loss is a difference around zero."""
    model = _mlp(2, 48, 48, 1, activation=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    kept = torch.rand(256, 2) * 4 - 2
    for _ in range(STEPS):
        chosen = torch.randint(0, 256, (32,))
        x = kept[chosen]
        for _ in range(5):
            x.requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            x = (x - 0.1 * slope + 0.05 * torch.randn_like(x)).detach().clamp(-3, 3)
        kept[chosen] = x
        real, fake = model(_moons(32)[0]), model(x)
        _step(look, optimizer, (real - fake).mean() + 0.1 * (real.square() + fake.square()).mean(), clip=1.0)


def vector_quantisation(look: Look) -> None:
    """VQ-VAE: a straight-through gradient, and codes of which some are not used."""
    encoder, decoder, codes = _mlp(64, 32, 8), _mlp(8, 32, 64), nn.Embedding(24, 8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters(), *codes.parameters()], lr=2e-3)
    for _ in range(STEPS):
        x = _digits(32)[0].flatten(1)
        z = encoder(x)
        near = codes(torch.cdist(z, codes.weight).argmin(1))
        out = decoder(z + (near - z).detach())
        commitment = F.mse_loss(near, z.detach()) + 0.25 * F.mse_loss(z, near.detach())
        _step(look, optimizer, F.mse_loss(out, x) + commitment)


def differential_equation(look: Look) -> None:
    """A neural ODE: eight Runge-Kutta steps through one small net, over a spiral that is followed for longer and longer."""
    slope = _mlp(2, 32, 2, activation=nn.Tanh)
    optimizer = torch.optim.Adam(slope.parameters(), lr=5e-3)
    turn = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    for step in range(STEPS):
        start, count = torch.randn(16, 2), 2 + step // 100
        x, losses = start, []
        for number in range(1, count + 1):
            a = slope(x)
            b = slope(x + 0.1 * a)
            c = slope(x + 0.1 * b)
            x = x + 0.2 / 6 * (a + 2 * b + 2 * c + slope(x + 0.2 * c))
            losses.append(F.mse_loss(x, start @ torch.linalg.matrix_exp(0.2 * number * turn).T))
        _step(look, optimizer, torch.stack(losses).mean())


def continual_learning(look: Look) -> None:
    """Five tasks one after the other, each with classes that are new, and a memory of the former ones that is replayed."""
    model = nn.Sequential(nn.Flatten(), _mlp(64, 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    memory: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(STEPS):
        task = step // 100
        x, y = _digits(64)
        mine = y // 2 == task
        x, y = x[mine], y[mine]
        if not len(x):
            x, y = _digits(16)
        batch = [(x, y), *random.sample(memory, min(2, len(memory)))]
        _descend(optimizer, F.cross_entropy(model(torch.cat([a for a, _ in batch])), torch.cat([b for _, b in batch])))
        if step % 20 == 0:
            memory.append((x[:8], y[:8]))
        look.stepped()


def early_stopping(look: Look) -> None:
    """The best weights are taken back, and the rate is lowered, whenever the validation has not improved for three epochs."""
    data, labels = _moons(96, 0.4)
    held_out, truth = _moons(96, 0.4)
    model = _mlp(2, 48, 48, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best, kept, bad = math.inf, copy.deepcopy(model.state_dict()), 0
    for _epoch in range(STEPS // 4):
        for part in torch.randperm(96).view(-1, 24):
            _step(look, optimizer, F.cross_entropy(model(data[part]), labels[part]))
        with torch.no_grad():
            loss = float(F.cross_entropy(model(held_out), truth))
        best, kept, bad = (loss, copy.deepcopy(model.state_dict()), 0) if loss < best else (best, kept, bad + 1)
        if bad > 3:
            model.load_state_dict(kept)
            optimizer.param_groups[0]["lr"] *= 0.7
            bad = 0


def deep_q_learning(look: Look) -> None:
    """A replay buffer, a target that is copied every hundred steps, rewards that come at the goal alone."""
    net = _mlp(2, 32, 4)
    target, optimizer = copy.deepcopy(net), torch.optim.Adam(net.parameters(), lr=1e-3)
    moves = torch.tensor([[0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])
    buffer: deque[tuple[torch.Tensor, int, float, torch.Tensor, float]] = deque(maxlen=500)
    place = torch.rand(2) * 2 - 1
    for step in range(STEPS + 40):
        with torch.no_grad():
            action = random.randrange(4) if random.random() < max(0.1, 1 - step / 200) else int(net(place).argmax())
        there = (place + moves[action]).clamp(-1, 1)
        done = bool((there - 0.8).abs().max() < 0.25)
        buffer.append((place, action, float(done), there, 1.0 - done))
        place = torch.rand(2) * 2 - 1 if done or random.random() < 0.02 else there
        if step < 40:
            continue
        states, actions, rewards, after, on = zip(*random.sample(buffer, 32), strict=True)
        with torch.no_grad():
            goal = torch.tensor(rewards) + 0.95 * torch.tensor(on) * target(torch.stack(after)).max(1).values
        values = net(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
        _descend(optimizer, F.smooth_l1_loss(values, goal), clip=10.0)
        if step % 100 == 0:
            target.load_state_dict(net.state_dict())
        look.stepped()


def physics(look: Look) -> None:
    """A differential equation is solved by a net: second derivatives in the loss, and a boundary that weighs much."""
    model = _mlp(1, 24, 24, 1, activation=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    edge = torch.tensor([[0.0], [1.0]])
    for _ in range(STEPS):
        x = torch.rand(64, 1).requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        inside = (second + math.pi**2 * (math.pi * x).sin()).square().mean()
        _step(look, optimizer, inside + 100 * model(edge).square().mean())


def sharpness_aware(look: Look) -> None:
    """SAM: two backward passes, the second one where the loss is worst nearby."""
    model = Convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        x, y = _digits(24)
        torch.autograd.backward(F.cross_entropy(model(x), y))
        slopes = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        scale = 0.05 / (math.hypot(*(float(slope.norm()) for slope in slopes)) + 1e-12)
        moves = [scale * slope for slope in slopes]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()
        look.stepped()


TRAININGS: tuple[Train, ...] = (
    flow_of_heavy_tails, curriculum_of_noise, contrastive, momentum_contrast, distillation, folds, wasserstein_gan,
    actor_critic, reinforcement, averaged_weights, meta_learning, variational_autoencoder, recurrent_language_model,
    large_batches, gradual_unfreezing, low_rank_adapters, mean_teacher, self_distillation, sparse_embeddings,
    sequence_to_sequence, fitted_by_heart, half_precision, line_search, several_tasks, speech, energies,
    vector_quantisation, differential_equation, continual_learning, early_stopping, deep_q_learning, physics, sharpness_aware,
)  # fmt: skip


LATE = {
    curriculum_of_noise, distillation, averaged_weights, gradual_unfreezing, low_rank_adapters, fitted_by_heart, half_precision,
    continual_learning,
}  # fmt: skip
"""Those in which something changes late"""
EARLY = 240
"""Steps of the others, which go on as they are by then; `make test-long` takes all"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before:UserWarning")
@pytest.mark.parametrize("train", TRAININGS, ids=lambda loop: loop.__name__)
def test_nothing_is_said_of_a_healthy_training(train: Train, pytestconfig: pytest.Config) -> None:
    """No event of a sickness and no finding worth a look, with the gradient's norm in each step.

    At level `extreme`, which looks at all that the others do, and at each layer's output; `make test-long` has `basic`, too.
    """
    torch.set_num_threads(1)
    whole = float(pytestconfig.getoption("share")) >= 1
    for level in ("extreme", "basic") if whole else ("extreme",):
        most = None if whole or train in LATE else EARLY
        assert observe(train, level=level, grad_interval=1, most=most).said() == []
