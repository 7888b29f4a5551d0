"""Small trainings of six kinds, whose widths, depths, activations and rates a seed decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
    "fused": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, fused=True),
    "lbfgs": lambda parameters, rate: torch.optim.LBFGS(
        parameters, lr=rate, max_iter=2, history_size=4, line_search_fn="strong_wolfe"
    ),
}
RATES = {"sgd": (1e-3, 1e-2), "adamw": (1e-4, 2e-3), "fused": (1e-4, 2e-3), "lbfgs": (0.01, 0.1)}
"""Least and largest rates of healthy trainings"""
PRECISIONS = ("float32", "bfloat16", "scaler")
ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU)


class Setup(NamedTuple):
    """What is trained, how, and the seed that decides the rest."""

    training: str
    optimizer: str
    precision: str
    compiled: bool
    seed: int

    def __str__(self) -> str:
        return f"{self.training} {self.optimizer} {self.precision}{' compiled' if self.compiled else ''} #{self.seed}"


Loss = Callable[[Any], torch.Tensor]


@dataclass
class Training:
    """Models, each with its optimizer and loss; the sickness of a step is planted in the attributes."""

    models: dict[str, nn.Module]
    losses: dict[str, Loss]
    make_batch: Callable[[], torch.Tensor]
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    precision: str = "float32"
    scaler: torch.amp.GradScaler | None = None
    body: nn.Sequential = field(default_factory=nn.Sequential)
    """The blocks, one after the other, in which things are planted"""
    body_name: str = ""
    """The path under which it is told"""
    main: str = "model"
    """Whose loss the body has"""
    loss_factor: float = 1.0
    after_backward: Callable[[], object] | None = None

    def modules(self, kind: type | tuple[type, ...]) -> list[tuple[str, Any]]:
        """The modules of a kind, by the path under which they are told."""
        several = len(self.models) > 1
        return [
            (".".join(filter(None, [type(model).__name__ if several else "", path])), module)
            for model in self.models.values() for path, module in model.named_modules() if isinstance(module, kind)
        ]  # fmt: skip

    def step(self, x: torch.Tensor | None = None) -> None:
        """Train every model on a batch."""
        batch = self.make_batch() if x is None else x
        for name in self.losses:
            optimizer = self.optimizers[name]
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(lambda name=name: self._backward(name, batch))  # type: ignore[no-untyped-call]
                continue
            loss = self._backward(name, batch)  # whose graph lives while the optimizer steps, as in most loops
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
            del loss
        if self.scaler is not None:
            self.scaler.update()

    def _backward(self, name: str, batch: torch.Tensor) -> torch.Tensor:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision != "float32"):
            loss = self.losses[name](batch)
        loss = loss * self.loss_factor if name == self.main else loss
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))
        if self.after_backward is not None and name == self.main:
            self.after_backward()
        return loss


class Sickly(nn.Module):
    """A module that does what ``sickness`` says in its forward pass; nothing while it is empty."""

    sickness = ""

    def ail(self, h: torch.Tensor) -> torch.Tensor:  # noqa: C901, PLR0911  # a case each
        """Return ``h``, or what the sickness makes of it."""
        if self.sickness == "log":
            return h + torch.log(torch.relu(h) * 0)
        if self.sickness == "exp":
            grown = torch.exp(1e4 * h.abs() + 1e4)
            return h + (grown - grown.mean())  # infinity here, NaN by the difference
        if self.sickness == "div":
            return h / (h - h.detach())
        if self.sickness == "rsqrt":
            return h * torch.rsqrt(h.square().sum(-1, keepdim=True) * 0)
        if self.sickness == "pow":
            return h + (-1.0 - h.square()) ** 0.3
        if self.sickness == "acos":
            return h + torch.acos(2.0 + h.square())
        if self.sickness == "sqrt":
            return h + torch.sqrt((h - h.detach()).square())
        if self.sickness == "acos_at_1":
            return h + torch.acos(h * 0 + 1)
        if self.sickness == "half_power":
            return h + (h.abs() * 0) ** 0.5
        if self.sickness == "log_behind_where":
            return h + torch.where(h > 1e9, torch.log(h * 0), torch.zeros_like(h))
        return h


class Block(Sickly):
    """Linear layer and activation, residual or not."""

    def __init__(self, width: int, activation: type[nn.Module], *, residual: bool) -> None:
        super().__init__()
        self.linear, self.activation, self.residual = nn.Linear(width, width), activation(), residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., width)`` to the same."""
        out: torch.Tensor = self.activation(self.linear(self.ail(x)))
        return x + out if self.residual else out


