"""Detect backward passes without any step: an optimizer that never steps, or steps that are made without one of torch's.

An analysis (saliency, an adversarial input, influence functions) has backward passes, too, but no optimizer of what it looks
at. Whether a step comes after all is known when the event is read: some accumulate gradients over hundreds of micro-batches.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.core.timeline import BACKWARD_ENDS
from torchobs.support.references import living_optimizers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import ProbeContext

LEAST, LEAST_MISTAKEN = 50, 100
"""Backward passes without a step after which that is said, and after which the optimizer's step is missing"""
PATIENCE_S = 120.0
"""Time since the first one after which it is said as well"""


class NeverStepped:
    """A part of :class:`~torchobs.probes.step.steps.StepProbe`, in the sampler thread. Each is reported once."""

    def __init__(self, context: ProbeContext, clock: Callable[[], float] = monotonic) -> None:
        self._context, self._clock = context, clock
        self._due, self._since_s, self._said = LEAST, 0.0, False

    def sample(self) -> None:
        """Look for an optimizer, which holds the GIL for some 100 ms, if no step has ended after so many backward passes.

        Soon after: a script that is short has forgotten it when its function has ended.
        """
        recorder = self._context.recorder
        if recorder.step or recorder.direct or self._due == sys.maxsize or recorder.optimizers():
            return
        count = sum(stamp & 15 == BACKWARD_ENDS for stamp in recorder.trace.copy())
        self._since_s = self._since_s or (self._clock() if count else 0.0)
        is_late = not self._said and bool(count) and self._clock() - self._since_s > PATIENCE_S
        if count < self._due and not is_late:
            return
        self._context.yield_gil()
        kind = next((type(optimizer).__name__ for optimizer in living_optimizers() if _gets_gradients(optimizer, count)), None)
        self._due = LEAST_MISTAKEN if count < LEAST_MISTAKEN else 4 * count
        if kind is None:
            self._say(count)
        elif count >= LEAST_MISTAKEN:
            self._report(kind, count)

    def _say(self, count: int) -> None:
        if not self._said:
            self._said = True
            passes = f"{count} backward pass{'' if count == 1 else 'es'}"
            text = (
                f"{passes} and no step of an optimizer of torch's: if steps are made otherwise, call torchobs.step() after each"
            )
            self._context.warn_limited("no steps", text)

    def _report(self, kind: str, count: int) -> None:
        self._due = sys.maxsize
        attributes = {"kind": "never_stepped", "optimizer": kind, "backward_passes": count}
        self._context.event(catalog.EVENT_LOOP_MISTAKE, attributes)
        self._context.warn_limited(
            "loop never_stepped", f"{count} backward passes and no step of the optimizer ({kind}): is optimizer.step() missing?"
        )


def _gets_gradients(optimizer: Any, count: int) -> bool:
    """Return True if a parameter of the optimizer has a gradient, and was not updated by hand after those backward passes."""
    parameters = [each for group in list(getattr(optimizer, "param_groups", ())) for each in list(group["params"])]
    return any(each.grad is not None and each._version < count // 2 for each in parameters)
