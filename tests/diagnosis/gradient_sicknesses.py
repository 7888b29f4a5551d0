"""Gradients that explode, vanish or do not arrive, each planted at a random step and layer."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import nn

from tests.diagnosis.observing import Observed
from tests.diagnosis.planting import Verdict, first_anomaly, notes, of_block, train
from tests.diagnosis.random_trainings import Setup, Training, build
from torchobs import catalog


def burst(setup: Setup, chance: random.Random) -> Verdict:
    """In a single step one layer's gradient is a hundred to ten thousand times as large as usually the whole."""
    training, at, factor = build(setup), chance.randrange(30, 70), 10 ** chance.uniform(2, 4)
    index = chance.randrange(len(training.body))
    module: nn.Module = training.body[index].linear  # type: ignore[assignment]

    def norm(gradients: list[torch.Tensor]) -> float:
        return math.hypot(*(float(gradient.norm()) for gradient in gradients))

    def grow() -> None:
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        every = [parameter.grad for parameter in training.models[training.main].parameters() if parameter.grad is not None]
        part = norm(gradients) / norm(every)
        for gradient in gradients:
            gradient.mul_(factor / max(part, 1e-6))

    def before(number: int) -> None:
        training.after_backward = grow if number == at else None

    observed = train(training, at + 20, before, grad_interval=1)
    fact = first_anomaly(observed, at, "gradient_explosion")
    if fact is None:
        return Verdict(found=False, note=f"factor {factor:.3g} at {at}: {notes(observed)}")
    return Verdict(
        fact.step == at, of_block(training, fact.text("layer"), index), fact.step - at, f"{index}: {fact.attributes}"
    )


def explosion(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on the gradient grows a thousandfold at a block on its way back, and so in all layers before it."""
    training, at, factor = build(setup), chance.randrange(150, 300), 10 ** chance.uniform(2.5, 4)
    index = chance.randrange(len(training.body))
    before_it = [*training.models[training.main].stem.parameters(), *training.body[: index + 1].parameters()]  # type: ignore[union-attr]

    def grow() -> None:
        for parameter in before_it:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def before(number: int) -> None:
        training.after_backward = grow if number >= at else None

    observed = train(training, at + 40, before, grad_interval=chance.randrange(1, 5))
    fact = first_anomaly(observed, at, "gradient_explosion", "nonfinite_gradient", "nonfinite_loss", "loss_spike")
    if fact is None:
        return Verdict(found=False, note=f"factor {factor:.3g} at {at}: {notes(observed)}")
    named = next((one for one in observed.events(catalog.EVENT_ANOMALY, at) if one.text("layer")), None)
    right = of_block(training, named.text("layer"), index) if named is not None and (named.step or 0) - at <= 1 else None
    return Verdict(found=True, culprit=right, steps=fact.step - at, note=f"{index}: {named and (named.step, named.attributes)}")


def vanishing(setup: Setup, chance: random.Random) -> Verdict:
    """The loss, and so every gradient, is a thousandth to a hundred-millionth of what it was."""
    training, at, factor = build(setup), chance.randrange(150, 400), 10 ** -chance.uniform(3.5, 8)

    def fade() -> None:
        for parameter in training.models[training.main].parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def before(number: int) -> None:
        training.after_backward = fade if number >= at else None

    observed = train(training, at + 40, before, grad_interval=chance.randrange(1, 5))
    fact = first_anomaly(observed, at, "gradient_vanishing")
    if fact is None:
        return Verdict(found=False, note=f"factor {factor:.3g} at {at}: {notes(observed)}")
    return Verdict("gradient_vanishing" in observed.kinds(), None, fact.step - at)


def saturated(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on the units of a block are saturated: nothing comes back through them."""
    training, at = build(setup), chance.randrange(1, 200)
    index = chance.randrange(len(training.body))
    for number, block in enumerate(training.body):
        block.residual = False  # type: ignore[assignment]
        if number == index:
            block.activation = chance.choice((nn.Tanh, nn.Sigmoid, nn.ReLU, nn.Hardtanh))()
    linear: Any = training.body[index].linear
    norm: Any = getattr(training.body[index], "norm", linear)
    relu = isinstance(training.body[index].activation, nn.ReLU)

    def before(number: int) -> None:
        if number == at:
            with torch.no_grad():
                norm.bias.fill_(-2000.0 if relu or chance.random() < 0.5 else 2000.0)
                norm.weight.mul_(0.1)

    observed = train(training, at + 400, before)
    return _unmoved(training, observed, at, index)


def cut(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on the backbone is cut off behind a block: detached, or multiplied by 0.

    A step takes as long as of models that people train: one of 2 ms is measured seldom, and more often once a minute at most.
    """
    training, at = build(setup), chance.randrange(100, 250)
    index = chance.randrange(len(training.body) - 1) if len(training.body) > 1 else 0
    way, ill = chance.choice(("detach", "zero")), [False]
    if setup.precision == "scaler":
        way = "zero"  # a scaler raises where an optimizer has no gradient at all

    def behind(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not ill[0]:
            return output
        return output.detach() if way == "detach" else output * 0.0

    training.body[index].register_forward_hook(behind)

    def before(number: int) -> None:
        ill[0] = number >= at

    observed = train(training, at + 400, before, step_s=0.05)
    return _unmoved(training, observed, at, index, next_too=way == "zero")


def _unmoved(training: Training, observed: Observed, at: int, index: int, *, next_too: bool = False) -> Verdict:
    facts = observed.events(catalog.EVENT_UNMOVED_LAYERS, at)
    if not facts:
        return Verdict(found=False, note=notes(observed))
    fact = facts[0]
    place = fact.text("at")
    near = of_block(training, place, index) or (
        (next_too or fact.text("cause") == "dead_units") and (of_block(training, place, index + 1) or "head" in place)
    )
    return Verdict("unmoved_layers" in observed.kinds(), near, (fact.step or 0) - at, f"{index}: {fact.attributes}")
