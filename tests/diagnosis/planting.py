"""What the planted sicknesses share: train, and look for what is said from a step on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tests.diagnosis.observing import Look, Observed, observe
from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tests.diagnosis.random_trainings import Training


class Verdict(NamedTuple):
    """Whether a sickness was found, its culprit named, and after how many steps."""

    found: bool
    culprit: bool | None = None
    """``None``: there is none to be named"""
    steps: int | None = None
    """``None``: said of the whole run"""
    note: str = ""


def train(
    training: Training, steps: int, before: Callable[[int], torch.Tensor | None], step_s: float = 0.0, **settings: Any
) -> Observed:
    """Train that many steps; ``before`` is called with the number of each, and may return its batch.

    ``step_s``: how long each of them takes on a clock that is fed; 0: as long as it takes.
    """

    def train(look: Look) -> None:
        for number in range(1, steps + 1):
            training.step(before(number))
            if look.clock is not None:
                look.clock.sleep(step_s)
            look.stepped()

    return observe(train, fed=step_s > 0, **settings)


def _layer(training: Training, index: int, part: str = "") -> str:
    return ".".join(filter(None, [training.body_name, str(index), part]))


def of_block(training: Training, name: str, index: int) -> bool:
    """Whether a layer's name is that of the body's block of that index, or of a part of it."""
    layer = _layer(training, index)
    bare = layer.removeprefix("Critic.")  # the first model that is seen needs no prefix
    return name in {layer, bare} or name.startswith((f"{layer}.", f"{bare}."))


def first_anomaly(observed: Observed, since: int, *kinds: str) -> Any:
    """The first anomaly of one of these kinds since a step; ``None`` if there is none."""
    facts = [fact for fact in observed.events(catalog.EVENT_ANOMALY, since) if fact.text("kind") in kinds]
    return min(facts, key=lambda fact: fact.step or 0, default=None)


def notes(observed: Observed) -> str:
    """What was said of the run, cut to what a table's reader wants."""
    return "; ".join(observed.said())[:600]
