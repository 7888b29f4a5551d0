"""Spans of steps: a sample of them, the slow ones, the anomalous ones, and those with spans of the application's own.

Written by the sampler thread from the step records, which hold all the times; the training thread does nothing for it. The
event ring is small (190 KiB in a file of 1 MiB), and a step with its phases takes 2 KiB of it: hence the budgets.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.slow_steps import slow_from
from torchobs.flight.format import span_ids
from torchobs.flight.format.step_record import PHASE_NAMES, RecordKind, StepFlag
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.format.step_record import StepRecord
    from torchobs.probes.core.context import ProbeContext

_EVERY_NS = 10_000_000_000
_LEAST_NS = 1_000_000_000
_BURST = 6
_USER_EVERY_NS, _USER_BURST = 100_000_000, 20
"""An application with spans in every step fills the ring itself; beyond this its spans are the run's children"""
_WAITING, _KEPT, _COMPARED = 1024, 128, 64
SAMPLED, SLOW, ANOMALOUS, USER = "sampled", "slow", "anomalous", "user"


class StepSpans:
    """One per session. ``write`` is ``RunSpan.write``; ``run`` the run's span."""

    def __init__(self, context: ProbeContext, write: Callable[..., None], run: str) -> None:
        self._context, self._write, self._run = context, write, run
        self._interval = context.settings.trace_steps
        self._waiting: deque[tuple[StepRecord, bytes]] = deque(maxlen=_WAITING)
        self._kept: deque[tuple[StepRecord, bytes]] = deque(maxlen=_KEPT)
        self._late: deque[StepRecord] = deque(maxlen=_KEPT)
        self._durations: deque[float] = deque(maxlen=_COMPARED)
        self._budgets = {reason: RateLimiter(_EVERY_NS, _BURST) for reason in (SLOW, ANOMALOUS)}
        self._due_ns, self._pause_ns = 0, _EVERY_NS if self._interval == "auto" else _LEAST_NS
        self._users = RateLimiter(_USER_EVERY_NS, _USER_BURST)
        self._written: deque[int] = deque(maxlen=_KEPT)
        self._wanted: set[int] = set()
        self._adopting = 0
        context.writer.taken = self._waiting

    def adopt(self) -> str | None:
        """Return the span of the step under way, for a span that the application begins; ``None`` where there is none."""
        context, step = self._context, self._context.recorder.ended + 1
        if get_ident() != context.thread or not (context.recorder.trace or context.recorder.timeline.started):
            return None
        if step != self._adopting:
            if not self._users.take(monotonic_ns()):
                return None
            self._adopting = step
            self._wanted.add(step)
        return span_ids.step_span_id(self._run, step)

    def sample(self) -> None:
        """Write what is due of the steps that have ended."""
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._take_late([record for record, _ in taken if record.kind == RecordKind.LATE and record.flags & StepFlag.GRAD_NORM])
        anomalous = {self._context.anomalous.popleft() for _ in range(len(self._context.anomalous))}
        for record, raw in [entry for entry in self._kept if entry[0].step in anomalous]:
            self._offer(record, raw, ANOMALOUS)  # a device delivered its loss afterwards, or the fold was not done yet
        fresh = [entry for entry in taken if entry[0].kind == RecordKind.STEP]
        if not fresh:
            return
        if any(record.flags & StepFlag.NEW_MODEL for record, _ in fresh):
            self._durations.clear()
        slow_s, interval = slow_from(self._durations), self._interval
        self._kept.extend(fresh)
        self._durations.extend([record.duration_s for record, _ in fresh if not record.flags & StepFlag.UNTIMED])
        for record, raw in fresh:  # a thousand a second: a call for each would cost as much as the rest
            due = record.end_ns >= self._due_ns and (interval == "auto" or not record.step % interval)
            if due or record.duration_s >= slow_s or record.step in self._wanted or record.step in anomalous:
                self._offer(record, raw, self._reason(record, slow_s, anomalous))

    def end(self) -> None:
        """The run ends: write what is left, and for the application's spans after the last step a step that did not end."""
        self.sample()
        last_ns = self._kept[-1][0].end_ns if self._kept else monotonic_ns()
        for step in sorted(self._wanted):
            self._emit(step, last_ns, monotonic_ns(), {"reason": USER, "ended": False})
        self._wanted.clear()

    def _take_late(self, records: list[StepRecord]) -> None:
        """Keep the norms that a device has delivered; tell those whose step has its span already."""
        self._late.extend(records)
        for record in records:
            if record.step in self._written and isfinite(record.grad_norm):
                self._context.writer.events.append({"k": "late", "step": record.step, "grad_norm": record.grad_norm})

    def _reason(self, record: StepRecord, slow_s: float, anomalous: set[int]) -> str:
        if record.step in self._wanted:
            return USER
        if record.step in anomalous:
            return ANOMALOUS
        return SLOW if record.duration_s >= slow_s else SAMPLED

    def _offer(self, record: StepRecord, raw: bytes, reason: str) -> None:
        if reason == USER:
            self._wanted.discard(record.step)
        elif reason == SAMPLED:
            if record.flags & StepFlag.UNTIMED:
                return
            self._due_ns = record.end_ns + self._pause_ns
        elif record.step in self._written or not self._budgets[reason].take(record.end_ns):
            return
        exact = span_ids.parts(raw)
        begun_ns = exact[0] if exact else record.end_ns - round(sum(record.phase_s) * 1e9)
        norms = [late.grad_norm for late in self._late if late.step == record.step]
        attributes: dict[str, object] = {"reason": reason, **_values(record, norms)}
        if exact is None:
            attributes |= {f"{name}_s": value for name, value in zip(PHASE_NAMES, record.phase_s, strict=True) if value}
        own = self._emit(record.step, begun_ns, record.end_ns, attributes)
        for phase, from_ns, to_ns in exact[1] if exact else ():
            identity = {"span_id": span_ids.phase_span_id(own, phase), "parent": own}
            self._write(catalog.SPAN_STEP_PHASE.name, from_ns, to_ns, {"phase": phase}, failed=False, **identity)

    def _emit(self, step: int, begun_ns: int, ended_ns: int, attributes: dict[str, object]) -> str:
        own = span_ids.step_span_id(self._run, step)
        self._written.append(step)
        self._write(catalog.SPAN_STEP.name, begun_ns, ended_ns, {"step": step, **attributes}, failed=False, span_id=own)
        return own


def _values(record: StepRecord, late_norms: list[float]) -> dict[str, object]:
    found: dict[str, object] = {}
    if not record.flags & StepFlag.UNTIMED:
        found["duration_s"] = record.duration_s
    if record.flags & StepFlag.LOSS and isfinite(record.loss):
        found["loss"] = record.loss
    norms = [record.grad_norm] if record.flags & StepFlag.GRAD_NORM else late_norms
    if norms and isfinite(norms[-1]):
        found["grad_norm"] = norms[-1]
    if record.flags & StepFlag.SKIPPED:
        found["skipped"] = True
    return found
