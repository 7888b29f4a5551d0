"""Automatic mixed precision: skipped steps, the loss scale, and the data type that autocast uses.

A step that the scaler skips is recorded as a skipped step. A non-fused skip does not call the optimizer, so no hook fires. A
fused optimizer is always called, reads ``found_inf`` on its device and does nothing if it is set: the flag is copied without
synchronizing, and the step marked when the copy arrives. The patches sit at class level on ``torch.amp.GradScaler``, from which
the subclasses for CUDA and the CPU inherit, and on each subclass that overrides a patched method (such as
``ShardedGradScaler``).
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.catalog.findings import finding
from torchobs.flight.step_record import StepFlag
from torchobs.support.graph_safe import graph_being_made
from torchobs.support.import_hooks import after_import, cancel
from torchobs.taps import taps
from torchobs.taps.patch import Patch
from torchobs.tensors.references import ObjectIndex

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.abc import MetaPathFinder

    from torchobs.probes.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker


COLLAPSED = 1.0
"""Below this a scale shrinks gradients; the documentation of ``GradScaler.update`` calls that "something is likely wrong"."""


@dataclass(slots=True)
class LossScaling:
    """State of the loss scalers. Written by the AMP probe; read by clipping, in the training thread."""

    losses: int = 0
    """Number of scaled losses"""
    scale: Any = None
    """The latest scale, a tensor"""
    waits_for_unscale: bool = False
    """Whether a loss was scaled since gradients were last unscaled"""


@dataclass(slots=True)
class _Scaler:
    """State of one scaler. ``due``: copy its values at the next update."""

    index: int
    due: bool = True
    collapsed: bool = False
    scale: float = nan
    tracker: float = nan
    shown: tuple[float, float] = (nan, nan)


class LossScales:
    """Publishes loss scale and growth tracker of each loss scaler for the AMP probe.

    The sampler thread reads a scale on the CPU directly. One on a device is copied asynchronously after an ``update()``, at
    most ten times a second: ``get_scale()`` would synchronize.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self.used = False
        """True once an enabled scaler was used; the scaler itself may be gone by now."""
        self._scalers = ObjectIndex(len(catalog.SCALER.values), _Scaler)

    def updated(self, scaler: Any) -> None:
        """Record the update of an enabled scaler; copy its values if they are due."""
        self.used = True
        state = self._scalers.of(scaler)
        if state is None or not state.due:
            return
        scale, tracker = scaler._scale, scaler._growth_tracker
        if scale is None or tracker is None or scale.is_cpu:
            return
        state.due = False
        self._context.device.take(scale, functools.partial(setattr, state, "scale"))
        self._context.device.take(tracker, functools.partial(setattr, state, "tracker"))

    def sample(self) -> None:
        """Publish the scales. For the sampler thread."""
        for scaler, state in self._scalers.living():
            scale, tracker = scaler._scale, scaler._growth_tracker
            if scale is not None and tracker is not None and scale.is_cpu:
                state.scale, state.tracker = scale.item(), float(tracker.item())
            state.due = True
            if (state.scale, state.tracker) != state.shown:
                self._show(state)

    def _show(self, state: _Scaler) -> None:
        state.shown = (state.scale, state.tracker)
        for metric, value in ((catalog.AMP_SCALE, state.scale), (catalog.AMP_GROWTH_TRACKER, state.tracker)):
            self._context.set_gauge(metric, value, {"scaler": str(state.index)})
        collapsed = (state.scale if isfinite(state.scale) else inf) < COLLAPSED
        if collapsed and not state.collapsed:
            context = self._context
            context.event(catalog.EVENT_AMP_SCALE_COLLAPSED, {"scaler": str(state.index), "scale": state.scale})
            # a scaler that skips does not call the optimizer, before which gradients are looked at: where are they made?
            context.hooks.nonfinite_arrived.notify()
            context.warn_limited("amp scale", finding("amp_scale_collapsed", scale=state.scale).short)
        state.collapsed = collapsed


