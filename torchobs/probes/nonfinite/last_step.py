"""Examine the gradients that a training leaves: those of its last backward pass, which perhaps nobody has measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs.probes.core.boundaries import BACKWARD_BEGINS, BACKWARD_ENDS
from torchobs.probes.nonfinite.ending import bad_gradients_left
from torchobs.probes.nonfinite.locate import ModuleNames

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchobs.probes.core.step_recorder import StepRecorder

_MOST_NAMED = 8


def step_of_gradients(recorder: StepRecorder) -> int:
    """Return the number of the step whose backward pass was the last: the one in progress, or the last that has ended."""
    begun = any(stamp & 15 in {BACKWARD_BEGINS, BACKWARD_ENDS} for stamp in list(recorder.trace))
    return recorder.in_progress if begun and recorder.likely_end is None else recorder.last_complete


def faults(parameters: Sequence[Any], models: Iterable[Any]) -> dict[str, Any]:
    """Return the attributes of the event for those whose gradient is not finite; empty if none is."""
    bad = bad_gradients_left(parameters)
    if not bad:
        return {}
    names = ModuleNames(bad, models)
    layers = list(dict.fromkeys(names.owner(name) for one in bad if (name := names.of(one))))
    kinds = ["nan"] if any(bool(one.grad.isnan().any()) for one in bad[:_MOST_NAMED]) else ["inf"]
    return {"layers": layers[:_MOST_NAMED], "layers_affected": len(layers), "kinds": kinds, "measured": False}
