"""Steps: the global optimizer hooks, which fire for every optimizer whenever it was made, fused, compiled or not.

``subclass.step`` → ``super().step`` and ZeroRedundancyOptimizer fire two pairs for one step: only the outermost counts. A
step that raised leaves no post hook behind: the stack tells whether the outer step that we remember is still running. A closure
without a backward (Lightning gives one to every step, its manual optimization does the backward before) is as good as none.
"""

from __future__ import annotations

import functools
import sys
import weakref
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.flight.record import Flag
from torchobs.probes.backward import BackwardWatch
from torchobs.probes.byhand import ByHand
from torchobs.probes.cudagraphs import CudaGraphs
from torchobs.probes.models import ModelChanges
from torchobs.probes.otherthreads import OtherThreads
from torchobs.probes.trace import BACKWARD_BEGINS, BACKWARD_ENDS, CLOSURE_BEGINS, CLOSURE_GOES_ON, STEP_BEGINS

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
        self._evaluations: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """How many its last closure has done"""
        self._backward = BackwardWatch()

    def install(self, host: Host) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._host, self._cycle = host, host.cycle
        fuse = host.fuse(self.name)
        self._changes = ModelChanges(host)
        self._others, self._graphs = OtherThreads(host), CudaGraphs(host, fuse)
        self._backward.install(host, fuse)
        self._graphs.install()
        host.by_hand = by_hand = ByHand(host)
        host.steps_by_hand = by_hand.again
        self._handles = [
            register_optimizer_step_pre_hook(self._plain_before(fuse)),
            register_optimizer_step_post_hook(self._plain_after(fuse)),
        ]

    def remove(self) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._backward.remove()
        self._graphs.remove()
        self._host.by_hand = self._host.steps_by_hand = None

    def sample(self) -> None:
        """Tell of another model, and of another thread that trains."""
        self._changes.sample()
        self._others.sample()

    def _plain_before(self, fuse: Fuse) -> Callable[..., Any]:
        """Return the pre hook: what nearly every step needs, in place, as in the data probe; anything else is ``_before``.

        It touches half of what ``_before`` does: 4 µs instead of 10 between real steps, where every object is a cache miss.
        """
        host, cycle, note = self._host, self._host.cycle, self._host.cycle.trace.append
        before, tell, waiting = fuse.guard(self._before), fuse.guard(host.tell), cycle.members.waiting

        def plain_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            key = id(optimizer)
            if key != cycle.sole and key in waiting and len(waiting) > 1:  # of hundreds, within the backward pass
                waiting.discard(key)
                if cycle.step >= host.norm_due or cycle.step == host.norm_step:
                    tell(host.before_step, optimizer, False)  # noqa: FBT003  # a listener
                return None
            now_ns, trace = monotonic_ns(), cycle.trace
            # metered steps go the long way, so that a change of thread is seen, too
            if key != cycle.sole or self._depth or cycle.metered or len(args) > 1 or kwargs or fuse.blown:
                return before(now_ns, optimizer, args, kwargs)
            if not trace or trace[-1] & 15 != BACKWARD_ENDS:
                return before(now_ns, optimizer, args, kwargs)
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
            return None

        return plain_before

    def _plain_after(self, fuse: Fuse) -> Callable[..., None]:
        """Return the post hook, of which one that was crossed off in the pre hook needs nothing."""
        after, waiting = fuse.guard(self._after), self._cycle.members.waiting

        def plain_after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            del args, kwargs
            if not waiting or self._depth:
                after(optimizer)

        return plain_after

    def _before(self, now_ns: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        host, cycle, ident = self._host, self._cycle, get_ident()
        if self._graphs.capturing and ident == host.thread:
            self._leave_out(ident)
            if self._others.running[ident] == 1:
                self._graphs.note_step(optimizer)
            return None
        if ident != host.thread and (self._is_inside(ident) or self._others.is_other(optimizer)):
            self._leave_out(ident)
            return None
        self._others.has_begun = True
        if self._depth and _steps_running() > 1:
            self._depth += 1
            cycle.members.is_nested = True
            return None
        self._depth = 1
        closure = (len(args) > 1 and args[1] is not None) or (bool(kwargs) and kwargs.get("closure") is not None)
        evaluates = closure and not self._idle.get(optimizer)
        again = id(optimizer) != cycle.sole or not cycle.trace
        fresh = again and cycle.optimizer_begins(optimizer, evaluates=evaluates)
        self._given = closure and not host.backwards
        if evaluates:
            cycle.begin_closure()
        if not host.backwards:
            host.thread, host.in_closure = ident, evaluates
            cycle.trace.append(now_ns << 4 | (CLOSURE_BEGINS if evaluates else STEP_BEGINS))
        self._note_rate(optimizer)
        if cycle.metered or not cycle.step:
            host.loop.note()
            host.spend(self.name, monotonic_ns() - now_ns)
        if cycle.step >= host.norm_due or cycle.step == host.norm_step or evaluates or (fresh and host.reads_rate):
            host.tell(host.before_step, optimizer, evaluates)
        return self._watched(optimizer, args, kwargs) if evaluates and self._given else None

    def _is_inside(self, ident: int) -> bool:
        """Return True if that thread is within a step that is left out."""
        return ident in self._others.running and _steps_running() > 1

    def _leave_out(self, ident: int) -> None:
        """The step of this thread is not one to record; it may call another one."""
        running = self._others.running
        running[ident] = running.get(ident, 0) + 1 if _steps_running() > 1 else 1

    def _note_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the learning rate, also of one that was only crossed off."""
        cycle = self._cycle
        if cycle.values.flags & Flag.LEARNING_RATE or not cycle.rated:
            return
        rated = optimizer if id(optimizer) == cycle.rated else cycle.alive(cycle.rated) if self._host.backwards else None
        rate = rated.param_groups[0].get("lr") if rated is not None else None
        if type(rate) is float:
            cycle.values.learning_rate = rate
            cycle.values.flags |= Flag.LEARNING_RATE

    def _watched(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the arguments with a closure that notes where each evaluation begins, if there are likely to be several."""
        if self._evaluations.get(optimizer, 2) < 2:  # noqa: PLR2004  # not known yet: several
            return None
        host, note, closure = self._host, self._cycle.trace.append, args[1] if len(args) > 1 else kwargs["closure"]

        @functools.wraps(closure, updated=())
        def evaluate(*arguments: Any, **named: Any) -> Any:
            if host.in_closure:
                note(monotonic_ns() << 4 | CLOSURE_BEGINS)
            return closure(*arguments, **named)

        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        now_ns, running = monotonic_ns(), self._others.running
        if running and (ident := get_ident()) in running:
            running[ident] -= 1
            if not running[ident]:
                del running[ident]
            return
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
            cycle.members.within_backward = bool(host.backwards)
            cycle.optimizer_ends(optimizer, now_ns)
        if host.by_hand is not None:
            host.by_hand.optimizer_stepped()
        if host.backwards:
            cycle.mark(BACKWARD_BEGINS, now_ns)  # an optimizer inside backward: the pass goes on
        if metered:
            host.spend(self.name, monotonic_ns() - now_ns)

    def _closure_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whether it did a backward. One that once did may do without: Lightning's, when a batch is skipped."""
        self._given = self._host.in_closure = False
        self._evaluations[optimizer] = sum(stamp & 15 == CLOSURE_GOES_ON for stamp in self._cycle.trace)
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
