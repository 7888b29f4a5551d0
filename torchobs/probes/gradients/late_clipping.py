"""Detect gradients that are clipped after the optimizer's step: it has used them as they were, and nobody will any more.

When the first backward pass of a step begins, no gradient has come since the last step. A clipping by norm in between was of
gradients that the last step has used: a loop that clips in time has clipped before that step's end. Gradients that are never
set to zero are another mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.stuck_layers import LASTING_SAMPLES
from torchobs.probes.core.boundaries import BACKWARD_ENDS

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.gradients.clipping import ClipWatch
    from torchobs.support.error_guard import CircuitBreaker

_MOST_REFUTED = 3
"""Looks that found none, after which the loop is left alone"""


class LateClipping:
    """A part of the gradient probe; the sampler thread asks for each look. Told once."""

    def __init__(self, context: ProbeContext, clip: ClipWatch, breaker: CircuitBreaker) -> None:
        self._context, self._clip, self._look = context, clip, breaker.guard(self._look_now)
        self._late = self._refuted = self._step = 0
        self._done = False

    def _look_now(self) -> None:
        """Look, when an outermost backward pass begins. In the training thread."""
        recorder = self._context.recorder
        step = recorder.step
        if step == self._step or not recorder.sole:  # several, and steps by hand, have gradients that others of them leave
            return
        if any(stamp & 15 == BACKWARD_ENDS for stamp in recorder.trace):  # in the next step, then
            self._context.at_backward(self._look)
            return
        self._step = step
        if self._clip.has_clipped_since(step):
            self._late += 1
        else:
            self._late, self._refuted = 0, self._refuted + 1

    def sample(self) -> None:
        """Ask for the next look, or tell what was found. In the sampler thread."""
        if self._done or self._clip.limit is None:
            return
        self._done = self._refuted >= _MOST_REFUTED or self._late >= LASTING_SAMPLES
        if not self._done:
            self._context.at_backward(self._look)
        elif self._late:
            self._context.writer.event(catalog.EVENT_LOOP_MISTAKE.name, {"kind": "clipped_late"}, self._step)
            text = "gradients are clipped after optimizer.step(), which has used them: clip between backward() and step()"
            self._context.warn_limited("loop clipped_late", text)
