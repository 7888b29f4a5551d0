"""Counts optimizer steps skipped because of non-finite gradients, and how many in a row.

For most optimizers the loss scaler itself waits for the result and then calls them or not. A fused optimizer is always called
and reads ``found_inf`` on its device: the flag is copied without synchronizing, and the step marked when the copy arrives.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.format.step_record import StepFlag
from torchobs.probes.core.object_index import ObjectIndex

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext


class _Optimizer:
    """State of one optimizer under a loss scaler."""

    __slots__ = ("index", "overflows", "shown", "streak")

    def __init__(self, index: int) -> None:
        self.index = index
        self.overflows = self.shown = self.streak = 0

    def note(self, *, overflow: bool) -> None:
        self.overflows += overflow
        self.streak = self.streak + 1 if overflow else 0


class _PendingFlag:
    """``found_inf`` of a fused optimizer, while it is copied from a device."""

    __slots__ = ("arrived", "marked", "optimizer", "step")

    def __init__(self, step: int, optimizer: _Optimizer | None, *, marked: bool) -> None:
        self.step, self.optimizer = step, optimizer
        self.marked = marked
        """True if another optimizer already marked the step as skipped"""
        self.arrived: list[float] = []


class Overflows:
    """Counts overflows for the AMP probe and marks skipped steps."""

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

    def stepped(self, optimizer: object) -> None:
        """Note that the optimizer found all gradients finite."""
        state = self._optimizers.of(optimizer)
        if state is not None:
            state.streak = 0

    def skipped(self, optimizer: object) -> None:
        """Note that the optimizer did not step; mark the step in progress."""
        recorder = self._context.recorder
        recorder.flag(StepFlag.SKIPPED)
        for other in self._pending:
            other.marked = other.marked or other.step == recorder.step + 1
        state = self._optimizers.of(optimizer)
        if state is not None:
            state.note(overflow=True)

    def fused(self, optimizer: object, found_inf: Any) -> None:
        """Note a fused step with ``found_inf`` (one element, nonzero for an overflow) on the CPU or on a device."""
        if found_inf.device.type == "cpu":
            note = self.skipped if found_inf.item() else self.stepped
            note(optimizer)
            return
        recorder = self._context.recorder
        marked = bool(recorder.values.flags & StepFlag.SKIPPED)
        pending = _PendingFlag(recorder.step + 1, self._optimizers.of(optimizer), marked=marked)
        if self._context.device.take(found_inf, pending.arrived.append):
            self._pending.append(pending)

    def sample(self) -> None:
        """Mark ended steps that fused optimizers have skipped; publish the counts. For the sampler thread."""
        waiting, recorder = self._pending, self._context.recorder
        while waiting and waiting[0].arrived and waiting[0].step <= recorder.step:
            done = waiting.popleft()
            overflow = done.arrived[0] > 0.0
            if done.optimizer is not None:
                done.optimizer.note(overflow=overflow)
            if overflow and not done.marked and done.step != self._late_step:
                self._late_step = done.step  # once, even if several of its optimizers overflowed
                recorder.late(done.step, StepFlag.SKIPPED, 0.0, 0.0)
        self._show()

    def _show(self) -> None:
        states = [state for _, state in self._optimizers.living()]
        for state in states:
            fresh = state.overflows - state.shown
            if fresh and self._context.count(catalog.AMP_OVERFLOWS, fresh, {"optimizer": str(state.index)}):
                state.shown += fresh
        streak = max((state.streak for state in states), default=0)
        if streak != (self._shown_streak or 0) and self._context.set_gauge(catalog.AMP_SKIP_STREAK, streak):
            self._shown_streak = streak
