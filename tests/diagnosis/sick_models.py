"""Small trainings of six kinds, in each of which a sickness can be planted at a step and a place."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WIDTH, SAMPLES = 8, 6

FORWARD = ("log", "exp", "div", "rsqrt", "pow", "acos")
BACKWARD = ("sqrt", "acos_at_1", "half_power", "log_behind_where")


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


OPERATORS = {"acos_at_1": "acos", "half_power": "pow", "log_behind_where": "log", "mask": "softmax"}
"""Where they are not called as the sickness is"""


def kinds(training: str) -> tuple[str, ...]:
    """The sicknesses that a training can have."""
    return (*FORWARD, *BACKWARD, "weight", "inf_weight", *(("embedding", "mask") if training == "gpt" else ("batch",)))


class Dense(Sickly):
    """A residual block of a multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.act = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, WIDTH)`` to the same."""
        h = self.act(self.inner(x))
        h = self.ail(h)
        out: torch.Tensor = self.outer(h)
        return x + out


class Convolution(Sickly):
    """Convolution, batch normalisation, ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, WIDTH, H, W)`` to the same."""
        h = self.ail(self.conv(x))
        return torch.relu(self.norm(h))


class Attention(Sickly):
    """Causal self-attention of one head; the sickness ``mask`` masks everything in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, T, WIDTH)`` to the same."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / WIDTH**0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(0 if self.sickness == "mask" else 1)
        scores = scores.masked_fill(mask, float("-inf"))
        weights = self.drop(torch.softmax(scores, dim=-1))
        out: torch.Tensor = self.out(self.ail(weights @ v))
        return out


class Layer(nn.Module):
    """A transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, T, WIDTH)`` to the same."""
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = self.mlp(self.norm2(x))
        return x + out


