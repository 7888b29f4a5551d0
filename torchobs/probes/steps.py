"""Observe optimizer steps by torch's global optimizer hooks, which cover every optimizer: early, fused, compiled or not.

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
from types import MethodType
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.step_record import StepFlag
from torchobs.probes.cuda_graphs import CudaGraphs
from torchobs.probes.never_stepped import NeverStepped
from torchobs.probes.optimizer import OptimizerProbe, number_of
from torchobs.probes.timeline import BACKWARD_BEGINS, BACKWARD_ENDS, CLOSURE_BEGINS, CLOSURE_GOES_ON, LONG_TRACE, STEP_BEGINS
from torchobs.support.error_guard import call
from torchobs.support.graph_safe import dispatch_modes, graph_being_made
from torchobs.support.rate_limit import RateLimiter
from torchobs.taps import taps
from torchobs.taps.taps import ThreadFrames

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    import torch

    from torchobs.probes.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

    Hook = Callable[..., Any]

_ACCUMULATE, _CREATE_GRAPH, _INPUTS = 6, 3, 4
"""Positions among the arguments of the engine's ``run_backward``"""
_OPTIMIZER_FILE = "torch/optim/optimizer.py"
_EVERY_NS, _BURST = 60_000_000_000, 32
"""Events of model changes: the first ones, then at most one a minute"""
_PATIENCE = 3
"""Steps of another thread without one of the training thread, after which that ceases to be the training thread"""