class ConvolutionBlock(Sickly):
    """Convolution, normalisation, activation."""

    def __init__(self, width: int, activation: type[nn.Module], *, residual: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.activation, self.residual = activation(), residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, width, H, W)`` to the same."""
        out: torch.Tensor = self.activation(self.norm(self.ail(self.linear(x))))
        return x + out if self.residual else out


class RecurrentBlock(Sickly):
    """A GRU or an LSTM."""

    def __init__(self, width: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.linear = kind(width, width, batch_first=True)  # type: ignore[arg-type,call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, T, width)`` to the same."""
        states: torch.Tensor = self.linear(self.ail(x))[0]
        return states


class AttentionBlock(Sickly):
    """A transformer's layer, normalised before attention and feed-forward part; `mask` masks everything in one row."""

    def __init__(self, width: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.linear, self.activation, self.down = nn.Linear(width, 2 * width), activation(), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, T, width)`` to the same."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        scores = q @ k.mT / k.shape[-1] ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(0 if self.sickness == "mask" else 1)
        x = x + self.out(scores.masked_fill(mask, float("-inf")).softmax(-1) @ v)
        out: torch.Tensor = x + self.down(self.ail(self.activation(self.linear(self.norm2(x)))))
        return out


class Network(nn.Module):
    """Something before, blocks, and a head."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.Sequential(*blocks), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From the stem's inputs to the head's outputs."""
        out: torch.Tensor = self.head(self.blocks(self.stem(x)))
        return out


class Generator(Network):
    """Makes samples of noise."""


class Critic(Network):
    """Tells samples from data."""


def _perceptron(chance: random.Random, kind: type[Network], inputs: int, outputs: int) -> Network:
    width, activation = chance.choice((12, 16, 24, 32)), chance.choice(ACTIVATIONS)
    residual = chance.random() < 0.4
    blocks: list[nn.Module] = [Block(width, activation, residual=residual) for _ in range(chance.randrange(2, 6))]
    return kind(nn.Linear(inputs, width), blocks, nn.Linear(width, outputs))


def _mlp(chance: random.Random) -> Training:
    inputs, size = chance.choice((6, 10, 20)), chance.choice((8, 16, 32))
    model = _perceptron(chance, Network, inputs, 1)
    noise = chance.uniform(0.05, 0.5)

    def loss(x: torch.Tensor) -> torch.Tensor:
        target = torch.sin(x.sum(1, keepdim=True)) + noise * torch.randn(len(x), 1)
        return functional.mse_loss(model(x).float(), target)

    return Training({"model": model}, {"model": loss}, lambda: torch.randn(size, inputs), body=model.blocks, body_name="blocks")


def _cnn(chance: random.Random) -> Training:
    width, classes, size = chance.choice((4, 8, 12)), chance.choice((3, 7)), chance.choice((8, 16))
    activation = chance.choice(ACTIVATIONS)
    residual = chance.random() < 0.4
    blocks: list[nn.Module] = [ConvolutionBlock(width, activation, residual=residual) for _ in range(chance.randrange(2, 4))]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    model = Network(nn.Conv2d(3, width, 3), blocks, head)

    def loss(x: torch.Tensor) -> torch.Tensor:
        target = (x.mean((1, 2, 3)) * 30).long().remainder(classes)
        return functional.cross_entropy(model(x).float(), target)

    return Training(
        {"model": model}, {"model": loss}, lambda: torch.randn(size, 3, 8, 8), body=model.blocks, body_name="blocks"
    )


def _rnn(chance: random.Random) -> Training:
    width, length, size = chance.choice((8, 12, 16)), chance.randrange(4, 12), chance.choice((6, 12))
    kind: type[nn.RNNBase] = chance.choice((nn.GRU, nn.LSTM))
    blocks: list[nn.Module] = [RecurrentBlock(width, kind) for _ in range(chance.randrange(1, 4))]
    model = Network(nn.Linear(5, width), blocks, nn.Linear(width, 5))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(model(x[:, :-1]).float(), x[:, 1:])

    def batch() -> torch.Tensor:
        walks: torch.Tensor = torch.randn(size, length, 5).cumsum(1) / length**0.5
        return walks

    return Training({"model": model}, {"model": loss}, batch, body=model.blocks, body_name="blocks")


