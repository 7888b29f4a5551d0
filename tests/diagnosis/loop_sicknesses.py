"""Mistakes of a training loop, planted in random trainings."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch

from tests.diagnosis.observing import Look, Observed, observe
from tests.diagnosis.planting import Verdict, notes
from tests.diagnosis.random_trainings import OPTIMIZERS, Loss, Setup, Training, build
from torchobs import catalog
from torchobs.tensors.names import layer_of


def _item(loss: torch.Tensor) -> torch.Tensor:
    return torch.tensor(loss.item(), requires_grad=True)


CUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (_item, lambda loss: loss.detach().requires_grad_())


def _cut_off(training: Training, cut: Callable[[torch.Tensor], torch.Tensor], *, without_grad: bool) -> None:
    loss: Loss = training.losses[training.main]

    def compute(x: Any) -> torch.Tensor:
        with torch.set_grad_enabled(not without_grad):
            result = loss(x)
        return cut(result)

    training.losses[training.main] = compute


def _built(setup: Setup, steps: int, plant: Callable[[Training], object]) -> tuple[Training, Observed]:
    """Train what is built, and made sick, in the session: models that were there before are known after a second only."""
    trainings = list[Training]()

    def run(look: Look) -> None:
        trainings.append(build(setup))
        plant(trainings[0])
        for _ in range(steps):
            trainings[0].step()
            look.stepped()

    observed = observe(run)
    return trainings[0], observed


def detached(setup: Setup, chance: random.Random) -> Verdict:
    """The loss is cut off from the model, from the first step on."""
    cut, without_grad = chance.choice(CUTS), chance.random() < 0.3
    training, observed = _built(setup, 120, lambda built: _cut_off(built, cut, without_grad=without_grad))
    facts, layers = observed.events(catalog.EVENT_UNMOVED_LAYERS, cause="no_gradient"), _layers(training)
    named = [name.removeprefix("Critic.") for name in facts[0].texts("layers")] if facts else []
    right = bool(named) and set(layers).issuperset(named) and facts[0].count("layers_affected") == len(layers)
    return Verdict("unmoved_layers" in observed.kinds(), right, facts[0].step if facts else None, notes(observed))


def _layers(training: Training) -> list[str]:
    """Return the names of the main model's layers."""
    return list(dict.fromkeys(layer_of(name) for name, _ in training.models[training.main].named_parameters()))


def other_model(setup: Setup, chance: random.Random) -> Verdict:
    """The optimizer was made before the model was copied, and has the parameters of the first one."""
    del chance
    kept = list[torch.nn.Module]()

    def plant(training: Training) -> None:
        kept.append(copy.deepcopy(training.models[training.main]))
        rate = training.optimizers[training.main].param_groups[0]["lr"]
        training.optimizers[training.main] = OPTIMIZERS[setup.optimizer](kept[0].parameters(), rate)

    training, observed = _built(setup, 120, plant)
    facts = observed.events(catalog.EVENT_UNMOVED_LAYERS, cause="no_gradient")
    right = bool(facts) and facts[0].count("layers_affected") == len(_layers(training))
    return Verdict("unmoved_layers" in observed.kinds(), right, facts[0].step if facts else None, notes(observed))


def part_detached(setup: Setup, chance: random.Random) -> Verdict:
    """What comes into one of the blocks is detached, from the first step on."""
    places = list[int]()

    def plant(training: Training) -> None:
        places.append(chance.randrange(len(training.body)))
        training.body[places[0]].register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(), *inputs[1:]))

    training, observed = _built(setup, 200, plant)
    facts, layers = observed.events(catalog.EVENT_UNMOVED_LAYERS, cause="unused"), _layers(training)
    before = tuple(f"blocks.{index}." for index in range(places[0]))
    names = [name for name in layers if f"{name}.".startswith(("stem.", *before))]
    named = [name.removeprefix("Critic.") for name in facts[0].texts("layers")] if facts else []
    right = bool(facts) and named == names[:8] and facts[0].count("layers_affected") == len(names)
    return Verdict(bool(facts), right, facts[0].step if facts else None, f"before {places}: {named} {notes(observed)}")


def given_to_none(setup: Setup, chance: random.Random) -> Verdict:
    """The optimizer has the parameters of the head alone, and the others have gradients."""
    del chance

    def plant(training: Training) -> None:
        rate, model = training.optimizers[training.main].param_groups[0]["lr"], training.models[training.main]
        training.optimizers[training.main] = OPTIMIZERS[setup.optimizer](model.head.parameters(), rate)  # type: ignore[union-attr]

    training, observed = _built(setup, 400, plant)
    facts, model = observed.events(catalog.EVENT_LEFT_OUT_PARAMETERS), training.models[training.main]
    names = [name for name, _ in model.named_parameters() if not name.startswith("head.")]
    right = bool(facts) and set(names).issuperset(name.removeprefix("Critic.") for name in facts[0].texts("parameters"))
    right = right and facts[0].count("parameters_affected") == len(names)
    return Verdict(bool(observed.text("left_out")), right, facts[0].step if facts else None, notes(observed))


def keeping(setup: Setup, chance: random.Random) -> Verdict:
    """Every loss is kept with its graph: in a list, or in a sum."""
    kept, total = list[torch.Tensor](), list[torch.Tensor]()
    in_list = chance.random() < 0.5

    def plant(training: Training) -> None:
        loss: Loss = training.losses[training.main]

        def compute(x: Any) -> torch.Tensor:
            result = loss(x)
            if in_list:
                kept.append(result)
            else:
                total[:] = [total[0] + result if total else result]
            return result

        training.losses[training.main] = compute

    _, observed = _built(setup, 200, plant)
    facts = observed.events(catalog.EVENT_LOOP_MISTAKE, kind="losses_kept")
    return Verdict("losses_kept" in observed.kinds(), None, facts[0].step if facts else None, notes(observed))
