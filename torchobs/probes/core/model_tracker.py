"""Detect a change of model in the same process: the next fold of a cross-validation, the next trial of a sweep.

A change is the first step of an optimizer none of whose parameters was ever stepped, while training is in progress, and not
with the gradients of another one's step: an actor's may begin late, and uses the critic's backward pass. Baselines
of the former model (loss, norms, step times) do not apply to the new one, so the first record of the new one carries
``StepFlag.NEW_MODEL``. A new optimizer over the same parameters, or over more besides them, continues the same model.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from torchobs import catalog
from torchobs.detect.spikes import WARM_UP
from torchobs.support.rate_limit import RateLimiter
from torchobs.support.references import TensorReference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchobs.flight.writer.writer import FlightWriter

LEAST_STEPS = WARM_UP
"""A model with fewer steps has no baseline yet. So the optimizers of one training may begin to step one after the other (a GAN
that trains its critic first), and a new model every few steps (Reptile's, an adversarial input's) is one training."""
_Reference = TypeVar("_Reference", bound="ref[Any]")
_EVERY_NS, _BURST = 60_000_000_000, 32
_ROOM = 1024


class Models:
    """Optimizers and parameters that have been stepped. In the training thread."""

    __slots__ = ("_begun", "_optimizers", "_parameters", "_room", "changes", "since")

    def __init__(self) -> None:
        self.changes = 0
        self.since = 0
        """The step after which the current model began"""
        self._begun = 0
        """The step after which the last set of unseen parameters began, whether or not it counted as another model"""
        self._optimizers: dict[int, ref[Any]] = {}
        self._parameters: dict[int, TensorReference] = {}
        self._room = _ROOM

    def knows(self, optimizer: object) -> bool:
        """Return True if it has stepped before."""
        return _knows(self._optimizers, optimizer)

    def begins(self, optimizer: Any, step: int, *, goes_on: bool = True) -> bool:
        """Return True if another model begins with this optimizer's step, the one after ``step``.

        ``goes_on``: whether training has gone on since the last optimizer's step.
        """
        if self.knows(optimizer):
            return False
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        unseen = bool(self._parameters) and not any(_knows(self._parameters, parameter) for parameter in parameters)
        another = unseen and goes_on and bool(parameters) and step - self._begun >= LEAST_STEPS
        if unseen and parameters:
            self._begun = step
        if another:
            self.changes, self.since = self.changes + 1, step
        self._optimizers[id(optimizer)] = ref(optimizer)
        self._parameters.update((id(parameter), TensorReference(parameter)) for parameter in parameters)
        self._make_room()
        return another

    def _make_room(self) -> None:
        if len(self._parameters) + len(self._optimizers) > self._room:
            self._optimizers, self._parameters = _alive(self._optimizers), _alive(self._parameters)
            self._room = max(_ROOM, 2 * (len(self._parameters) + len(self._optimizers)))


class ModelChanges:
    """Writes events of model changes. In the sampler thread; a part of :class:`~torchobs.probes.step.steps.StepProbe`."""

    def __init__(self, models: Models, writer: FlightWriter) -> None:
        self._models, self._writer, self._seen = models, writer, models.changes
        self._budget = RateLimiter(_EVERY_NS, _BURST)

    def sample(self) -> None:
        """Write an event if the model has changed; after the first ones, at most one a minute."""
        changes, since = self._models.changes, self._models.since
        if changes == self._seen or not self._budget.take(monotonic_ns()):
            return
        self._seen = changes
        self._writer.event(catalog.EVENT_MODEL_CHANGE.name, {"changes": changes, "steps_before": since}, since + 1)


def _knows(known: Mapping[int, ref[Any]], item: object) -> bool:
    found = known.get(id(item))
    return found is not None and found() is item


def _alive(known: dict[int, _Reference]) -> dict[int, _Reference]:
    return {key: item for key, item in known.items() if item() is not None}
