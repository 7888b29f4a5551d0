"""Spans of the run, of its segments and of sampled steps.

A span is sent when it has ended, and backends keep and show traces by the time at which they begin. So none lasts for weeks: a
segment ends with its epoch, or after an hour; each has a trace of its own, the same on all ranks, and links to the run's span,
which is sent once training has begun. Epochs of less than a minute share a segment.

A root's start is written at once, so that an exporter can complete it for a killed rank, and again before the ring drops it.

A step is a trace of its own: that of an hour's steps would be larger than Tempo takes, 5 MB, from 16 ranks on.

Written by the sampler thread from the step records, at no cost for the training thread. The event ring is small (190 KiB of a
1 MiB file) and a step with its phases takes 2 KiB, hence the rate limits.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Literal

from torchobs import catalog
from torchobs.detect.speed import alike_interval, slow_from, taken
from torchobs.flight.events import TRACE_ID, SpanId, SpanIds, derived
from torchobs.flight.layout import PHASE_NAMES
from torchobs.flight.step_record import RecordKind, StepFlag
from torchobs.support.import_hooks import after_import, cancel
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from importlib.abc import MetaPathFinder

    from opentelemetry.trace import SpanContext

    from torchobs.config.settings import Settings
    from torchobs.flight.step_record import StepRecord
    from torchobs.flight.writer import FlightWriter
    from torchobs.probes.context import EpochStart, ProbeContext


LONGEST_NS = 3_600_000_000_000
"""Longest segment"""
_SHORT_S = 60.0
"""Shortest segment: shorter epochs are put together"""
_KEPT = 8
_ANNOUNCED_LAPS = 0.5

Link = list[object]
Status = Literal["unset", "ok", "error"]


def link(to: SpanId, flags: int, relation: str) -> Link:
    """Return a link as a frame has it; ``relation``: of the other span: run, segment or previous."""
    return [to.trace, to.span, flags, "", {"torchobs.link.relation": relation}, 0]


@dataclass(frozen=True, slots=True)
class Root:
    """A root span. ``begun_ns`` is on CLOCK_MONOTONIC; ``step``: the last step that had ended by then."""

    ids: SpanId
    begun_ns: int
    step: int
    frame: dict[str, object]
    attributes: dict[str, object] = field(default_factory=dict)


class RootSpans:
    """One per session. ``flags``: W3C trace flags; ``remote``: fields of the run's frame about the launcher's span."""

    def __init__(self, writer: FlightWriter, flags: int, remote: dict[str, object]) -> None:
        self.ids = SpanIds(writer.header)
        self._writer, self._flags = writer, flags
        header = writer.header
        run = self.frame(catalog.SPAN_RUN.name, self.ids.run, header.monotonic_ns) | remote
        self._roots: deque[Root] = deque([Root(self.ids.run, header.monotonic_ns, 0, run)], maxlen=_KEPT)
        self._epoch, self._epoch_ns, self._part = 0, header.monotonic_ns, 0
        self._epoch_starts: deque[int] = deque(maxlen=_KEPT)
        self._announced = 0.0

    @property
    def current(self) -> Root:
        """The root span that is open."""
        return self._roots[-1]

    def find_root(self, ns: int) -> Root:
        """Return the root that had begun at this moment; for an earlier moment the oldest that is kept."""
        roots = list(self._roots)  # other threads ask, too
        return next((root for root in reversed(roots) if root.begun_ns <= ns), roots[0])

    def links(self, root: Root) -> list[Link]:
        """Return the links of a span in a trace of its own: to the run, and to the segment in which it began."""
        links = [link(self.ids.run, self._flags, "run")]
        return links if root.ids == self.ids.run else [*links, link(root.ids, self._flags, "segment")]

    def announce(self) -> None:
        """Write the start of the current root."""
        root = self.current
        self._announced = self._writer.events.laps
        self._writer.events.append({"k": "span_start", **root.frame, "attrs": root.attributes})

    def advance(self, epochs: Iterable[EpochStart], now_ns: int, step: int, first_ns: int) -> None:
        """End the current root if its time is over, and begin the next. ``step``: the last step that has ended.

        ``epochs``: those that have begun since the last call; ``first_ns``: end of the first step, 0 before that.
        """
        for epoch in epochs:
            self._cut_hours(epoch.begun_ns, epoch.step)
            self._epoch_starts.append(epoch.begun_ns)
            if (epoch.number - 1) % self._epochs_together() == 0 or self.current.ids == self.ids.run:
                self._cut(epoch.begun_ns, epoch.step, epoch.number, 0)
        if first_ns and self.current.ids == self.ids.run:
            self._cut(first_ns, 1, 0, 0)
        self._cut_hours(now_ns, step)
        if self._writer.events.laps - self._announced >= _ANNOUNCED_LAPS:
            self.announce()

    def end(self, now_ns: int, step: int, status: Status) -> None:
        """End the current root with the rank."""
        root = self.current
        attributes = root.attributes | ({"steps": step - root.step} if root.ids != self.ids.run else {})
        self.write(root.frame, now_ns, status, attributes)

    def write(self, frame: Mapping[str, object], ended_ns: int, status: Status, attributes: Mapping[str, object]) -> None:
        """Write an ended span with this :meth:`frame`."""
        self._writer.events.append({"k": "span", **frame, "t1": self._wall(ended_ns), "status": status, "attrs": attributes})

    def _epochs_together(self) -> int:
        starts = self._epoch_starts
        if len(starts) <= 1:
            return 1
        return alike_interval((starts[-1] - starts[0]) / 1e9 / (len(starts) - 1), _SHORT_S)

    def _cut_hours(self, now_ns: int, step: int) -> None:
        part = (now_ns - self._epoch_ns) // LONGEST_NS
        if part > self._part:
            self._cut(self._epoch_ns + part * LONGEST_NS, step, self._epoch, part)

    def _cut(self, at_ns: int, step: int, epoch: int, part: int) -> None:
        previous = self.current
        at_ns = max(at_ns, previous.begun_ns)
        self.end(at_ns, step, "unset")
        if not part:
            self._epoch_ns = at_ns
        self._epoch, self._part = epoch, part
        ids = self.ids.segment(epoch, part)
        links = [link(self.ids.run, self._flags, "run")]
        if previous.ids != self.ids.run:
            links.append(link(previous.ids, self._flags, "previous"))
        frame = self.frame(catalog.SPAN_SEGMENT.name, ids, at_ns) | {"links": links}
        attributes: dict[str, object] = {"epoch": epoch, "part": part} if epoch else {"part": part}
        self._roots.append(Root(ids, at_ns, step, frame, attributes))
        self.announce()

    def frame(self, name: str, ids: SpanId, begun_ns: int) -> dict[str, object]:
        """Return the fields of a span that are known when it begins."""
        fields: dict[str, object] = {"name": name, "trace_id": ids.trace, "span_id": ids.span, "flags": self._flags}
        return fields | {"kind": "internal", "t0": self._wall(begun_ns), "scope": ["torchobs", None, None, {}]}

    def _wall(self, ns: int) -> int:
        header = self._writer.header
        return ns - header.monotonic_ns + header.wall_ns


class RunSpan:
    """One per session. Installs our providers when the application imports OpenTelemetry."""

    def __init__(self, settings: Settings, writer: FlightWriter, active: Callable[[], FlightWriter | None]) -> None:
        self._writer, self._active = writer, active
        self._handles: list[MetaPathFinder | None] = []
        self._installed = False
        parent = (settings.traceparent or "").split("-")  # checked by the settings: version-trace-span-flags
        self._flags = int(parent[3], 16) if settings.traceparent else 1
        remote: dict[str, object] = {"parent": parent[2], "remote": True} if settings.traceparent else {}
        if remote and settings.tracestate:
            remote["state"] = settings.tracestate
        self._roots = RootSpans(writer, self._flags, remote)
        self._roots.announce()
        self._context: ProbeContext | None = None
        self._steps: StepSpans | None = None
        self.anomalous: deque[int] = deque(maxlen=100)
        """Anomalous steps found by the sampler, for their spans"""
        if settings.set_global_providers:
            # only an application that imports the API pays for it
            self._handles = [after_import(name, self._install) for name in ("opentelemetry.trace", "opentelemetry.metrics")]

    def watch(self, context: ProbeContext) -> None:
        """Follow epochs and steps, and record steps as spans too, unless the launcher's trace is not sampled."""
        self._context = context
        if self._flags & 1:
            self._steps = StepSpans(context, self._append, self._roots, self.anomalous)

    def sample_steps(self) -> None:
        """Begin the segments that are due, and write the spans of steps that were selected."""
        self._advance()
        if self._steps is not None:
            self._steps.sample()

    def end(self, *, failed: bool) -> None:
        """Write pending spans and the end of the current root span."""
        self._advance()
        if self._steps is not None:
            self._steps.end()
        step = self._context.recorder.ended if self._context is not None else 0
        now_ns = self._writer.header.monotonic_ns + self._writer.elapsed_ns()
        self._roots.end(now_ns, step, "error" if failed else "ok")

    def _advance(self) -> None:
        context = self._context
        if context is None:
            return
        epochs = [context.training.epochs.popleft() for _ in range(len(context.training.epochs))]
        # the first step of the last call: an epoch may be known a little later than its first step
        first_ns = self._steps.first_ns if self._steps is not None else 0
        self._roots.advance(epochs, monotonic_ns(), context.recorder.ended, first_ns)

    def remove(self) -> None:
        """Uninstall our providers. Idempotent."""
        for handle in self._handles:
            cancel(handle)
        if self._installed:
            from torchobs import otel

            otel.uninstall()
            self._installed = False

    def observe(self, timeout_s: float = 0.0) -> None:
        """Collect the application's observable instruments, in a thread of their own; wait at most that long for it."""
        if self._installed:
            from torchobs import otel

            otel.observe(timeout_s)

    def write(
        self, name: str, started_ns: int, ended_ns: int, attributes: Mapping[str, object], *, failed: bool
    ) -> None:  # fmt: skip
        """Write a child of the root span in which it began; times on CLOCK_MONOTONIC.

        An epoch longer than a segment stays in the file: what is sent of it are its segments.
        """
        root, flags = self._roots.find_root(started_ns), self._flags
        if name == catalog.SPAN_EPOCH.name and ended_ns - started_ns > LONGEST_NS:
            flags &= ~1
        ids = root.ids._replace(span=os.urandom(8).hex())
        self._append(name, ids, started_ns, ended_ns, attributes, {"parent": root.ids.span, "flags": flags}, failed=failed)

    def _append(
        self, name: str, ids: SpanId, started_ns: int, ended_ns: int, attributes: Mapping[str, object],
        more: Mapping[str, object], *, failed: bool = False,
    ) -> None:  # fmt: skip
        frame = {**self._roots.frame(name, ids, started_ns), **more}
        self._roots.write(frame, ended_ns, "error" if failed else "unset", attributes)

    def _install(self) -> None:
        if self._installed:
            return
        self._installed = True
        from torchobs import otel

        otel.install(self._active, self._parent)

    def _parent(self) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        step = self._steps.parent_span() if self._steps is not None else None
        ids = step or self._roots.current.ids
        return SpanContext(int(ids.trace, 16), int(ids.span, 16), is_remote=False, trace_flags=TraceFlags(self._flags))