class Gpt(nn.Module):
    """A language model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``(N, T)`` to the loss of predicting each token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Recurrent(Sickly):
    """A GRU and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.read = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, T, WIDTH)`` to the same."""
        h, _ = self.gru(x)
        out: torch.Tensor = self.read(self.ail(h))
        return out


class Denoiser(Sickly):
    """Predicts the noise in ``x`` at the time ``t``."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.body, self.out = nn.Linear(1, WIDTH), nn.Sequential(Dense(), Dense()), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """``(N, WIDTH)`` and ``(N, 1)`` to ``(N, WIDTH)``."""
        h = x + functional.silu(self.time(t))
        h = self.body(h)
        h = self.ail(h)
        out: torch.Tensor = self.out(h)
        return out


@dataclass
class Training:
    """Models with their optimizers, and one step of them on a batch. ``losses``: a function for each optimizer."""

    models: dict[str, nn.Module]
    losses: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]
    batch: Callable[[], torch.Tensor]
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)

    def modules(self, kind: type | tuple[type, ...]) -> list[tuple[str, Any]]:
        """The modules of a kind, by the path under which they are told."""
        several = len(self.models) > 1
        return [
            (".".join(filter(None, [type(model).__name__ if several else "", path])), module)
            for model in self.models.values() for path, module in model.named_modules() if isinstance(module, kind)
        ]  # fmt: skip

    def compute(self, x: torch.Tensor, *, autocast: bool) -> None:
        """Train on one batch."""
        for name, loss_of in self.losses:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = loss_of(x)
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizers[name].step()


def noise(*shape: int) -> Callable[[], torch.Tensor]:
    """Batches of that shape."""
    return lambda: torch.randn(SAMPLES, *shape)


def _mlp() -> Training:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Dense(), nn.Dropout(0.1), Dense(), nn.LayerNorm(WIDTH), Dense(), nn.Linear(WIDTH, 1)
    )
    return Training({"m": model}, [("m", lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean())], noise(WIDTH))


def _cnn() -> Training:
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3), Convolution(), nn.MaxPool2d(2), Convolution(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(WIDTH, 5),
    )  # fmt: skip
    target = torch.arange(SAMPLES) % 5
    return Training({"m": model}, [("m", lambda x: functional.cross_entropy(model(x), target))], noise(3, 10, 10))


def _rnn() -> Training:
    model = nn.Sequential(Recurrent(), nn.Tanh(), Recurrent(), nn.Linear(WIDTH, WIDTH))
    return Training({"m": model}, [("m", lambda x: functional.mse_loss(model(x), x.roll(1, 1)))], noise(5, WIDTH))


def _gpt() -> Training:
    model = Gpt()
    return Training({"m": model}, [("m", model)], lambda: torch.randint(0, 16, (SAMPLES, 7)))


class Generator(nn.Sequential):
    """Makes samples of noise."""


class Critic(nn.Sequential):
    """Tells samples from data."""


def _gan() -> Training:
    generator, critic = Generator(Dense(), Dense(), nn.Linear(WIDTH, WIDTH)), Critic(Dense(), Dense(), nn.Linear(WIDTH, 1))

    def criticise(x: torch.Tensor) -> torch.Tensor:
        made = generator(torch.randn_like(x)).detach()
        return functional.softplus(critic(made)).mean() + functional.softplus(-critic(x)).mean()

    def generate(x: torch.Tensor) -> torch.Tensor:
        return functional.softplus(-critic(generator(torch.randn_like(x)))).mean()

    return Training({"c": critic, "g": generator}, [("c", criticise), ("g", generate)], noise(WIDTH))


def _diffusion() -> Training:
    model = Denoiser()

    def denoise(x: torch.Tensor) -> torch.Tensor:
        t, added = torch.rand(len(x), 1), torch.randn_like(x)
        noised = (1 - t).sqrt() * x + t.sqrt() * added
        return functional.mse_loss(model(noised, t), added)

    return Training({"m": model}, [("m", denoise)], noise(WIDTH))


TRAININGS = {"mlp": _mlp, "cnn": _cnn, "rnn": _rnn, "gpt": _gpt, "gan": _gan, "diffusion": _diffusion}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def build(name: str, optimizer: str, seed: int) -> Training:
    """Make one of the trainings, always the same for the same seed."""
    torch.manual_seed(seed)
    training = TRAININGS[name]()
    training.optimizers = {key: OPTIMIZERS[optimizer](model.parameters()) for key, model in training.models.items()}
    return training


@dataclass
class Planted:
    """What was planted: the culprit that is to be named."""

    sickness: str
    kind: str
    operator: str = ""
    module: str = ""
    parameter: str = ""
    sample: int | None = None

    def is_told(self, told: Mapping[str, Any]) -> bool:
        """Return True if an event names this culprit."""
        wanted = {"origin": self.kind, "operator": self.operator, "module": self.module, "parameter": self.parameter}
        right = all(told.get(name) == value for name, value in wanted.items() if value)
        return right and self.sample in {None, told.get("sample")}


def plant(training: Training, sickness: str, chance: random.Random, x: torch.Tensor) -> tuple[Planted, torch.Tensor]:
    """Plant a sickness somewhere; return what is to be found, and the batch."""
    if sickness == "batch":
        sample = chance.randrange(len(x))
        x = x.clone()
        x[sample].view(-1)[chance.randrange(x[sample].numel())] = float("nan")
        return Planted(sickness, "input", sample=sample), x
    if sickness == "embedding":
        ((path, embedding),) = training.modules(nn.Embedding)
        with torch.no_grad():
            embedding.weight[int(x[0, 0])] = float("nan")
        return Planted(sickness, "parameter", parameter=f"{path}.weight"), x
    if sickness in {"weight", "inf_weight"}:
        path, module = chance.choice(training.modules((nn.Linear, nn.Conv2d)))
        with torch.no_grad():
            module.weight.view(-1)[chance.randrange(module.weight.numel())] = float("nan" if sickness == "weight" else "inf")
        return Planted(sickness, "parameter", parameter=f"{path}.weight"), x
    places = training.modules(Attention if sickness == "mask" else Sickly)
    path, module = chance.choice(places)
    module.sickness = sickness
    operator, outer = OPERATORS.get(sickness, sickness), path or type(module).__name__
    return Planted(sickness, "backward" if sickness in BACKWARD else "operator", operator, outer), x