@dataclass(slots=True)
class _Optimizer:
    """State of one optimizer under a loss scaler."""

    index: int
    overflows: int = 0
    shown: int = 0
    streak: int = 0

    def count_step(self, *, overflow: bool) -> None:
        self.overflows += overflow
        self.streak = self.streak + 1 if overflow else 0


@dataclass(slots=True)
class _PendingFlag:
    """``found_inf`` of a fused optimizer, while it is copied from a device."""

    step: int
    optimizer: _Optimizer
    marked: bool
    """Whether another optimizer already marked the step as skipped"""
    arrived: list[float] = field(default_factory=list)


class Overflows:
    """Counts optimizer steps skipped because of gradients that are not finite, and how many in a row; marks these steps."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._optimizers = ObjectIndex(len(catalog.OPTIMIZER.values), self._make)
        self._pending: deque[_PendingFlag] = deque()
        self._late_step = 0
        self._shown_streak: int | None = None
        """``None`` before the first optimizer"""

    def _make(self, index: int) -> _Optimizer:
        """Return a new optimizer's state. Its counter exists, at 0, before anything is counted."""
        if self._shown_streak is None:
            self._shown_streak = 0
            self._context.set_gauge(catalog.AMP_SKIP_STREAK, 0.0)
        self._context.count(catalog.AMP_OVERFLOWS, 0, {"optimizer": str(index)})
        return _Optimizer(index)

    def count_step(self, optimizer: object, *, overflow: bool) -> None:
        """Record whether the optimizer has left the step out; if so, mark the step in progress."""
        if overflow:
            recorder = self._context.recorder
            recorder.flag(StepFlag.SKIPPED)
            for other in self._pending:
                other.marked = other.marked or other.step == recorder.step + 1
        state = self._optimizers.of(optimizer)
        if state is not None:
            state.count_step(overflow=overflow)

    def fused(self, optimizer: object, found_inf: Any) -> None:
        """Record a fused step with ``found_inf`` (one element, nonzero for an overflow) on the CPU or on a device."""
        if found_inf.device.type == "cpu":
            self.count_step(optimizer, overflow=bool(found_inf.item()))
            return
        recorder, state = self._context.recorder, self._optimizers.of(optimizer) or _Optimizer(-1)
        pending = _PendingFlag(recorder.step + 1, state, recorder.has_flag(StepFlag.SKIPPED))
        if self._context.device.take(found_inf, pending.arrived.append):
            self._pending.append(pending)

    def sample(self) -> None:
        """Mark ended steps that fused optimizers have skipped; publish the counts. For the sampler thread."""
        waiting, recorder = self._pending, self._context.recorder
        while waiting and waiting[0].arrived and waiting[0].step <= recorder.step:
            done = waiting.popleft()
            overflow = done.arrived[0] > 0.0
            done.optimizer.count_step(overflow=overflow)
            if overflow and not done.marked and done.step != self._late_step:
                self._late_step = done.step  # once, even if several of its optimizers overflowed
                recorder.late(done.step, StepFlag.SKIPPED, 0.0, 0.0)
        states = [state for _, state in self._optimizers.living()]
        for state in states:
            fresh = state.overflows - state.shown
            if fresh and self._context.count(catalog.AMP_OVERFLOWS, fresh, {"optimizer": str(state.index)}):
                state.shown += fresh
        streak = max((state.streak for state in states), default=0)
        if streak != (self._shown_streak or 0) and self._context.set_gauge(catalog.AMP_SKIP_STREAK, streak):
            self._shown_streak = streak


MAX_ENTRIES = 64
MAX_SHOWN = 8
UNSCALED_STEPS = 100
"""Steps after which a float16 run would have used its loss scaler"""


