"""Backward passes without any step: an optimizer that never steps, or steps without an optimizer of torch.

An analysis (saliency, an adversarial input, influence functions) has backward passes, too, but no optimizer for its parameters;
and optimizers may be left from before. So hooks on the parameters of each show whether backward passes reach it. Whether a step
comes after all is known when the event is read: some accumulate gradients over hundreds of micro-batches.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import ref

from torchobs.probes.step_recorder import parameters_of
from torchobs.probes.timeline import BACKWARD_ENDS
from torchobs.support.text import plural
from torchobs.tensors.references import living_optimizers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from torchobs.probes.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

LEAST, LEAST_MISTAKEN = 50, 100
"""Backward passes without a step after which that is reported, and after which the optimizer's step is missing"""
PATIENCE_S = 120.0
"""Time since the first one after which it is reported as well"""
_MOST, _MOST_PARAMETERS = 32, 256
"""Optimizers, and parameters of each, that are watched until a gradient comes to one"""


class NeverStepped:
    """A part of :class:`~torchobs.probes.steps.StepProbe`, in the sampler thread. Each is reported once."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker, clock: Callable[[], float] = monotonic) -> None:
        self._context, self._clock = context, clock
        self._watch, self._unwatch = breaker.guard(self._watch_now), breaker.guard(self.remove)
        self._due, self._since_s, self._reported = LEAST, 0.0, False
        self._candidates: list[ref[Any]] = []
        self._handles: list[RemovableHandle] = []
        self._examined_at = 0
        """Backward passes after which the candidates were examined; 0 while they are to be"""
        self._reached = ""
        """Class of an optimizer that a gradient has reached"""

    def sample(self) -> None:
        """Look for optimizers, which holds the GIL for some 100 ms, if no step has ended after so many backward passes."""
        recorder = self._context.recorder
        is_over = recorder.step or recorder.direct or self._due == sys.maxsize or recorder.optimizers()
        if self._handles and (is_over or self._reached):
            self._context.at_backward(self._unwatch)
        if is_over:
            return
        count = sum(stamp & 15 == BACKWARD_ENDS for stamp in recorder.trace.copy())
        self._since_s = self._since_s or (self._clock() if count else 0.0)
        if self._reached:
            if count >= LEAST_MISTAKEN:
                self._due = sys.maxsize
                self._context.report("never_stepped", optimizer=self._reached, backward_passes=count)
        elif self._examined_at and not (self._handles or self._reported):
            self._report(self._examined_at)
        elif count >= self._due or (count and not self._reported and self._clock() - self._since_s > PATIENCE_S):
            self._check_steps(count)

    def _check_steps(self, count: int) -> None:
        """Watch which optimizer gradients reach; report that no step is made, if there is none, or none is reached."""
        self._context.yield_gil()
        self._due, self._since_s = 4 * count if self._reported else count + LEAST, self._clock()
        optimizers = [] if self._handles else living_optimizers()
        self._candidates = [ref(optimizer) for optimizer in optimizers]
        if optimizers:
            self._context.at_backward(partial(self._watch, count))
        elif not self._reported:
            self._report(count)

    def _report(self, count: int) -> None:
        self._reported = True
        hint = "and no step of an optimizer of torch's: if steps are made otherwise, call torchobs.step() after each"
        self._context.warn_limited("no steps", f"{plural(count, 'backward pass', 'backward passes')} {hint}")

    def _watch_now(self, count: int) -> None:
        """Record which of the optimizers a gradient reaches. In the training thread, as a backward pass begins."""
        import torch  # torch is optional until training begins

        optimizers = [optimizer for reference in self._candidates if (optimizer := reference()) is not None]
        self._candidates = []
        if torch.compiler.is_compiling() or self._context.device.cuda.capturing():
            return
        self._examined_at = count
        for optimizer in optimizers[:_MOST]:
            note: Any = partial(self._note_reached, type(optimizer).__name__)
            for parameter in _watched_parameters(optimizer, count):
                self._handles.append(parameter.register_post_accumulate_grad_hook(note))

    def _note_reached(self, kind: str, _: object) -> None:
        self._reached = kind

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()


def _watched_parameters(optimizer: Any, count: int) -> list[Any]:
    """Return parameters of the optimizer that can have a hook, and that nobody updated in those backward passes."""
    most = max(count, LEAST) // 2
    untouched = (x for x in parameters_of(optimizer) if x.requires_grad and x.is_leaf and x._version < most)
    return list(islice(untouched, _MOST_PARAMETERS))
