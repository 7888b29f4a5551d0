"""Spans of steps: a sample of them, slow and anomalous ones, those with events or with spans of the application.

Steps are sampled by their number, so that those of all ranks line up: each step is a trace of its own, in which the spans of
all ranks stand side by side. (A trace of an hour's steps would be larger than Tempo takes, 5 MB, from 16 ranks on.) Its
spans link to the run and to the segment in which it began.

Written by the sampler thread from the step records, at no cost for the training thread. The event ring is small (190 KiB of a
1 MiB file) and a step with its phases takes 2 KiB, hence the rate limits.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.speed import alike_interval, slow_from, taken
from torchobs.flight.format import event_ring
from torchobs.flight.format.event_ring import SpanId
from torchobs.flight.format.layout import PHASE_NAMES
from torchobs.flight.format.step_record import RecordKind, StepFlag
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchobs.flight.format.step_record import StepRecord
    from torchobs.probes.core.context import ProbeContext
    from torchobs.runtime.root_spans import RootSpans

    _Entry = tuple[StepRecord, bytes]

_INTERVAL_S, _SHORTEST_S = 10.0, 1.0
"""Time between two sampled steps: as a rule, and at least where the user asks for every N-th"""
_SAMPLED_EVERY_NS, _SAMPLED_BURST = 1_000_000_000, 20
"""Last resort for the ring, should steps become much shorter at once"""
_INTERVAL_NS, _BURST = 10_000_000_000, 6
"""Rate limit of slow steps, of anomalous ones, and of those with events"""
_USER_INTERVAL_NS, _USER_BURST = 100_000_000, 20
"""Rate limit of steps with application spans; beyond it these spans are children of the run's span"""
_WAITING, _KEPT, _COMPARED = 1024, 128, 64
SAMPLED, SLOW, ANOMALOUS, EVENT, USER = "sampled", "slow", "anomalous", "event", "user"


class StepSpans:
    """One per session. ``write`` is ``RunSpan``'s; ``anomalous`` gets the numbers of anomalous steps."""

    def __init__(self, context: ProbeContext, write: Callable[..., None], roots: RootSpans, anomalous: deque[int]) -> None:
        self._context, self._write, self._roots, self._ids, self._anomalous = context, write, roots, roots.ids, anomalous
        asked = context.settings.trace_steps
        self._every, self._target_s = (1, _INTERVAL_S) if asked == "auto" else (asked, _SHORTEST_S)
        self._factor = 1
        """Power of two: of the steps to be sampled one in so many is"""
        self._waiting: deque[_Entry] = deque(maxlen=_WAITING)
        self._kept: deque[_Entry] = deque(maxlen=_KEPT)
        self._late: deque[StepRecord] = deque(maxlen=_KEPT)
        self._durations: deque[float] = deque(maxlen=_COMPARED)
        self._limiters = {reason: RateLimiter(_INTERVAL_NS, _BURST) for reason in (SLOW, ANOMALOUS, EVENT)}
        self._limiters[SAMPLED] = RateLimiter(_SAMPLED_EVERY_NS, _SAMPLED_BURST)
        self._user_limiter = RateLimiter(_USER_INTERVAL_NS, _USER_BURST)
        self._written: deque[int] = deque(maxlen=_KEPT)
        self._wanted: set[int] = set()
        self._parent = 0, SpanId("", "")
        self.first_ns = 0
        """When the first step ended, on CLOCK_MONOTONIC; 0 before"""
        context.writer.taken = self._waiting

    def parent_span(self) -> SpanId | None:
        """Return the current step's span for application spans; ``None`` outside of steps or beyond the limit."""
        context, step = self._context, self._context.recorder.ended + 1
        if get_ident() != context.training.thread or not context.recorder.has_begun():
            return None
        known, ids = self._parent
        if step != known:
            if not self._user_limiter.take(monotonic_ns()):
                return None
            ids = self._ids.step(step)
            self._parent = step, ids
            self._wanted.add(step)
        return ids

    def sample(self) -> None:
        """Write the spans selected from the steps that have ended."""
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._take_late([record for record, _ in taken if record.kind == RecordKind.LATE and record.flags & StepFlag.GRAD_NORM])
        fresh = [entry for entry in taken if entry[0].kind == RecordKind.STEP]
        self._kept.extend(fresh)
        self._consider([entry for entry in fresh if entry[0].step in self._wanted], USER)
        self._consider(self._found(self._anomalous), ANOMALOUS)
        self._consider(self._found(self._context.writer.event_steps), EVENT)
        if fresh:
            self.first_ns = self.first_ns or fresh[0][0].end_ns
            self._consider_fresh(fresh)

    def _found(self, numbers: deque[int]) -> list[_Entry]:
        """Return the steps with these numbers, which may have ended a while ago; numbers of later steps stay."""
        taken = {numbers.popleft() for _ in range(len(numbers))}
        if not taken:
            return []
        last = self._kept[-1][0].step if self._kept else 0
        numbers.extend(number for number in taken if number > last)
        return [entry for entry in self._kept if entry[0].step in taken]

    def _consider_fresh(self, fresh: list[_Entry]) -> None:
        """Write slow steps and a sample; up to a thousand a second come, where a call for each would double the cost."""
        if any(record.flags & StepFlag.NEW_MODEL for record, _ in fresh):
            self._durations.clear()
        slow_s, durations, every = slow_from(self._durations), self._durations, self._every
        durations.extend([record.duration_s for record, _ in fresh if not record.flags & StepFlag.UNTIMED])
        if durations:
            self._factor = alike_interval(every * median(durations), self._target_s)
        self._consider([entry for entry in fresh if entry[0].duration_s >= slow_s], SLOW)
        numbers = taken([record.step // every for record, _ in fresh if not record.step % every], self._factor)
        steps = {number * every for number in numbers}
        self._consider([entry for entry in fresh if entry[0].step in steps and not entry[0].flags & StepFlag.UNTIMED], SAMPLED)

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

    def _consider(self, entries: Iterable[_Entry], reason: str) -> None:
        """Write the spans of those that have none yet, as far as the reason's limit allows."""
        for record, raw in entries:
            if reason == USER:
                self._wanted.discard(record.step)
            elif record.step in self._written or not self._limiters[reason].take(record.end_ns):
                continue
            self._write_whole(record, raw, reason)

    def _write_whole(self, record: StepRecord, raw: bytes, reason: str) -> None:
        exact = event_ring.parts(raw)
        started_ns = exact[0] if exact else record.end_ns - round(sum(record.phase_s) * 1e9)
        norms = [late.grad_norm for late in self._late if late.step == record.step]
        attributes: dict[str, object] = {"reason": reason, **_values(record, norms)}
        if exact is None:
            attributes |= {f"{name}_s": value for name, value in zip(PHASE_NAMES, record.phase_s, strict=True) if value}
        ids = self._write_step(record.step, started_ns, record.end_ns, attributes)
        for phase, from_ns, to_ns in exact[1] if exact else ():
            own = ids._replace(span=event_ring.derived(ids.span, phase))
            self._write(catalog.SPAN_STEP_PHASE.name, own, from_ns, to_ns, {"phase": phase}, {"parent": ids.span})

    def _write_step(self, step: int, started_ns: int, ended_ns: int, attributes: dict[str, object]) -> SpanId:
        ids, links = self._ids.step(step), self._roots.links(self._roots.at(started_ns))
        self._written.append(step)
        self._write(catalog.SPAN_STEP.name, ids, started_ns, ended_ns, {"step": step, **attributes}, {"links": links})
        return ids


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
