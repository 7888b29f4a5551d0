"""Healthy and odd runs, of which nothing may be said, each trained as its seed decides. `test_healthy_zoo` has others."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.diagnosis.observing import Look, Observed, observe
from tests.diagnosis.random_trainings import TRAININGS, Setup, Training, build, setup_of

STEPS = 240
Run = Callable[[Look, random.Random], None]


def _training(chance: random.Random, **settings: Any) -> Training:
    training = settings.pop("training", chance.choice(("mlp", "cnn", "rnn", "gpt", "diffusion")))
    optimizer = settings.pop("optimizer", chance.choice(("sgd", "adamw", "fused")))
    precision = settings.pop("precision", "float32")
    return build(Setup(training, optimizer, precision, compiled=False, seed=chance.randrange(1 << 30)))


def _fit(look: Look, training: Training, steps: int, before: Callable[[int], Any] | None = None) -> None:
    for number in range(steps):
        batch = before(number) if before is not None else None
        training.step(batch if isinstance(batch, torch.Tensor) else None)
        look.stepped()


def _optimizer(training: Training) -> torch.optim.Optimizer:
    return training.optimizers[training.main]


def _scheduled(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> Run:
    def run(look: Look, chance: random.Random) -> None:
        training = _training(chance)
        scheduler = make(_optimizer(training))

        def after(number: int) -> None:
            if number:
                scheduler.step()

        _fit(look, training, STEPS, after)

    return run


def plain(look: Look, chance: random.Random) -> None:
    """Any training with any optimizer and precision."""
    _fit(look, build(setup_of(chance.choice(list(TRAININGS)), chance)), STEPS)


def evaluation(look: Look, chance: random.Random) -> None:
    """Evaluation every now and then."""
    training = _training(chance)
    model = training.models[training.main]

    def before(number: int) -> None:
        if not number % 40:
            model.eval()
            with torch.no_grad():
                for _ in range(5):
                    training.losses[training.main](training.make_batch())
            model.train()

    _fit(look, training, STEPS, before)


def accumulation(look: Look, chance: random.Random) -> None:
    """Several backward passes for a step."""
    training, several = _training(chance), chance.randrange(2, 6)
    optimizer = _optimizer(training)
    for number in range(STEPS * several):
        torch.autograd.backward(training.losses["model"](training.make_batch()) / several)
        if not (number + 1) % several:
            optimizer.step()
            optimizer.zero_grad()
            look.stepped()


def gan(look: Look, chance: random.Random) -> None:
    """Two players."""
    _fit(look, _training(chance, training="gan", optimizer="adamw"), STEPS)


def head_only(look: Look, chance: random.Random) -> None:
    """A head on a backbone that is frozen."""
    training = _training(chance, training="cnn")
    for parameter in [*training.models["model"].stem.parameters(), *training.body.parameters()]:  # type: ignore[union-attr]
        parameter.requires_grad = False
    _fit(look, training, STEPS)


def lengths(look: Look, chance: random.Random) -> None:
    """Sequences that grow longer."""
    training = _training(chance, training="gpt")

    def before(number: int) -> torch.Tensor:
        length = 3 + number // 30
        return (torch.randint(0, 17, (6, 1)) + torch.randint(1, 3, (6, length)).cumsum(1)).remainder(17)

    _fit(look, training, STEPS, before)


def harder(look: Look, chance: random.Random) -> None:
    """Inputs that become harder: twice as wide in the end."""
    training = _training(chance, training=chance.choice(("mlp", "rnn")))
    _fit(look, training, STEPS, lambda number: training.make_batch() * (1 + number / STEPS))


def tiny_batches(look: Look, chance: random.Random) -> None:
    """One sample a step."""
    training = _training(chance, training=chance.choice(("mlp", "rnn", "gpt")))
    for group in _optimizer(training).param_groups:
        group["lr"] /= 10  # with that of whole batches, SGD diverges in some
    _fit(look, training, 2 * STEPS, lambda _: training.make_batch()[:1])


def label_noise(look: Look, chance: random.Random) -> None:
    """A third of the labels is wrong."""
    torch.manual_seed(chance.randrange(1 << 30))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2 * STEPS):
        x = torch.randn(24, 8)
        labels = torch.where(torch.rand(24) < 0.33, torch.randint(0, 4, (24,)), x[:, :4].argmax(1))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        look.stepped()


def scaled(look: Look, chance: random.Random) -> None:
    """A loss scale that grows, overflows a few times and is halved."""
    training = _training(chance, optimizer=chance.choice(("sgd", "adamw")))
    training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=40)
    _fit(look, training, STEPS)


def clipping(look: Look, chance: random.Random) -> None:
    """Gradients are clipped in most steps."""
    training = _training(chance)
    parameters = list(training.models[training.main].parameters())

    def clip() -> None:
        nn.utils.clip_grad_norm_(parameters, 0.1)

    training.after_backward = clip
    _fit(look, training, STEPS)


def pauses(look: Look, chance: random.Random) -> None:
    """A notebook whose cells are run minutes apart."""
    training = _training(chance)

    def before(number: int) -> None:
        if not number % 60:
            assert look.clock is not None
            look.clock.sleep(chance.uniform(60, 4000))

    _fit(look, training, STEPS, before)


def checkpoints(look: Look, chance: random.Random) -> None:
    """A checkpoint every twenty steps."""
    training = _training(chance)

    def before(number: int) -> None:
        if not number % 20:
            torch.save({"m": training.models["model"].state_dict(), "o": _optimizer(training).state_dict()}, io.BytesIO())

    _fit(look, training, STEPS, before)


def resumed(look: Look, chance: random.Random) -> None:
    """Back to an earlier checkpoint in the middle of the run."""
    training = _training(chance)
    model, kept = training.models["model"], dict[str, Any]()

    def before(number: int) -> None:
        if number == 60:
            kept["state"] = copy.deepcopy(model.state_dict())
        if number == 150:
            model.load_state_dict(kept["state"])

    _fit(look, training, STEPS, before)


def several_optimizers(look: Look, chance: random.Random) -> None:
    """One optimizer for the embedding, another one for the rest."""
    training = _training(chance, training="gpt", optimizer="adamw")
    model: Any = training.models["model"]
    sparse = torch.optim.SGD(model.stem.parameters(), lr=1e-2)
    dense = torch.optim.AdamW([*model.blocks.parameters(), *model.head.parameters()], lr=1e-3)
    for _ in range(STEPS):
        sparse.zero_grad()
        dense.zero_grad()
        torch.autograd.backward(training.losses["model"](training.make_batch()))
        sparse.step()
        dense.step()
        look.stepped()


def profiled(look: Look, chance: random.Random) -> None:
    """A profiler, torch's own, on for some steps."""
    training = _training(chance)
    _fit(look, training, 40)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        _fit(look, training, 8)
    _fit(look, training, STEPS - 48)


