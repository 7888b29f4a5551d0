"""Values that are not finite, planted in the trainings of `random_trainings` at a step and a place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.diagnosis.random_trainings import AttentionBlock, Setup, Sickly, Training
from tests.diagnosis.random_trainings import build as build_random

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

FORWARD = ("log", "exp", "div", "rsqrt", "pow", "acos")
BACKWARD = ("sqrt", "acos_at_1", "half_power", "log_behind_where")
OPERATORS = {"acos_at_1": "acos", "half_power": "pow", "log_behind_where": "log", "mask": "softmax"}
"""Where they are not called as the sickness is"""


def kinds(training: str) -> tuple[str, ...]:
    """The sicknesses that a training can have."""
    return (*FORWARD, *BACKWARD, "weight", "inf_weight", *(("embedding", "mask") if training == "gpt" else ("batch",)))


def build(name: str, optimizer: str, seed: int, *, autocast: bool = False) -> Training:
    """Make one of the trainings, always the same for the same seed, with units that let what is not finite pass."""
    training = build_random(Setup(name, optimizer, "bfloat16" if autocast else "float32", compiled=False, seed=seed))
    for _, block in training.modules(Sickly):
        if hasattr(block, "activation"):
            block.activation = nn.GELU()
    return training


@dataclass
class Planted:
    """What was planted: the culprit that is to be named."""

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
        return Planted("input", sample=sample), x
    if sickness == "embedding":
        ((path, embedding),) = training.modules(nn.Embedding)
        with torch.no_grad():
            embedding.weight[int(x[0, 0])] = float("nan")
        return Planted("parameter", parameter=f"{path}.weight"), x
    if sickness in {"weight", "inf_weight"}:
        places = training.modules((nn.Linear, nn.Conv2d))
        # what saturates, as a recurrent layer's gates, makes finite values of an infinity
        last = [place for place in places if "Generator" not in place[0]][-1:]
        path, module = chance.choice(places if sickness == "weight" else last)
        with torch.no_grad():
            module.weight.view(-1)[chance.randrange(module.weight.numel())] = float("nan" if sickness == "weight" else "inf")
        return Planted("parameter", parameter=f"{path}.weight"), x
    places = training.modules(AttentionBlock if sickness == "mask" else Sickly)
    path, module = chance.choice(places)
    module.sickness = sickness
    return Planted("backward" if sickness in BACKWARD else "operator", OPERATORS.get(sickness, sickness), path), x