def trace_attributes(settings: Settings) -> dict[str, str | int]:
    """Return the flight file's resource attributes about the launcher's trace."""
    return {TRACE_ID: settings.traceparent.split("-")[1]} if settings.traceparent else {}


_INTERVAL_S, _SHORTEST_S = 10.0, 1.0
"""Time between two sampled steps: as a rule, and at least where the user asks for every N-th"""
_SAMPLED_EVERY_NS, _SAMPLED_BURST = 1_000_000_000, 20
"""Last resort for the ring, if steps suddenly become much shorter"""
_INTERVAL_NS, _BURST = 10_000_000_000, 6
"""Rate limit of slow steps, of anomalous ones, and of those with events"""
_USER_INTERVAL_NS, _USER_BURST = 100_000_000, 20
"""Rate limit of steps with application spans; beyond it these spans are children of the run's span"""
_WAITING, _STEPS_KEPT, _COMPARED = 1024, 128, 64
SAMPLED, SLOW, ANOMALOUS, EVENT, USER = "sampled", "slow", "anomalous", "event", "user"


class StepSpans:
    """One per session. ``write`` is ``RunSpan``'s; ``anomalous`` gets the numbers of anomalous steps."""

    def __init__(self, context: ProbeContext, write: Callable[..., None], roots: RootSpans, anomalous: deque[int]) -> None:
        self._context, self._write, self._roots, self._ids, self._anomalous = context, write, roots, roots.ids, anomalous
        requested = context.settings.trace_steps
        self._every, self._target_s = (1, _INTERVAL_S) if requested == "auto" else (requested, _SHORTEST_S)
        self._factor = 1
        """Power of two: one step in so many is sampled"""
        self._waiting: deque[StepRecord] = deque(maxlen=_WAITING)
        self._kept: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)
        self._late: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)
        self._durations: deque[float] = deque(maxlen=_COMPARED)
        self._limiters = {reason: RateLimiter(_INTERVAL_NS, _BURST) for reason in (SLOW, ANOMALOUS, EVENT)}
        self._limiters[SAMPLED] = RateLimiter(_SAMPLED_EVERY_NS, _SAMPLED_BURST)
        self._user_limiter = RateLimiter(_USER_INTERVAL_NS, _USER_BURST)
        self._written: deque[int] = deque(maxlen=_STEPS_KEPT)
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
        parent_step, ids = self._parent
        if step != parent_step:
            if not self._user_limiter.take(monotonic_ns()):
                return None
            ids = self._ids.step(step)
            self._parent = step, ids
            self._wanted.add(step)
        return ids

    def sample(self) -> None:
        """Write the spans selected from the steps that have ended."""
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._take_late([record for record in taken if record.kind == RecordKind.LATE and record.flags & StepFlag.GRAD_NORM])
        fresh = [record for record in taken if record.kind == RecordKind.STEP]
        self._kept.extend(fresh)
        self._consider([record for record in fresh if record.step in self._wanted], USER)
        self._consider(self._take_kept(self._anomalous), ANOMALOUS)
        self._consider(self._take_kept(self._context.writer.event_steps), EVENT)
        if fresh:
            self.first_ns = self.first_ns or fresh[0].end_ns
            self._consider_fresh(fresh)

    def _take_kept(self, numbers: deque[int]) -> list[StepRecord]:
        """Return the steps with these numbers, which may have ended a while ago; numbers of later steps stay."""
        taken = {numbers.popleft() for _ in range(len(numbers))}
        if not taken:
            return []
        last = self._kept[-1].step if self._kept else 0
        numbers.extend(number for number in taken if number > last)
        return [record for record in self._kept if record.step in taken]

    def _consider_fresh(self, fresh: list[StepRecord]) -> None:
        """Write slow steps and a sample; up to a thousand a second come, where a call for each would double the cost."""
        if any(record.flags & StepFlag.NEW_MODEL for record in fresh):
            self._durations.clear()
        slow_s, durations, every = slow_from(self._durations), self._durations, self._every
        timed = [record for record in fresh if not record.flags & StepFlag.UNTIMED]
        durations.extend([record.duration_s for record in timed])
        if durations:
            self._factor = alike_interval(every * median(durations), self._target_s)
        self._consider([record for record in fresh if record.duration_s >= slow_s], SLOW)
        numbers = taken([record.step // every for record in fresh if not record.step % every], self._factor)
        steps = {number * every for number in numbers}
        self._consider([record for record in timed if record.step in steps], SAMPLED)

    def end(self) -> None:
        """Write pending spans, and an unfinished step's span if application spans refer to it."""
        self.sample()
        last_ns = self._kept[-1].end_ns if self._kept else monotonic_ns()
        for step in sorted(self._wanted):
            self._write_step(step, last_ns, monotonic_ns(), {"reason": USER, "ended": False})
        self._wanted.clear()

    def _take_late(self, records: list[StepRecord]) -> None:
        """Keep norms that a device delivered late; append them to spans that are already written."""
        self._late.extend(records)
        for record in records:
            if record.step in self._written and isfinite(record.grad_norm):
                self._context.writer.events.append({"k": "late", "step": record.step, "grad_norm": record.grad_norm})

    def _consider(self, records: Iterable[StepRecord], reason: str) -> None:
        """Write the spans of steps that have none yet, as far as the reason's limit allows."""
        for record in records:
            if reason == USER:
                self._wanted.discard(record.step)
            elif record.step in self._written or not self._limiters[reason].take(record.end_ns):
                continue
            self._write_whole(record, reason)

    def _write_whole(self, record: StepRecord, reason: str) -> None:
        exact = record.stamps
        started_ns = exact[0] if exact else record.end_ns - round(sum(record.phase_s) * 1e9)
        norms = [late.grad_norm for late in self._late if late.step == record.step]
        attributes: dict[str, object] = {"reason": reason, **_values(record, norms)}
        if exact is None:
            attributes |= {f"{name}_s": value for name, value in zip(PHASE_NAMES, record.phase_s, strict=True) if value}
        ids = self._write_step(record.step, started_ns, record.end_ns, attributes)
        for phase, from_ns, to_ns in phases_of(exact, record.end_ns) if exact else ():
            phase_ids = ids._replace(span=derived(ids.span, phase))
            self._write(catalog.SPAN_STEP_PHASE.name, phase_ids, from_ns, to_ns, {"phase": phase}, {"parent": ids.span})

    def _write_step(self, step: int, started_ns: int, ended_ns: int, attributes: dict[str, object]) -> SpanId:
        ids, links = self._ids.step(step), self._roots.links(self._roots.find_root(started_ns))
        self._written.append(step)
        self._write(catalog.SPAN_STEP.name, ids, started_ns, ended_ns, {"step": step, **attributes}, {"links": links})
        return ids


def phases_of(stamps: tuple[int, ...], end_ns: int) -> list[tuple[str, int, int]]:
    """Return the phases of a plain step, with begin and end; gaps between them are ``other``."""
    begun, fetch, fetched, backward, backward_ends, optimizer = stamps
    before = [("data", fetch, fetched), ("forward", fetched, backward)] if fetched > begun else [("between", begun, backward)]
    return [*before, ("backward", backward, backward_ends), ("optimizer", optimizer, end_ns)]


def _values(record: StepRecord, late_norms: list[float]) -> dict[str, object]:
    values: dict[str, object] = {}
    if not record.flags & StepFlag.UNTIMED:
        values["duration_s"] = record.duration_s
    if record.flags & StepFlag.LOSS and isfinite(record.loss):
        values["loss"] = record.loss
    norms = [record.grad_norm] if record.flags & StepFlag.GRAD_NORM else late_norms
    if norms and isfinite(norms[-1]):
        values["grad_norm"] = norms[-1]
    if record.flags & StepFlag.SKIPPED:
        values["skipped"] = True
    return values