def anomaly_mode(look: Look, chance: random.Random) -> None:
    """The search for NaN of torch itself on."""
    with torch.autograd.set_detect_anomaly(mode=True):
        _fit(look, _training(chance), STEPS // 2)


def shapes(look: Look, chance: random.Random) -> None:
    """A compiled model with batches of two sizes."""
    torch._dynamo.reset()
    training = build(Setup("mlp", "adamw", "float32", compiled=True, seed=chance.randrange(1 << 30)))
    _fit(look, training, STEPS, lambda number: training.make_batch()[: 5 if number % 10 == 9 else 8])


_rates = torch.optim.lr_scheduler
HEALTHY: dict[str, Run] = {
    "any training": plain,
    "any training, again": plain,
    "warm-up": _scheduled(lambda o: _rates.LinearLR(o, 1e-3, total_iters=80)),
    "cosine to zero": _scheduled(lambda o: _rates.CosineAnnealingLR(o, STEPS)),
    "restarts of the learning rate": _scheduled(lambda o: _rates.CosineAnnealingWarmRestarts(o, 60)),
    "one cycle": _scheduled(lambda o: _rates.OneCycleLR(o, 4 * o.param_groups[0]["lr"], total_steps=STEPS + 2)),
    "a step of the learning rate": _scheduled(lambda o: _rates.StepLR(o, 80)),
    "evaluation": evaluation, "accumulation": accumulation, "two players": gan, "a head alone": head_only,
    "growing sequences": lengths, "a curriculum": harder, "batches of one": tiny_batches,
    "label noise and dropout": label_noise, "loss scale that overflows": scaled, "clipping": clipping, "pauses": pauses,
    "checkpoints": checkpoints, "back to a checkpoint": resumed, "two optimizers": several_optimizers,
    "a profiler": profiled, "anomaly mode": anomaly_mode, "two shapes, compiled": shapes,
}  # fmt: skip


def run_healthy(name: str, seed: int) -> Observed:
    """Train one of them."""
    chance = random.Random(f"{name} {seed}")
    torch.manual_seed(chance.randrange(1 << 30))
    settings: dict[str, Any] = {} if chance.random() < 0.5 else {"grad_interval": chance.randrange(1, 4)}
    return observe(lambda look: HEALTHY[name](look, chance), fed=name == "pauses", **settings)
