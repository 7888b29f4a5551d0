"""Observe optimizer steps by torch's global optimizer hooks, which cover every optimizer: made early, fused, compiled or not.

``subclass.step`` → ``super().step`` and ZeroRedundancyOptimizer fire two pairs for one step: only the outermost counts. A
step that raised does not call its post hook: the stack shows whether the outer step on record is still running. A closure
without a backward (Lightning gives one to every step, its manual optimization does the backward before) counts as none.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.catalog.findings import finding
from torchobs.flight.native import make_hook
from torchobs.flight.step_record import StepFlag
from torchobs.probes.backward import BackwardWatch
from torchobs.probes.cuda_graphs import CudaGraphs
from torchobs.probes.never_stepped import NeverStepped
from torchobs.probes.optimizer import OptimizerProbe, number_of
from torchobs.probes.step_recorder import ModelChanges
from torchobs.probes.timeline import (
    BACKWARD_ENDS,
    CLOSURE_BEGINS,
    CLOSURE_GOES_ON,
    LONG_TRACE,
    STEP_BEGINS,
)
from torchobs.support.error_guard import call
from torchobs.support.graph_safe import dispatch_modes, graph_being_made
from torchobs.taps import taps
from torchobs.taps.taps import ThreadFrames

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    import torch

    from torchobs.probes.context import ProbeContext
    from torchobs.probes.optimizer import RateSource
    from torchobs.support.error_guard import CircuitBreaker

    Hook = Callable[..., Any]

_OPTIMIZER_FILE = "torch/optim/optimizer.py"
_PATIENCE = 3
"""Steps of another thread without one of the training thread, after which the latter no longer counts as such"""


class StepProbe:
    """Divides the training into steps."""

    name = "step"
    __slots__ = ("__dict__", "_depth", "_given", "_outer", "_untraced")  # the compiled part has them in place

    def __init__(self, rates: RateSource) -> None:
        self._rates = rates
        self._depth = self._outer = 0
        """Nesting depth of running steps, and the id of the outermost optimizer"""
        self._given = self._untraced = False
        """Whether the step was given a closure; whether its pre hook has found that no graph is being made"""
        self._nests = False
        """Whether an optimizer's step has called another's"""
        self._no_backward: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether none of the optimizer's closures has done a backward"""
        self._evaluations: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Evaluations in its last closure step"""

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context, self._recorder, self._training = context, context.recorder, context.training
        self._before_step, self._steps_within = context.hooks.before_step, context.hooks.steps_within.listeners
        breaker, self._modes, self._graph_being_made = context.breaker(self.name), dispatch_modes(), graph_being_made()
        self._changes = ModelChanges(context.recorder.models, context.writer)
        self._relieve = breaker.guard(self._recorder.relieve)
        self._others, self._graphs = OtherThreads(context), CudaGraphs(context, breaker, self._rates)
        self._never_stepped = NeverStepped(context, breaker)
        self._backward = BackwardWatch(context, breaker)
        self._backward.install()
        self._graphs.install()
        before, after = self._compiled(breaker, self._plain_before(breaker), self._plain_after(breaker))
        taps.BEFORE_STEP.lead(before)
        taps.AFTER_STEP.lead(after)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        taps.AFTER_STEP.leave()
        taps.BEFORE_STEP.leave()
        self._never_stepped.remove()
        self._backward.remove()
        self._graphs.remove()

    def sample(self) -> None:
        """Report model changes, other training threads and optimizers that never step; have a long trace replayed.

        It grows in backward passes without a step: saliency maps, adversarial attacks.
        """
        self._changes.sample()
        self._others.sample()
        self._never_stepped.sample()
        if len(self._recorder.trace) > LONG_TRACE:
            self._context.at_backward(self._relieve)

    def _plain_before(self, breaker: CircuitBreaker) -> Callable[..., Any]:  # noqa: C901  # inline: a call costs 1 µs there
        """Return the pre hook: the fast path of nearly every step, inline; other steps call ``_before``.

        It touches half of what ``_before`` does: 4 µs instead of 10 between real steps, where every object is a cache miss.
        """
        recorder, rates, before_step, trace = self._recorder, self._rates, self._before_step, self._recorder.trace
        before, notify = breaker.guard(self._before), breaker.guard(before_step.notify)
        note, known = trace.append, recorder.alive
        number_safely, clock, learning_rate = self._number_safely, monotonic_ns, StepFlag.LEARNING_RATE
        modes, is_made = self._modes, self._graph_being_made

        def plain_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            key = id(optimizer)
            if recorder.in_pass and not (self._depth or self._nests) and known(key) is optimizer:  # one of hundreds
                if recorder.step >= before_step.due_at or recorder.step == before_step.last:
                    notify(optimizer, False)  # noqa: FBT003  # a listener
                return None
            if modes() and is_made():
                self._untraced = False
                return None
            # metered steps take the full path, which also detects a change of thread
            if (
                key != recorder.sole or self._depth or recorder.metered or kwargs or len(args) > 1 or breaker.is_open
                or not trace or trace[-1] & 15 != BACKWARD_ENDS
            ):  # fmt: skip
                return before(clock(), optimizer, args, kwargs)
            self._depth, self._outer, self._untraced = 1, key, True
            note(clock() << 4 | STEP_BEGINS)
            if key == rates.key:
                try:
                    rate = optimizer.param_groups[0]["lr"]
                except (AttributeError, LookupError, TypeError):  # groups of another kind
                    rate = None
                if type(rate) is not float:
                    rate = number_safely(rate)
                if rate is not None:
                    values = recorder.values
                    values.learning_rate = rate
                    values.flags |= learning_rate
            if recorder.step >= before_step.due_at:
                notify(optimizer, False)  # noqa: FBT003  # a listener
            return None

        return plain_before

    def _plain_after(self, breaker: CircuitBreaker) -> Callable[..., None]:
        """Return the post hook: the fast path of nearly every step, inline; other steps call ``_after``.

        A step within a backward pass that the pre hook took on its fast path needs nothing.
        """
        recorder, training, running = self._recorder, self._training, self._others.running
        after, end_plainly, clock = self._after, self._recorder.end_plainly, monotonic_ns
        modes, is_made = self._modes, self._graph_being_made

        def plain_after(optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> None:
            if (recorder.in_pass and not self._depth) or breaker.is_open or (not self._untraced and modes() and is_made()):
                return
            self._untraced = False
            try:
                now_ns = clock()
                if (
                    id(optimizer) != recorder.sole or self._depth != 1 or self._given or recorder.metered
                    or training.backwards or running
                ):  # fmt: skip
                    after(now_ns, optimizer)
                else:
                    self._depth = 0
                    end_plainly(now_ns)
            except Exception as error:
                if not breaker.takes(error):
                    raise

        return plain_after

    def _compiled(self, breaker: CircuitBreaker, before: Hook, after: Hook) -> tuple[Hook, Hook]:
        """Return the hooks for nearly every step, which call ``before`` and ``after`` for others, where they are compiled."""
        context, recorder, rates = self._context, self._recorder, self._rates
        step = make_hook(
            context.writer.native, "PlainOptimizerStep",
            (recorder, self._training, self, breaker, self._before_step, rates),
            (
                recorder.trace, recorder.arguments, self._others.running, context.writer.plain_steps, before, after,
                breaker.guard(recorder.end_plainly), breaker.guard(self._before_step.notify), self._read_rate, self._modes,
            ),
        )  # fmt: skip
        if step is None:
            return before, after
        compiled_before, compiled_after = step.before, step.after

        # functions of a file that Dynamo is told to skip: of another callable it makes a graph, or fails

        def call_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            return compiled_before(optimizer, args, kwargs)

        def call_after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            return compiled_after(optimizer, args, kwargs)

        return call_before, call_after

    def _read_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the learning rate of the step in progress, if it is a number, in groups as torch has them."""
        try:
            rate = optimizer.param_groups[0]["lr"]
        except (AttributeError, LookupError, TypeError):
            return
        number = self._number_safely(rate)
        if number is not None:
            self._recorder.set_rate(number)

    def _before(self, now_ns: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        training, recorder, ident = self._training, self._recorder, get_ident()
        if self._graphs.capturing and ident == training.thread:
            self._leave_out(ident)
            if self._others.running[ident] == 1:
                self._graphs.note_step(optimizer)
            return None
        if ident != training.thread and (self._is_inside(ident) or self._others.is_other(optimizer)):
            self._leave_out(ident)
            return None
        self._others.has_begun = True
        if self._depth and _steps_running() > 1:
            self._depth += 1
            self._nests = True
            for note_within in self._steps_within:
                note_within(self._outer, optimizer)
            return None
        self._depth, self._outer = 1, id(optimizer)
        closure = (len(args) > 1 and args[1] is not None) or (bool(kwargs) and kwargs.get("closure") is not None)
        evaluates = closure and not self._no_backward.get(optimizer)
        within = bool(training.backwards)
        fresh = self._begins(optimizer, ident, evaluates=evaluates, within_backward=within)
        self._given = closure and not within
        if evaluates:
            recorder.begin_closure()
        if not within:
            training.thread, training.in_closure = ident, evaluates
            recorder.trace.append(now_ns << 4 | (CLOSURE_BEGINS if evaluates else STEP_BEGINS))
        self._note_rate(optimizer)
        if recorder.metered or not recorder.step:
            training.loop.note()
            self._context.record_overhead(self.name, monotonic_ns() - now_ns)
        hook, step = self._before_step, recorder.step
        if step >= hook.due_at or step == hook.last or evaluates or fresh:
            hook.notify(optimizer, evaluates)
        return self._watched(optimizer, args, kwargs) if evaluates and self._given else None

    def _begins(self, optimizer: torch.optim.Optimizer, ident: int, *, evaluates: bool, within_backward: bool) -> bool:
        """Let the recorder know that an optimizer begins to step; return True if it has never stepped."""
        recorder = self._recorder
        if ident != self._training.thread and not within_backward:
            recorder.note_unseen()
        return id(optimizer) != recorder.sole and recorder.optimizer_begins(
            optimizer, evaluates=evaluates, within_backward=within_backward
        )

    def _is_inside(self, ident: int) -> bool:
        """Return True if that thread is within a step that is left out."""
        return ident in self._others.running and _steps_running() > 1

    def _leave_out(self, ident: int) -> None:
        """Note that this thread's step is not recorded; it may call another one."""
        running = self._others.running
        running[ident] = running.get(ident, 0) + 1 if _steps_running() > 1 else 1

    def _note_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the learning rate, also of an optimizer that took the fast path."""
        recorder = self._recorder
        key = self._rates.key
        if recorder.values.flags & StepFlag.LEARNING_RATE or not key:
            return
        rated = optimizer if id(optimizer) == key else recorder.alive(key) if self._training.backwards else None
        if rated is not None:
            self._read_rate(rated)

    def _number_safely(self, rate: object) -> float | None:
        return call(self._context.breaker(OptimizerProbe.name), number_of, rate)  # another one once that probe is made anew

    def _watched(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the arguments with a closure that records where each evaluation begins, if there may be several."""
        if self._evaluations.get(optimizer, 2) < 2:  # noqa: PLR2004  # unknown: several
            return None
        training, note, closure = self._training, self._recorder.trace.append, args[1] if len(args) > 1 else kwargs["closure"]

        @functools.wraps(closure, updated=())
        def evaluate(*arguments: Any, **named: Any) -> Any:
            if training.in_closure:
                note(monotonic_ns() << 4 | CLOSURE_BEGINS)
            return closure(*arguments, **named)

        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

    def _after(self, now_ns: int, optimizer: torch.optim.Optimizer) -> None:
        running = self._others.running
        if running and (ident := get_ident()) in running:
            running[ident] -= 1
            if not running[ident]:
                del running[ident]
            return
        self._depth -= 1
        if self._depth > 0:
            return
        training, recorder = self._training, self._recorder
        metered = recorder.metered
        self._depth = 0
        if self._given:
            self._closure_ends(optimizer)
        if not training.backwards:  # else the pass is the step
            recorder.optimizer_ends(optimizer, now_ns)
        if metered:
            self._context.record_overhead(self.name, monotonic_ns() - now_ns)

    def _closure_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Record whether it did a backward. One that once did may do without: Lightning's, when a batch is skipped."""
        self._given = self._training.in_closure = False
        self._evaluations[optimizer] = sum(stamp & 15 == CLOSURE_GOES_ON for stamp in self._recorder.trace)
        for stamp in reversed(self._recorder.trace):
            code = stamp & 15
            if code in (CLOSURE_GOES_ON, BACKWARD_ENDS):
                self._no_backward[optimizer] = False
                return
            if code in (CLOSURE_BEGINS, STEP_BEGINS):
                if optimizer not in self._no_backward:
                    self._no_backward[optimizer] = True
                    self._before_step.due_at = 0  # its gradients are measured before its step from now on
                return


class OtherThreads:
    """Optimizer steps of threads other than the training thread: their backward passes and fetches are not recorded.

    One thread at a time is the training thread. Another one replaces it when it steps the same optimizer, or when the former
    has ended, has left its training loops, or makes no more steps. Two that train at the same time are reported once.
    ``is_other`` is for threads that step optimizers, ``sample`` for the sampler; a part of ``StepProbe``.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._training = context, context.training
        self.has_begun = False
        """Whether the training thread has made a step"""
        self.steps = 0
        """Steps that were not recorded"""
        self.running: dict[int, int] = {}
        """Threads within such a step, with its nesting depth"""
        self._seen_at: dict[int, tuple[int, int]] = {}
        self._name, self._reported = "", False

    def is_other(self, optimizer: object) -> bool:
        """Return True if the current thread, not the training thread, is about to make a step that is not recorded."""
        recorder, ident = self._context.recorder, get_ident()
        if self._training.backwards and not _is_of_python(ident):
            return False  # an optimizer within the backward pass, which runs in a device's own thread
        if not self.has_begun or recorder.alive(id(optimizer)) is optimizer or self._has_ended(ident):
            self._seen_at.clear()
            return False
        self._name = threading.current_thread().name
        self.steps += 1
        return True

    def _has_ended(self, ident: int) -> bool:
        """Return True if the training thread no longer trains."""
        training, ended = self._training, self._context.recorder.ended
        with ThreadFrames() as frames:
            is_gone = training.thread not in frames
        if is_gone or training.loop.left(training.thread):
            return True
        step, without = self._seen_at.get(ident, (-1, 0))
        without = without + 1 if step == ended else 0
        self._seen_at[ident] = ended, without
        return without >= _PATIENCE and not training.loop.is_known

    def sample(self) -> None:
        """Report once that another thread trains."""
        if self.steps and not self._reported:
            self._reported = True
            context, name = self._context, self._name
            context.event(catalog.EVENT_OTHER_THREAD, {"thread": name})
            context.warn_limited("threads", finding("other_thread", thread=name).short)


def _steps_running() -> int:
    """Count the optimizer steps on this thread's stack, by the wrapper that calls the hooks."""
    frame: FrameType | None
    frame, running = sys._getframe(1), 0
    while frame is not None:
        code = frame.f_code
        running += code.co_name == "wrapper" and code.co_filename.endswith(_OPTIMIZER_FILE)
        frame = frame.f_back
    return running


def _is_of_python(ident: int) -> bool:
    """Return True if Python has started that thread."""
    return any(thread.ident == ident and not isinstance(thread, threading._DummyThread) for thread in threading.enumerate())
