"""Find rectifiers of which half of the units or more give zero for every sample, for long: dead units.

Such a unit has no gradient and learns nothing any more (Lu et al. 2019, "Dying ReLU and Initialization"). The gradient norms of
its layer do not show it, for those of the living units are in them. That some units are dead is ordinary; of a layer of which
half are, the learning rate or a bias has killed them. A unit that fires seldom is alive: so a verdict takes many samples.

A unit is a column of a matrix, a channel of an image, and an element of the last dimension of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.detect.stuck_layers import LASTING_STEPS
from torchobs.probes.activations.statistics import MOST_ELEMENTS

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

RECTIFIERS = frozenset({"ReLU", "ReLU6"})
DEAD_SHARE = 0.5
LEAST_UNITS, LEAST_LOOKS, LEAST_SAMPLES = 8, 16, 1024
"""Before a verdict"""
_MATRIX, _SEQUENCE = 2, 3
_MOST_TOLD = 16


class Since(NamedTuple):
    """What a count of units that have not fired rests on."""

    units: int
    looks: int
    samples: int
    steps: int

    @property
    def enough(self) -> bool:
        """Whether that is long enough for a verdict."""
        return self.looks >= LEAST_LOOKS and self.samples >= LEAST_SAMPLES and self.steps >= LASTING_STEPS


class FiredUnits:
    """Which units of one module have fired; in the training thread, where the outputs are. Begins anew after a verdict."""

    __slots__ = ("_begun", "_fired", "_looks", "_samples")

    def __init__(self) -> None:
        self._fired: Any = None
        self._begun = self._looks = self._samples = 0

    def add(self, output: Any, step: int) -> tuple[Any, Since] | None:
        """Take in an output; return the number of units that have not fired, a tensor of one element, and since when.

        ``None`` for an output without units. To be called without grad.
        """
        dimensions = output.dim()
        if dimensions < _MATRIX:
            return None
        axis = dimensions - 1 if dimensions <= _SEQUENCE else 1
        samples, units = output.shape[0], output.shape[axis]
        if units < LEAST_UNITS:
            return None
        part = output.detach().narrow(0, 0, min(samples, max(1, MOST_ELEMENTS * samples // output.numel())))
        fired = (part > 0).movedim(axis, -1).reshape(-1, units).any(0)
        if self._fired is None or self._fired.shape != fired.shape or self._fired.device != fired.device:
            self._fired, self._begun, self._looks, self._samples = fired, step, 0, 0
        else:
            self._fired = self._fired | fired
        self._looks, self._samples = self._looks + 1, self._samples + part.shape[0]
        since = Since(units, self._looks, self._samples, step - self._begun)
        silent = (~self._fired).sum().reshape(1)
        if since.enough:
            self._fired = None
        return silent, since


class DeadUnits:
    """Judges the counts; in the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._told: set[str] = set()

    def judge(self, layer: str, silent: float, since: Since, step: int) -> None:
        """Tell a layer once."""
        if not since.enough or silent < DEAD_SHARE * since.units or layer in self._told or len(self._told) >= _MOST_TOLD:
            return
        self._told.add(layer)
        told = {"layer": layer, "units_dead": int(silent), "units": since.units, "steps": since.steps}
        self._context.writer.event(catalog.EVENT_DEAD_UNITS.name, told, step)
        what = f"{int(silent)} of {since.units} units of {layer} gave zero for every sample of {since.steps} steps"
        self._context.warn_limited("dead units", f"{what}: they learn nothing any more")


def is_rectifier(module: Any) -> bool:
    """Return True for a module whose units may die, by the names of its classes."""
    return any(kind.__name__ in RECTIFIERS for kind in type(module).__mro__)
