"""Count steps of learning-rate schedulers, and detect three kinds of misuse that waste a run.

PyTorch's warnings in ``LRScheduler.step`` name the line that called it, so that method is not wrapped, but the context manager
that it enters to compute the rates. Classes that override ``step`` are wrapped there, a user's own when its first object is
made. Only the outermost call counts: a chain of three schedulers is stepped once. Calls by a constructor or ``load_state_dict``
are no steps.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.taps.patch import Patch
from torchobs.taps.taps import subclasses
from torchobs.tensors.references import ObjectIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchobs.probes.context import ProbeContext

MAX_KNOWN = 64
IDLE_STEPS = 100
"""Training steps after which the optimizer of a scheduler that is stepped should have stepped"""
IDLE_CALLS = 3
"""Least optimizer steps observed by then"""
COUNTED_STEPS = 8
"""Training steps, each with one of a scheduler, after which its count is of training steps: it says where a run went on"""
UNUSED_EPOCHS = 2
"""Whole epochs after which a scheduler should have been stepped. One is too few for loops that step it as late as after
the next one's first evaluation."""
UNUSED_STEPS = 100_000
"""The same in training steps, if no epochs are detected: more than an epoch usually has"""
_OUTSIDE, _STEPPING, _MAKING = range(3)
_OWN_CONSTRUCTORS = ("SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")
"""Torch's schedulers with constructors that do not call ``LRScheduler``'s"""


@dataclass(slots=True, eq=False)
class _Scheduler:
    """State of one scheduler."""

    name: str = ""
    created: int = 0
    epoch: int = 0
    optimizer_calls: int = 0
    """Training step, epoch, and steps of any optimizer when the scheduler was first met"""
    last_epoch: object = None
    """Its count of steps at that time"""
    optimizer: weakref.ref[Any] | None = None
    begun: int = 0
    """Training step in which it was first stepped"""
    steps: int = 0
    stepped: bool = False
    """Whether a step of its optimizer was observed"""
    early: bool = False
    """Whether it was first stepped before its optimizer"""
    inner: bool = False
    """Whether another scheduler steps it"""
    superseded: bool = False
    """Whether another scheduler of its optimizer is stepped (a warm-up, say), so this one may come later, or what wraps it does
    what ``step`` would"""
    reported: set[str] = field(default_factory=set)


