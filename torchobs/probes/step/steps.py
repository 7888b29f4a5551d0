"""Steps: the global optimizer hooks, which fire for every optimizer whenever it was made, fused, compiled or not.

``subclass.step`` → ``super().step`` and ZeroRedundancyOptimizer fire two pairs for one step: only the outermost counts. A
step that raised leaves no post hook behind: the stack tells whether the outer step that we remember is still running. A closure
without a backward (Lightning gives one to every step, its manual optimization does the backward before) is as good as none.
"""

from __future__ import annotations

import sys
import weakref
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.flight.metrics.fold import StepFlag
from torchobs.probes.core.boundaries import BACKWARD_BEGINS, BACKWARD_ENDS, CLOSURE_BEGINS, CLOSURE_GOES_ON, STEP_BEGINS
from torchobs.probes.core.model_tracker import ModelChanges
from torchobs.probes.step.backward import BackwardWatch
from torchobs.probes.step.manual_steps import ManualSteps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    import torch
    from torch.utils.hooks import RemovableHandle

    from torchobs.probes.core.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

_OPTIMIZER_FILE = "torch/optim/optimizer.py"


class StepProbe:
    """Cuts the training into steps."""

    name = "step"

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._depth = 0
        self._given = False
        """Whether the step was given a closure"""
        self._idle: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether none of its closures has done a backward"""
        self._backward = BackwardWatch()

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._context, self._recorder = context, context.recorder
        breaker = context.breaker(self.name)
        self._changes = ModelChanges(context.recorder.models, context.writer)
        self._backward.install(context, breaker)
        context.manual_steps = ManualSteps(context)
        self._handles = [
            register_optimizer_step_pre_hook(self._plain_before(breaker)),
            register_optimizer_step_post_hook(breaker.guard(self._after)),
        ]

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._backward.remove()
        self._context.manual_steps = None

    def sample(self) -> None:
        """Tell of another model."""
        self._changes.sample()

    def _plain_before(self, breaker: CircuitBreaker) -> Callable[..., None]:
        """Return the pre hook: what nearly every step needs, in place, as in the data probe; anything else is ``_before``.

        It touches half of what ``_before`` does: 4 µs instead of 10 between real steps, where every object is a cache miss.
        """
        context, recorder, note = self._context, self._context.recorder, self._context.recorder.trace.append
        before, tell = breaker.guard(self._before), breaker.guard(context.notify)

        def plain_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            now_ns, trace, key = monotonic_ns(), recorder.trace, id(optimizer)
            # metered steps go the long way, so that a change of thread is seen, too
            if key != recorder.sole or self._depth or recorder.metered or len(args) > 1 or kwargs or breaker.blown:
                before(now_ns, optimizer, args, kwargs)
                return
            if not trace or trace[-1] & 15 != BACKWARD_ENDS:
                before(now_ns, optimizer, args, kwargs)
                return
            self._depth = 1
            note(now_ns << 4 | STEP_BEGINS)
            if key == recorder.rated:
                groups = optimizer.param_groups
                rate = groups[0].get("lr") if groups else None
                if type(rate) is float:
                    values = recorder.values
                    values.learning_rate = rate
                    values.flags |= 4
            if recorder.step >= context.norm_due:
                tell(context.before_step, optimizer, False)  # noqa: FBT003  # a listener

        return plain_before

    def _before(self, now_ns: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._depth and _steps_running() > 1:
            self._depth += 1
            return
        context, recorder = self._context, self._recorder
        self._depth = 1
        fresh = id(optimizer) != recorder.sole and recorder.optimizer_begins(optimizer)
        closure = (len(args) > 1 and args[1] is not None) or (bool(kwargs) and kwargs.get("closure") is not None)
        self._given = closure and not context.backwards
        if closure and self._idle.get(optimizer):
            closure = False
        elif closure:
            recorder.begin_closure()
        if not context.backwards:
            context.thread, context.in_closure = get_ident(), closure
            recorder.trace.append(now_ns << 4 | (CLOSURE_BEGINS if closure else STEP_BEGINS))
        if id(optimizer) == recorder.rated:
            rate = optimizer.param_groups[0].get("lr")
            if type(rate) is float and not recorder.values.flags & StepFlag.LEARNING_RATE:
                recorder.values.learning_rate = rate
                recorder.values.flags |= 4
        if recorder.metered or not recorder.step:
            context.loop.note()
            context.record_overhead(self.name, monotonic_ns() - now_ns)
        if recorder.step >= context.norm_due or recorder.step == context.norm_step or closure or (fresh and context.reads_rate):
            context.notify(context.before_step, optimizer, closure)

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        now_ns = monotonic_ns()
        self._depth -= 1
        if self._depth > 0:
            return
        context, recorder = self._context, self._recorder
        metered = recorder.metered
        self._depth = 0
        if self._given:
            self._closure_ends(optimizer)
        if id(optimizer) == recorder.sole:
            recorder.end_plainly(now_ns)
        else:
            recorder.optimizer_ends(optimizer, now_ns)
        if context.backwards:
            recorder.mark(BACKWARD_BEGINS, now_ns)  # an optimizer inside backward: the pass goes on
        if metered:
            context.record_overhead(self.name, monotonic_ns() - now_ns)

    def _closure_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whether it did a backward. One that once did may do without: Lightning's, when a batch is skipped."""
        self._given = self._context.in_closure = False
        for stamp in reversed(self._recorder.trace):
            code = stamp & 15
            if code in (CLOSURE_GOES_ON, BACKWARD_ENDS):
                self._idle[optimizer] = False
                return
            if code in (CLOSURE_BEGINS, STEP_BEGINS):
                if optimizer not in self._idle:
                    self._idle[optimizer] = True
                    self._context.norm_due = 0  # its gradients are measured before its step from now on
                return


def _steps_running() -> int:
    """Count the optimizer steps on this thread's stack, by the wrapper that calls the hooks."""
    frame: FrameType | None
    frame, running = sys._getframe(1), 0
    while frame is not None:
        code = frame.f_code
        running += code.co_name == "wrapper" and code.co_filename.endswith(_OPTIMIZER_FILE)
        frame = frame.f_back
    return running
