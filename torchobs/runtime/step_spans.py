"""Spans of steps: a sample of them, slow ones, anomalous ones, and those in which the application starts spans.

Written by the sampler thread from the step records, at no cost for the training thread. The event ring is small (190 KiB of a
1 MiB file) and a step with its phases takes 2 KiB, hence the rate limits.
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

_INTERVAL_NS = 10_000_000_000
_MIN_INTERVAL_NS = 1_000_000_000
_BURST = 6
_USER_INTERVAL_NS, _USER_BURST = 100_000_000, 20
"""Rate limit of steps with application spans; beyond it these spans are children of the run's span"""
_WAITING, _KEPT, _COMPARED = 1024, 128, 64
SAMPLED, SLOW, ANOMALOUS, USER = "sampled", "slow", "anomalous", "user"


class StepSpans:
    """One per session. ``write`` is ``RunSpan.write``; ``run`` the id of the run's span; ``anomalous`` gets anomalous steps."""

    def __init__(self, context: ProbeContext, write: Callable[..., None], run: str, anomalous: deque[int]) -> None:
        self._context, self._write, self._run, self._anomalous = context, write, run, anomalous
        self._interval = context.settings.trace_steps
        self._waiting: deque[tuple[StepRecord, bytes]] = deque(maxlen=_WAITING)
        self._kept: deque[tuple[StepRecord, bytes]] = deque(maxlen=_KEPT)
        self._late: deque[StepRecord] = deque(maxlen=_KEPT)
        self._durations: deque[float] = deque(maxlen=_COMPARED)
        self._limiters = {reason: RateLimiter(_INTERVAL_NS, _BURST) for reason in (SLOW, ANOMALOUS)}
        self._due_ns, self._pause_ns = 0, _INTERVAL_NS if self._interval == "auto" else _MIN_INTERVAL_NS
        self._user_limiter = RateLimiter(_USER_INTERVAL_NS, _USER_BURST)
        self._written: deque[int] = deque(maxlen=_KEPT)
        self._wanted: set[int] = set()
        self._parent_step = 0
        context.writer.taken = self._waiting

    def parent_span(self) -> str | None:
        """Return the current step's span id for application spans; ``None`` outside of steps or beyond the limit."""
        context, step = self._context, self._context.recorder.ended + 1
        if get_ident() != context.training.thread or not context.recorder.has_begun():
            return None
        if step != self._parent_step:
            if not self._user_limiter.take(monotonic_ns()):
                return None
            self._parent_step = step
            self._wanted.add(step)
        return span_ids.step_span_id(self._run, step)

    def sample(self) -> None:
        """Write the spans selected from the steps that have ended."""
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._take_late([record for record, _ in taken if record.kind == RecordKind.LATE and record.flags & StepFlag.GRAD_NORM])
        anomalous = {self._anomalous.popleft() for _ in range(len(self._anomalous))}
        for record, raw in [entry for entry in self._kept if entry[0].step in anomalous]:
            self._consider(record, raw, ANOMALOUS)  # its loss came late from a device, or was not folded yet
        fresh = [entry for entry in taken if entry[0].kind == RecordKind.STEP]
        if not fresh:
            return
        if any(record.flags & StepFlag.NEW_MODEL for record, _ in fresh):
            self._durations.clear()
        slow_s, interval = slow_from(self._durations), self._interval
        self._kept.extend(fresh)
        self._durations.extend([record.duration_s for record, _ in fresh if not record.flags & StepFlag.UNTIMED])
        for record, raw in fresh:  # up to a thousand a second, where a call each would double the cost
            due = record.end_ns >= self._due_ns and (interval == "auto" or not record.step % interval)
            if due or record.duration_s >= slow_s or record.step in self._wanted or record.step in anomalous:
                self._consider(record, raw, self._reason(record, slow_s, anomalous))

    def end(self) -> None:
        """Write pending spans, and an unfinished step's span if application spans refer to it."""
        self.sample()
        last_ns = self._kept[-1][0].end_ns if self._kept else monotonic_ns()
        for step in sorted(self._wanted):
            self._write_step(step, last_ns, monotonic_ns(), {"reason": USER, "ended": False})
        self._wanted.clear()

    def _take_late(self, records: list[StepRecord]) -> None:
        """Keep norms that a device delivered late; append them to spans that are already written."""
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

    def _consider(self, record: StepRecord, raw: bytes, reason: str) -> None:
        if reason == USER:
            self._wanted.discard(record.step)
        elif reason == SAMPLED:
            if record.flags & StepFlag.UNTIMED:
                return
            self._due_ns = record.end_ns + self._pause_ns
        elif record.step in self._written or not self._limiters[reason].take(record.end_ns):
            return
        exact = span_ids.parts(raw)
        started_ns = exact[0] if exact else record.end_ns - round(sum(record.phase_s) * 1e9)
        norms = [late.grad_norm for late in self._late if late.step == record.step]
        attributes: dict[str, object] = {"reason": reason, **_values(record, norms)}
        if exact is None:
            attributes |= {f"{name}_s": value for name, value in zip(PHASE_NAMES, record.phase_s, strict=True) if value}
        span_id = self._write_step(record.step, started_ns, record.end_ns, attributes)
        for phase, from_ns, to_ns in exact[1] if exact else ():
            identity = {"span_id": span_ids.phase_span_id(span_id, phase), "parent": span_id}
            self._write(catalog.SPAN_STEP_PHASE.name, from_ns, to_ns, {"phase": phase}, failed=False, **identity)

    def _write_step(self, step: int, started_ns: int, ended_ns: int, attributes: dict[str, object]) -> str:
        span_id = span_ids.step_span_id(self._run, step)
        self._written.append(step)
        self._write(catalog.SPAN_STEP.name, started_ns, ended_ns, {"step": step, **attributes}, failed=False, span_id=span_id)
        return span_id


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