class AutocastWatch:
    """The data types that autocast uses, by a few entries: nothing may be added to every step. A part of the AMP probe.

    Autocast is thread-local and ends with the forward pass, so neither the sampler thread nor our hooks can see it. Its
    ``__enter__`` is wrapped until it was entered once enabled, or 64 times disabled, and again ten seconds later. Dynamo does
    not trace ``__enter__`` but calls it when it compiles a region with autocast inside, so that is seen too.
    """

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        """Wrap autocast. Raises ``AttributeError`` where torch has no such class."""
        import torch  # torch is optional until training begins
        from torch.amp import autocast_mode

        self._context, self._owner, self._is_grad_enabled = context, autocast_mode.autocast, torch.is_grad_enabled
        self._note_safely = breaker.guard(self._note_entry)
        self._patch: Patch | None = None
        self._entries_left = 0
        self._dtypes: dict[tuple[str, str], bool] = {}
        """Device and data type; whether in training"""
        self._shown: set[tuple[str, str]] = set()
        self._reported = self._removed = False
        self._wrap()

    def remove(self) -> None:
        """Restore autocast for good; the rank's last round calls :meth:`observe` once more."""
        self._removed = True
        if self._patch is not None:
            self._patch.undo()

    def _wrap(self) -> None:
        if self._patch is None and not self._removed:
            self._entries_left = MAX_ENTRIES
            self._patch = Patch(self._owner, "__enter__", self._watched_enter)

    def _watched_enter(self, original: Any) -> Any:
        note = self._note_safely

        @functools.wraps(original)
        def enter(context: Any) -> Any:
            entered = original(context)
            note(context)
            return entered

        return enter

    def _note_entry(self, context: Any) -> None:
        self._entries_left -= 1
        if context._enabled:
            used = context.device, str(context.fast_dtype).removeprefix("torch.")
            self._dtypes[used] = self._is_grad_enabled() or self._dtypes.get(used, False)
            if self._is_grad_enabled():
                self._context.training.autocast[used[0]] = used[1]
        if (context._enabled or self._entries_left <= 0) and self._patch is not None:
            self._patch.undo()
            self._patch = None  # only now, since the sampler thread may wrap it again

    def observe(self, *, scaled: bool) -> None:
        """Publish the data types of autocast and wrap it again. ``scaled``: a loss scaler was used. For the sampler thread."""
        context, dtypes = self._context, self._dtypes.copy()
        for device, dtype in sorted(dtypes.keys() - self._shown)[: MAX_SHOWN - len(self._shown)]:
            self._shown.add((device, dtype))
            context.set_gauge(catalog.AMP_AUTOCAST, 1.0, {"device_type": device, "dtype": dtype})
        in_float16 = any(training and dtype == "float16" for (_, dtype), training in dtypes.items())
        if in_float16 and not scaled and not self._reported and context.recorder.step >= UNSCALED_STEPS:
            self._reported = True
            context.event(catalog.EVENT_AMP_UNSCALED, {"steps": context.recorder.step})
            context.warn_limited("amp unscaled", finding("amp_unscaled").short)
        self._wrap()


SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"