def _gpt(chance: random.Random) -> Training:
    width, words, length, size = (
        chance.choice((16, 24)),
        chance.choice((17, 40)),
        chance.randrange(6, 14),
        chance.choice((4, 8)),
    )
    activation = chance.choice(ACTIVATIONS)
    blocks: list[nn.Module] = [AttentionBlock(width, activation) for _ in range(chance.randrange(1, 4))]
    model = Network(nn.Embedding(words, width), blocks, nn.Sequential(nn.LayerNorm(width), nn.Linear(width, words)))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())

    def batch() -> torch.Tensor:
        return (torch.randint(0, words, (size, 1)) + torch.randint(1, 3, (size, length)).cumsum(1)).remainder(words)

    return Training({"model": model}, {"model": loss}, batch, body=model.blocks, body_name="blocks")


def _gan(chance: random.Random) -> Training:
    wide = chance.choice((2, 6))
    generator, critic = _perceptron(chance, Generator, wide, wide), _perceptron(chance, Critic, wide, 1)

    def criticise(x: torch.Tensor) -> torch.Tensor:
        samples = generator(torch.randn_like(x)).detach()
        return functional.softplus(critic(samples).float()).mean() + functional.softplus(-critic(x).float()).mean()

    def generate(x: torch.Tensor) -> torch.Tensor:
        return functional.softplus(-critic(generator(torch.randn_like(x))).float()).mean()

    return Training(
        {"critic": critic, "generator": generator}, {"critic": criticise, "generator": generate},
        lambda: torch.randn(16, wide) * 0.5 + 1.0, body=critic.blocks, body_name="Critic.blocks", main="critic",
    )  # fmt: skip


class Denoiser(Network):
    """Predicts the noise in what it is given together with the time."""


def _diffusion(chance: random.Random) -> Training:
    wide = chance.choice((2, 8))
    model = _perceptron(chance, Denoiser, wide + 1, wide)

    def loss(x: torch.Tensor) -> torch.Tensor:
        t, added = torch.rand(len(x), 1), torch.randn_like(x)
        noised = (1 - t).sqrt() * x + t.sqrt() * added
        return functional.mse_loss(model(torch.cat([noised, t], 1)).float(), added)

    return Training(
        {"model": model}, {"model": loss}, lambda: torch.randn(16, wide).sign(), body=model.blocks, body_name="blocks"
    )


TRAININGS: dict[str, Callable[[random.Random], Training]] = {
    "mlp": _mlp, "cnn": _cnn, "rnn": _rnn, "gpt": _gpt, "gan": _gan, "diffusion": _diffusion,
}  # fmt: skip


def build(setup: Setup) -> Training:
    """Make a training, always the same for the same setup."""
    chance = random.Random(f"{setup.training} {setup.optimizer} {setup.seed}")
    torch.manual_seed(setup.seed)
    training = TRAININGS[setup.training](chance)
    least, most = RATES[setup.optimizer]
    rate = least * (most / least) ** chance.random()
    training.precision = setup.precision
    training.optimizers = {
        name: OPTIMIZERS[setup.optimizer](model.parameters(), rate) for name, model in training.models.items()
    }
    if setup.precision == "scaler":
        training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** chance.randrange(4, 14))
    if setup.optimizer == "lbfgs":  # which is for a whole data set, not for batches of it
        whole = training.make_batch()
        training.make_batch = lambda: whole
    if setup.compiled:
        for model in training.models.values():
            model.compile(backend="eager")
    return training


def setup_of(
    training: str, chance: random.Random, optimizers: Sequence[str] = tuple(OPTIMIZERS), precisions: Sequence[str] = PRECISIONS,
    *, compiled: bool = True,
) -> Setup:  # fmt: skip
    """Return a training with any of these; one in seven is compiled.

    Two players that both search lines never come to rest; L-BFGS is not scaled, for ``GradScaler`` refuses closures.
    """
    optimizer = chance.choice([name for name in optimizers if training != "gan" or name != "lbfgs"])
    precision = chance.choice([name for name in precisions if optimizer != "lbfgs" or name != "scaler"])
    return Setup(training, optimizer, precision, compiled and chance.random() < 0.15, chance.randrange(1 << 30))