class SchedulerProbe:
    """Counts steps and detects misuse."""

    name = "schedulers"

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._patched: set[type] = set()
        self._within = _OUTSIDE
        self._outer = 0
        """id of the scheduler that is within its own ``step``"""
        self._steps = self._shown = self._optimizer_calls = 0
        self._schedulers = ObjectIndex(MAX_KNOWN, lambda _: _Scheduler())
        self._misuses: list[tuple[str, _Scheduler]] = []

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        from torch.optim import lr_scheduler  # torch is optional until training begins

        self._context, self._base = context, lr_scheduler.LRScheduler
        self._stepping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._scheduled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._breaker = breaker = context.breaker(self.name)
        self._note_new_safely, self._note_step_safely = breaker.guard(self._note_new), breaker.guard(self._note_step)
        self._patch_steps_safely = breaker.guard(self._patch_steps)
        self._watch(lr_scheduler._enable_get_lr_call, "__enter__", self._watched_rates)
        for name in ("LRScheduler", *_OWN_CONSTRUCTORS):
            self._watch(getattr(lr_scheduler, name), "__init__", self._watched_init)
        for owner in (lr_scheduler.ReduceLROnPlateau, *subclasses(self._base)):
            self._patch_steps(owner)
        context.hooks.before_step.register(breaker, self._before_step)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        for patch in reversed(self._patches):
            patch.undo()

    def _watch(self, owner: type, name: str, watched: Callable[[Any], Any]) -> None:
        self._patches.append(Patch(owner, name, watched, probe=self.name))

    def _patch_steps(self, owner: type) -> None:
        """Wrap each ``step`` that a class in this one's MRO overrides."""
        for cls in owner.__mro__:
            if cls is self._base:
                return
            if cls not in self._patched and "step" in vars(cls):
                self._patched.add(cls)
                self._watch(cls, "step", self._watched_step)

    def _watched_rates(self, original: Any) -> Any:
        """Wrap the context manager in which ``LRScheduler.step`` computes the rates; ``context.o`` is the scheduler."""

        @functools.wraps(original)
        def enter(context: Any) -> Any:
            self._note_step_safely(context.o)
            return original(context)

        return enter

    def _watched_step(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_step_safely(scheduler)
            within, outer = self._within, self._outer
            if within == _OUTSIDE:
                self._within, self._outer = _STEPPING, id(scheduler)
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._within, self._outer = within, outer

        return step

    def _watched_init(self, original: Any) -> Any:
        @functools.wraps(original)
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            self._patch_steps_safely(type(scheduler))
            within, self._within = self._within, _MAKING
            try:
                original(scheduler, *args, **kwargs)
            finally:
                self._within = within
            self._note_new_safely(scheduler)

        return init

    # -- in the training thread --------------------------------------------------------------------------------------------

    def _note_new(self, scheduler: Any) -> None:
        self._state_of(scheduler)
        for part in getattr(scheduler, "_schedulers", ()):
            state = self._state_of(part)
            if state is not None:
                state.inner = True
        self._context.hooks.before_step.due_at = 0  # so that its optimizer's first step is noted

    def _note_step(self, scheduler: Any) -> None:
        if self._within == _MAKING:
            return
        state = self._state_of(scheduler)
        if self._within == _STEPPING:
            if state is not None and id(scheduler) != self._outer:
                state.inner = True
            return
        self._steps += 1
        if state is not None:
            if not state.steps:
                state.begun = self._context.recorder.steps_done()
                self._note_first(state, scheduler.optimizer)
            state.steps += 1
            if state.steps == COUNTED_STEPS and not state.early:
                self._note_steps_before(_count_of(scheduler), state.begun)

    def _note_steps_before(self, count: object, begun: int) -> None:
        """Publish the steps before this process if the scheduler is stepped with each step, and was restored."""
        done = self._context.recorder.steps_done()
        if isinstance(count, int) and done - begun == COUNTED_STEPS - 1 and count + 1 > done:
            self._context.scalars.infer_resumed_from(float(count + 1 - done))

    def _note_first(self, state: _Scheduler, optimizer: torch.optim.Optimizer) -> None:
        # PyTorch's own criterion, set by a scheduler's wrapper of its optimizer's step
        state.early = not getattr(optimizer, "_opt_called", False)
        self._scheduled.add(optimizer)
        for other in self._schedulers_of(optimizer):
            other.superseded = True

    def _schedulers_of(self, optimizer: object) -> list[_Scheduler]:
        """Return the schedulers of an optimizer."""
        states = [state for _, state in self._schedulers.living()]
        return [state for state in states if state.optimizer is not None and state.optimizer() is optimizer]

    def _state_of(self, scheduler: Any) -> _Scheduler | None:
        """Return a scheduler's state, created at the first call, with the counters at 0; ``None`` beyond ``MAX_KNOWN``."""
        state = self._schedulers.of(scheduler)
        if state is None or state.name:
            return state
        context, optimizer = self._context, getattr(scheduler, "optimizer", None)
        context.count(catalog.SCHEDULER_STEPS, 0)
        for kind in catalog.SCHEDULER_MISUSES:
            context.count(catalog.SCHEDULER_MISUSE, 0, {"kind": kind})
        state.name, state.last_epoch = type(scheduler).__name__, _count_of(scheduler)
        state.created, state.epoch, state.optimizer_calls = context.recorder.step, context.training.epoch, self._optimizer_calls
        if optimizer is not None:
            state.optimizer = weakref.ref(optimizer)
            state.stepped, state.superseded = optimizer in self._stepping, optimizer in self._scheduled
        return state

    def _before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:  # noqa: FBT001  # a listener
        """Record an optimizer's step; if it is the first, its schedulers that have been stepped were stepped too early.

        Not so once a training step has ended since the scheduler was made, even one that the loss scaler skipped: there
        PyTorch's warning is wrong.
        """
        del closure
        self._optimizer_calls += 1
        if optimizer in self._stepping:
            return
        self._stepping.add(optimizer)
        for state in self._schedulers_of(optimizer):
            state.stepped = True
            if state.early and not state.inner and state.created == self._context.recorder.step:
                self._misuses.append(("before_optimizer", state))

    # -- in the sampler thread ---------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Update the counters and report misuse."""
        fresh = self._steps - self._shown
        if fresh and self._context.count(catalog.SCHEDULER_STEPS, fresh):
            self._shown += fresh
        while self._misuses:
            self._report(*self._misuses.pop(0))

    def observe(self) -> None:
        """Judge the living schedulers."""
        for scheduler, state in self._schedulers.living():
            self._judge(scheduler, state)
        self.sample()

    def _judge(self, scheduler: Any, state: _Scheduler) -> None:
        done, begun = self._context.recorder.step - state.created, self._context.training.epoch - state.epoch
        if state.inner:
            return
        # pytorch-ignite's LRScheduler raises the count itself, and asks for the rates
        state.superseded = state.superseded or _count_of(scheduler) != state.last_epoch
        is_late = done >= UNUSED_STEPS or begun > UNUSED_EPOCHS  # an epoch in progress does not count
        if is_late and state.stepped and not (state.steps or state.superseded):
            self._misuses.append(("never_stepped", state))
        optimizer = state.optimizer() if state.optimizer is not None else None
        called = optimizer is None or getattr(optimizer, "_opt_called", False) or state.stepped
        used = self._optimizer_calls - state.optimizer_calls >= IDLE_CALLS
        if state.steps and not called and done >= IDLE_STEPS and used:
            self._misuses.append(("idle_optimizer", state))

    def _report(self, kind: str, state: _Scheduler) -> None:
        if kind in state.reported:
            return
        state.reported.add(kind)
        self._context.count(catalog.SCHEDULER_MISUSE, 1, {"kind": kind})
        self._context.report(f"scheduler_{kind}", scheduler=state.name)


def _count_of(scheduler: Any) -> object:
    return getattr(scheduler, "last_epoch", None)