class AmpProbe:
    """Watches loss scalers and autocast."""

    name = "amp"

    def __init__(self, scaling: LossScaling) -> None:
        self._scaling = scaling
        self._handle: MetaPathFinder | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._autocast: AutocastWatch | None = None
        self._in_scaler_step = self._optimizer_called = self._removed = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context = context
        self._loss_scaled, self._unscales = context.hooks.loss_scaled.listeners, context.hooks.unscales.listeners
        self._overflows, self._scales = Overflows(context), LossScales(context)
        self._breaker, self._graph_being_made = context.breaker(self.name), graph_being_made()
        self._note_called_safely = self._breaker.guard(self._note_called)
        self._watch_optimizers_safely = self._breaker.guard(self._watch_optimizers)
        watched = {
            "step": self._watched_step, "scale": self._watched(self._after_scale),
            "unscale_": self._watched(self._before_unscale, first=True), "update": self._watched(self._after_update),
        }  # fmt: skip
        for name, make in watched.items():
            taps.SCALER[name].lead(make, self.name)
        self._handle = after_import(SHARDED, self._breaker.guard(self._renew))
        self._autocast = AutocastWatch(context, self._breaker)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._removed = True
        cancel(self._handle)
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._autocast is not None:
            self._autocast.remove()
        for tap in taps.SCALER.values():
            tap.leave()

    def sample(self) -> None:
        """Publish the scales; count steps that fused optimizers have skipped."""
        self._overflows.sample()
        self._scales.sample()

    def observe(self) -> None:
        """Watch scaler classes defined since the last call; check autocast."""
        self._renew()
        if self._autocast is not None:
            self._autocast.observe(scaled=self._scales.used)

    @staticmethod
    def _renew() -> None:
        for tap in taps.SCALER.values():
            tap.renew()

    def _watched_step(self, original: Any) -> Any:
        note = self._breaker.guard(self._after_step)

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # a subclass calls its parent; a disabled scaler has no `_scale` and only forwards
            off = self._in_scaler_step or self._breaker.is_open or not getattr(scaler, "_enabled", False)
            if off or self._graph_being_made():
                return original(scaler, optimizer, *args, **kwargs)
            if self._unsubscribe is None:
                self._watch_optimizers_safely()
            self._in_scaler_step, self._optimizer_called = True, False
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._in_scaler_step = False
            note(optimizer)
            return result

        return step

    def _watched(self, note: Callable[[Any, Any, Any], None], *, first: bool = False) -> Callable[[Any], Any]:
        """Return a wrapper for a method of a scaler that calls ``note`` with scaler, argument and result, or ``first``."""
        note_safely = self._breaker.guard(note)

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def watched(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                argument = next(iter((*args, *kwargs.values())), None)
                if first:
                    note_safely(scaler, argument, None)
                result = original(scaler, *args, **kwargs)
                if not first and not self._graph_being_made():
                    note_safely(scaler, argument, result)
                return result

            return watched

        return make

    def _watch_optimizers(self) -> None:
        """Hook optimizers from the first scaler step on, so that other trainings do not pay for it."""
        self._unsubscribe = taps.BEFORE_STEP.subscribe(self._before_optimizer)

    def _before_optimizer(self, optimizer: Any) -> None:
        if self._in_scaler_step and not self._optimizer_called and not self._removed:  # a subclass's step calls its parent's
            self._optimizer_called = True
            self._note_called_safely(optimizer)

    def _note_called(self, optimizer: Any) -> None:
        """Record that the scaler calls the optimizer: it steps, unless it is fused and finds ``found_inf`` set."""
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None:
            self._overflows.count_step(optimizer, overflow=False)
        else:
            self._overflows.fused(optimizer, found_inf)

    def _after_step(self, optimizer: Any) -> None:
        # without torch's hooks a skip looks like a step
        if self._optimizer_called or self._removed or not getattr(type(optimizer).step, "hooked", False):
            return
        recorder = self._context.recorder
        recorder.optimizer_begins(optimizer)
        self._overflows.count_step(optimizer, overflow=True)
        recorder.optimizer_ends(optimizer, monotonic_ns())

    def _after_scale(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        if not scaler._enabled:
            return
        scaling = self._scaling
        scaling.scale = scaler._scale  # get_scale() would synchronise
        scaling.losses, scaling.waits_for_unscale = scaling.losses + 1, True
        for note_scaled in self._loss_scaled:
            note_scaled(outputs, scaled, scaler._scale)

    def _before_unscale(self, scaler: Any, optimizer: Any, _result: Any) -> None:
        if not scaler._enabled:
            return
        self._scaling.waits_for_unscale = False
        if scaler._scale is not None:
            for note_unscaled in self._unscales:
                note_unscaled(optimizer, scaler._scale)

    def _after_update(self, scaler: Any, _new_scale: Any, _result: Any) -> None:
        if scaler._enabled:
            self._scales.updated(scaler)
