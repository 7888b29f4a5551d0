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

from torchobs.flight.record import Flag
from torchobs.probes.backward import BackwardWatch
from torchobs.probes.byhand import ByHand
from torchobs.probes.models import ModelChanges
from torchobs.probes.trace import BACKWARD_BEGINS, BACKWARD_ENDS, CLOSURE_BEGINS, CLOSURE_GOES_ON, LONG_TRACE, STEP_BEGINS
from torchobs.traceable import graph_being_made

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    import torch
    from torch.utils.hooks import RemovableHandle

    from torchobs.guarding import Fuse
    from torchobs.probes.host import Host

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

    def install(self, host: Host) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._host, self._cycle = host, host.cycle
        fuse, self._graph_being_made = host.fuse(self.name), graph_being_made()
        self._changes, self._relieve = ModelChanges(host), fuse.guard(self._cycle.relieve)
        self._backward.install(host, fuse)
        host.by_hand = ByHand(host)
        self._handles = [
            register_optimizer_step_pre_hook(self._plain_before(fuse)),
            register_optimizer_step_post_hook(fuse.guard(self._after)),
        ]

    def remove(self) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._backward.remove()
        self._host.by_hand = None

    def sample(self) -> None:
        """Tell of another model; have a long trace taken in, for backward passes without a step (saliency maps, attacks)."""
        self._changes.sample()
        if len(self._cycle.trace) > LONG_TRACE and self._host.at_backward is not None:
            self._host.at_backward(self._relieve)

    def _plain_before(self, fuse: Fuse) -> Callable[..., None]:
        """Return the pre hook: what nearly every step needs, in place, as in the data probe; anything else is ``_before``.

        It touches half of what ``_before`` does: 4 µs instead of 10 between real steps, where every object is a cache miss.
        """
        host, cycle, note = self._host, self._host.cycle, self._host.cycle.trace.append
        before, tell, is_made = fuse.guard(self._before), fuse.guard(host.tell), self._graph_being_made

        def plain_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if is_made():
                return
            now_ns, trace, key = monotonic_ns(), cycle.trace, id(optimizer)
            # metered steps go the long way, so that a change of thread is seen, too
            if key != cycle.sole or self._depth or cycle.metered or len(args) > 1 or kwargs or fuse.blown:
                before(now_ns, optimizer, args, kwargs)
                return
            if not trace or trace[-1] & 15 != BACKWARD_ENDS:
                before(now_ns, optimizer, args, kwargs)
                return
            self._depth = 1
            note(now_ns << 4 | STEP_BEGINS)
            if key == cycle.rated:
                groups = optimizer.param_groups
                rate = groups[0].get("lr") if groups else None
                if type(rate) is float:
                    values = cycle.values
                    values.learning_rate = rate
                    values.flags |= 4
            if cycle.step >= host.norm_due:
                tell(host.before_step, optimizer, False)  # noqa: FBT003  # a listener

        return plain_before

    def _before(self, now_ns: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._depth and _steps_running() > 1:
            self._depth += 1
            return
        host, cycle = self._host, self._cycle
        self._depth = 1
        fresh = id(optimizer) != cycle.sole and cycle.optimizer_begins(optimizer)
        closure = (len(args) > 1 and args[1] is not None) or (bool(kwargs) and kwargs.get("closure") is not None)
        self._given = closure and not host.backwards
        if closure and self._idle.get(optimizer):
            closure = False
        elif closure:
            cycle.begin_closure()
        if not host.backwards:
            host.thread, host.in_closure = get_ident(), closure
            cycle.trace.append(now_ns << 4 | (CLOSURE_BEGINS if closure else STEP_BEGINS))
        if id(optimizer) == cycle.rated:
            rate = optimizer.param_groups[0].get("lr")
            if type(rate) is float and not cycle.values.flags & Flag.LEARNING_RATE:
                cycle.values.learning_rate = rate
                cycle.values.flags |= 4
        if cycle.metered or not cycle.step:
            host.loop.note()
            host.spend(self.name, monotonic_ns() - now_ns)
        if cycle.step >= host.norm_due or cycle.step == host.norm_step or closure or (fresh and host.reads_rate):
            host.tell(host.before_step, optimizer, closure)

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        if self._graph_being_made():  # see plain_before
            return
        now_ns = monotonic_ns()
        self._depth -= 1
        if self._depth > 0:
            return
        host, cycle = self._host, self._cycle
        metered = cycle.metered
        self._depth = 0
        if self._given:
            self._closure_ends(optimizer)
        if id(optimizer) == cycle.sole:
            cycle.end_plainly(now_ns)
        else:
            cycle.optimizer_ends(optimizer, now_ns)
        if host.backwards:
            cycle.mark(BACKWARD_BEGINS, now_ns)  # an optimizer inside backward: the pass goes on
        if metered:
            host.spend(self.name, monotonic_ns() - now_ns)

    def _closure_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whether it did a backward. One that once did may do without: Lightning's, when a batch is skipped."""
        self._given = self._host.in_closure = False
        for stamp in reversed(self._cycle.trace):
            code = stamp & 15
            if code in (CLOSURE_GOES_ON, BACKWARD_ENDS):
                self._idle[optimizer] = False
                return
            if code in (CLOSURE_BEGINS, STEP_BEGINS):
                if optimizer not in self._idle:
                    self._idle[optimizer] = True
                    self._host.norm_due = 0  # its gradients are measured before its step from now on
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