class StepProbe:
    """Divides the training into steps."""

    name = "step"

    def __init__(self) -> None:
        self._has_closure = False
        """Whether the step has a closure"""
        self._nests = False
        """Whether an optimizer's step has called another's"""
        self._no_backward: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether none of the optimizer's closures has done a backward"""

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context, self._recorder, self._training = context, context.recorder, context.training
        self._plain, self._before_step, self._steps_within = (
            context.recorder.plain, context.hooks.before_step, context.hooks.steps_within.listeners,
        )  # fmt: skip
        breaker, self._modes, self._graph_being_made = context.breaker(self.name), dispatch_modes(), graph_being_made()
        self._changes, self._budget = context.recorder.models.changes, RateLimiter(_EVERY_NS, _BURST)
        self._relieve = breaker.guard(self._recorder.relieve)
        self._others, self._graphs = OtherSteps(context), CudaGraphs(context, breaker)
        self._never_stepped = NeverStepped(context, breaker)
        self._backward = BackwardWatch(context, breaker)
        self._backward.install()
        self._graphs.install()
        self._breaker, self._before_safely, plain = breaker, breaker.guard(self._before), self._plain
        plain.slow_before, plain.slow_after = self._any_before, self._any_after
        plain.notify, plain.read_rate = breaker.guard(self._before_step.notify), self._read_rate
        taps.BEFORE_STEP.lead(_as_function(plain.before_step))
        taps.AFTER_STEP.lead(_as_function(plain.after_step))

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
        changes, since = self._recorder.models.changes, self._recorder.models.since
        if changes != self._changes and self._budget.take(monotonic_ns()):
            self._changes = changes
            attributes = {"changes": changes, "steps_before": since}
            self._context.writer.event(catalog.EVENT_MODEL_CHANGE.name, attributes, since + 1)
        self._others.sample()
        self._never_stepped.sample()
        if len(self._recorder.trace) > LONG_TRACE:
            self._context.at_backward(self._relieve)

    def _any_before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The pre hook of steps that are not plain."""
        plain = self._plain
        # one of hundreds in a backward pass
        if plain.in_pass and not (plain.depth or self._nests) and self._recorder.alive(id(optimizer)) is optimizer:
            if plain.step >= plain.due_at or plain.step == self._before_step.last:
                plain.notify(optimizer, False)  # noqa: FBT003  # a listener
            return None
        if self._modes() and self._graph_being_made():
            plain.stepping = False
            return None
        return self._before_safely(monotonic_ns(), optimizer, args, kwargs)

    def _any_after(self, optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> None:
        """The post hook of steps that are not plain; one within a backward pass needs nothing."""
        plain, breaker = self._plain, self._breaker
        is_made = not plain.stepping and self._modes() and self._graph_being_made()
        if (plain.in_pass and not plain.depth) or breaker.is_open or is_made:
            return
        try:
            self._after(monotonic_ns(), optimizer)
        except Exception as error:
            if not breaker.takes(error):
                raise

    def _read_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the learning rate of the step in progress, if it is a number, in groups as torch has them."""
        try:
            rate = optimizer.param_groups[0]["lr"]
        except (AttributeError, LookupError, TypeError):
            return
        # another breaker once that probe is made anew
        number = call(self._context.breaker(OptimizerProbe.name), number_of, rate)
        if number is not None:
            self._recorder.set_rate(number)

    def _before(self, now_ns: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        training, recorder, plain, ident = self._training, self._recorder, self._plain, get_ident()
        if self._graphs.capturing and ident == plain.thread:
            self._leave_out(ident)
            if self._others.running[ident] == 1:
                self._graphs.note_step(optimizer)
            return None
        is_inside = ident in self._others.running and _steps_running() > 1
        if ident != plain.thread and (is_inside or self._others.is_other(optimizer)):
            self._leave_out(ident)
            return None
        self._others.has_begun = True
        if plain.depth and _steps_running() > 1:
            plain.depth += 1
            self._nests = True
            for note_within in self._steps_within:
                note_within(plain.outer, optimizer)
            return None
        plain.depth, plain.outer, plain.stepping = 1, id(optimizer), False
        closure = (len(args) > 1 and args[1] is not None) or (bool(kwargs) and kwargs.get("closure") is not None)
        evaluates = closure and not self._no_backward.get(optimizer)
        within = plain.backwards
        fresh = self._begins(optimizer, ident, evaluates=evaluates, within_backward=within)
        self._has_closure = closure and not within
        if evaluates:
            recorder.begin_closure()
        if not within:
            plain.thread, plain.in_closure = ident, evaluates
            recorder.trace.append(now_ns << 4 | (CLOSURE_BEGINS if evaluates else STEP_BEGINS))
        self._note_rate(optimizer)
        if plain.metered or not plain.step:
            training.loop.record_stack()
            self._context.record_overhead(self.name, monotonic_ns() - now_ns)
        hook, step = self._before_step, plain.step
        if step >= hook.due_at or step == hook.last or evaluates or fresh:
            hook.notify(optimizer, evaluates)
        return self._watched(args, kwargs) if evaluates and self._has_closure else None

    def _begins(self, optimizer: torch.optim.Optimizer, ident: int, *, evaluates: bool, within_backward: bool) -> bool:
        """Report to the recorder that an optimizer begins to step; return whether it has never stepped."""
        recorder = self._recorder
        if ident != self._plain.thread and not within_backward:
            recorder.note_unseen()
            if recorder.step:
                self._training.others.add_thread(self._plain.thread)
        return id(optimizer) != self._plain.sole and recorder.optimizer_begins(
            optimizer, evaluates=evaluates, within_backward=within_backward
        )

    def _leave_out(self, ident: int) -> None:
        """Record that this thread's step is not recorded; it may call another one."""
        running = self._others.running
        running[ident] = running.get(ident, 0) + 1 if _steps_running() > 1 else 1

    def _note_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the learning rate, also of an optimizer that took the fast path."""
        recorder = self._recorder
        key = self._plain.rated
        if recorder.values.flags & StepFlag.LEARNING_RATE or not key:
            return
        rated = optimizer if id(optimizer) == key else recorder.alive(key) if self._plain.backwards else None
        if rated is not None:
            self._read_rate(rated)

    def _watched(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the arguments with a closure that records where each evaluation begins."""
        plain, note, closure = self._plain, self._recorder.trace.append, args[1] if len(args) > 1 else kwargs["closure"]

        @functools.wraps(closure, updated=())
        def evaluate(*arguments: Any, **named: Any) -> Any:
            if plain.in_closure:
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
        plain = self._plain
        plain.depth -= 1
        if plain.depth > 0:
            return
        metered, plain.depth, plain.stepping = plain.metered, 0, False
        if self._has_closure:
            self._closure_ends(optimizer)
        if not plain.backwards:  # else the pass is the step
            self._recorder.optimizer_ends(optimizer, now_ns)
        if metered:
            self._context.record_overhead(self.name, monotonic_ns() - now_ns)

    def _closure_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Record whether it did a backward. A closure that once did may do without: Lightning's, when a batch is skipped."""
        self._has_closure = self._plain.in_closure = False
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


def _as_function(hook: Hook) -> Hook:
    """Return a function of a file that Dynamo skips: given a compiled callable, Dynamo makes a graph or fails."""

    def call_hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return hook(optimizer, args, kwargs)

    return hook if isinstance(hook, MethodType) else call_hook


class BackwardWatch:
    """Records where the outermost backward pass begins and ends. A part of :class:`StepProbe`.

    It is ``torch.autograd.backward``, ``torch.autograd.grad``, or a direct call of the engine. ``Tensor.backward`` resolves
    ``torch.autograd.backward`` by attribute. All other callers, names imported before ``init()`` and Megatron-LM's direct call
    included, look ``run_backward`` up at the engine, which returns its own while a backward pass runs. ``torch.autograd.grad``
    is a backward pass where it differentiates parameters and builds no graph (``create_graph=False``): with a graph it is part
    of the forward (gradient penalties, physics-informed losses, second derivatives), and the gradient of anything else is an
    analysis (saliency, an adversarial input). Functional transforms (``torch.func``) are not observed.
    """

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        self._context, self._breaker = context, breaker
        self._end_pass = breaker.guard(context.recorder.end_pass)
        self._notify = breaker.guard(context.hooks.after_closure_backward.notify)
        self._modes, self._graph_being_made = dispatch_modes(), graph_being_made()

    def install(self) -> None:
        """Wrap ``torch.autograd.backward`` and the engine."""
        plain = self._context.recorder.plain
        plain.step_breaker, plain.end_pass, plain.modes = self._breaker, self._end_pass, self._modes
        plain.listeners, plain.slow_backward = self._context.hooks.takes_loss.listeners, self._any_backward
        taps.BACKWARD.lead_shared(self._watched, self._breaker.probe)
        taps.ENGINE.lead(self._watched_engine, self._breaker.probe)

    def _watched(self, original: Any, busy: Any, divert: Any) -> Any:
        recorded = self._context.recorder.plain.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            return divert(*args, **kwargs) if busy else recorded(original, args, kwargs)

        return backward

    def _any_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a backward pass outside of a plain step; return the result of ``original``."""
        recorder, breaker = self._context.recorder, self._breaker
        plain, elsewhere = recorder.plain, get_ident() != recorder.plain.thread
        if plain.backwards or breaker.is_open or elsewhere or (self._modes() and self._graph_being_made()):
            if elsewhere and not breaker.is_open:
                self._context.training.others.add_thread(get_ident())
            if elsewhere and not plain.backwards:
                recorder.note_unseen()
            return original(*args, **kwargs)  # nested (reentrant checkpointing), in another thread, or traced
        return self._record(original, args, kwargs, accumulates=True)

    def _record(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, accumulates: bool) -> Any:
        plain, note = self._context.recorder.plain, self._context.recorder.trace.append
        tensors = args[0] if args else kwargs.get("tensors")
        gradients = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        note(monotonic_ns() << 4 | BACKWARD_BEGINS)
        for take_loss in plain.listeners:
            take_loss(tensors, gradients, accumulates)
        plain.backwards = True
        try:
            return original(*args, **kwargs)
        finally:
            plain.backwards = False
            note(monotonic_ns() << 4 | (CLOSURE_GOES_ON if plain.in_closure else BACKWARD_ENDS))
            if accumulates and plain.in_closure:
                self._notify()
            elif plain.in_pass:
                self._end_pass()

    def _watched_engine(self, engine: Any) -> Any:
        """Return a stand-in for the process's only engine, with our ``run_backward``.

        Within a backward pass that is recorded already it returns the original, so that no frame of ours is between torch's.
        """
        plain, breaker, others = self._context.recorder.plain, self._breaker, self._context.training.others
        original, modes, is_made = engine.run_backward, self._modes, self._graph_being_made
        run_backward = self._watched_run(original)

        def current_run(_: object) -> Any:
            if plain.backwards or breaker.is_open:
                return original
            if get_ident() != plain.thread:
                others.add_thread(get_ident())
                return original
            return original if modes() and is_made() else run_backward

        kind = type("_ImperativeEngine", (type(engine),), {"__slots__": (), "run_backward": property(current_run)})
        return kind()

    def _watched_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the engine's ``run_backward``, recording calls that did not come through ``torch.autograd.backward``."""
        record, trains = self._record, self._breaker.guard(_trains)

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            # autograd.grad gives it by name
            accumulates = args[_ACCUMULATE] if len(args) > _ACCUMULATE else kwargs.get("accumulate_grad", False)
            if not accumulates and ((len(args) > _CREATE_GRAPH and args[_CREATE_GRAPH]) or not trains(args, kwargs)):
                return original(*args, **kwargs)
            return record(original, args, kwargs, accumulates=bool(accumulates))

        return run_backward

    def remove(self) -> None:
        """Restore them."""
        taps.ENGINE.leave()
        taps.BACKWARD.leave()


def _trains(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the gradients are a model's, and will not be differentiated in turn."""
    import torch

    create_graph = args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else kwargs.get("create_graph")
    inputs: Any = args[_INPUTS] if len(args) > _INPUTS else kwargs.get("inputs")
    return bool(inputs) and not create_graph and isinstance(inputs[-1], torch.nn.Parameter)  # the first may be the data


class OtherSteps:
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
        self._progress: dict[int, tuple[int, int]] = {}
        self._name, self._reported = "", False

    def is_other(self, optimizer: object) -> bool:
        """Return whether the current thread, not the training thread, is about to make a step that is not recorded."""
        recorder, ident = self._context.recorder, get_ident()
        if self._training.backwards and not _is_of_python(ident):
            return False  # an optimizer within the backward pass, which runs in a device's own thread
        if not self.has_begun or recorder.alive(id(optimizer)) is optimizer or self._has_ended(ident):
            self._progress.clear()
            return False
        self._name = threading.current_thread().name
        self.steps += 1
        return True

    def _has_ended(self, ident: int) -> bool:
        """Return whether the training thread has stopped training."""
        training, ended = self._training, self._context.recorder.ended
        with ThreadFrames() as frames:
            is_gone = training.thread not in frames
        if is_gone or training.loop.left(training.thread):
            return True
        step, without = self._progress.get(ident, (-1, 0))
        without = without + 1 if step == ended else 0
        self._progress[ident] = ended, without
        return without >= _PATIENCE and not training.loop.is_known

    def sample(self) -> None:
        """Report once that another thread trains."""
        if self.steps and not self._reported:
            self._reported = True
            self._context.report("other_thread", thread=self._name)


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
    """Return whether Python has started that thread."""
    return any(thread.ident == ident and not isinstance(thread, threading._DummyThread) for thread in threading.enumerate())
