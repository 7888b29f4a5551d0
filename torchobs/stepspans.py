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
from torchobs.detect.slow import is_slow, usual
from torchobs.flight import spans
from torchobs.flight.record import PHASE_NAMES, Flag, Kind
from torchobs.probes.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.record import StepRecord
    from torchobs.probes.host import Host

_EVERY_NS = 10_000_000_000
_BURST = 6
_USER_EVERY_NS, _USER_BURST = 100_000_000, 20
"""An application with spans in every step fills the ring itself; beyond this its spans are the run's children"""
_WAITING, _KEPT, _COMPARED = 1024, 128, 64
SAMPLED, SLOW, ANOMALOUS, USER = "sampled", "slow", "anomalous", "user"


class StepSpans:
    """One per session. ``write`` is ``RunSpan.write``; ``run`` the run's span."""

    def __init__(self, host: Host, write: Callable[..., None], run: str) -> None:
        self._host, self._write, self._run = host, write, run
        self._interval = host.settings.trace_steps
        self._waiting: deque[tuple[StepRecord, bytes]] = deque(maxlen=_WAITING)
        self._kept: deque[tuple[StepRecord, bytes]] = deque(maxlen=_KEPT)
        self._durations: deque[float] = deque(maxlen=_COMPARED)
        self._budgets = {SAMPLED: Budget(_EVERY_NS, 1), SLOW: Budget(_EVERY_NS, _BURST), ANOMALOUS: Budget(_EVERY_NS, _BURST)}
        if self._interval != "auto":
            self._budgets[SAMPLED] = Budget(_EVERY_NS // 10, _BURST)
        self._users = Budget(_USER_EVERY_NS, _USER_BURST)
        self._written: deque[int] = deque(maxlen=_KEPT)
        self._wanted: set[int] = set()
        self._adopting = 0
        host.writer.taken = self._waiting

    def adopt(self) -> str | None:
        """Return the span of the step under way, for a span that the application begins; ``None`` where there is none."""
        host, step = self._host, self._host.cycle.ended + 1
        if get_ident() != host.thread or not (host.cycle.trace or host.cycle.segments.started):
            return None
        if step != self._adopting:
            if not self._users.take(monotonic_ns()):
                return None
            self._adopting = step
            self._wanted.add(step)
        return spans.step_span_id(self._run, step)

    def sample(self) -> None:
        """Write what is due of the steps that have ended."""
        anomalous = {self._host.anomalous.popleft() for _ in range(len(self._host.anomalous))}
        for record, raw in [entry for entry in self._kept if entry[0].step in anomalous]:
            self._offer(record, raw, ANOMALOUS)  # a device delivered its loss afterwards, or the fold was not done yet
        usual_s = usual(self._durations) if self._waiting else 0.0
        for _ in range(len(self._waiting)):
            record, raw = self._waiting.popleft()
            if record.kind != Kind.STEP:
                continue
            self._kept.append((record, raw))
            self._offer(record, raw, self._reason(record, usual_s, anomalous))
            if not record.flags & Flag.UNTIMED:
                self._durations.append(record.duration_s)

    def end(self) -> None:
        """The run ends: write what is left, and for the application's spans after the last step a step that did not end."""
        self.sample()
        last_ns = self._kept[-1][0].end_ns if self._kept else monotonic_ns()
        for step in sorted(self._wanted):
            self._emit(step, last_ns, monotonic_ns(), {"reason": USER, "ended": False})
        self._wanted.clear()

    def _reason(self, record: StepRecord, usual_s: float, anomalous: set[int]) -> str | None:
        if record.step in self._wanted:
            return USER
        if record.step in anomalous:
            return ANOMALOUS
        if is_slow(record.duration_s, usual_s):
            return SLOW
        due = self._interval == "auto" or not record.step % self._interval
        return SAMPLED if due and not record.flags & Flag.UNTIMED else None

    def _offer(self, record: StepRecord, raw: bytes, reason: str | None) -> None:
        if reason == USER:
            self._wanted.discard(record.step)
        elif reason is None or record.step in self._written or not self._budgets[reason].take(record.end_ns):
            return
        exact = spans.parts(raw)
        begun_ns = exact[0] if exact else record.end_ns - round(sum(record.phase_s) * 1e9)
        attributes: dict[str, object] = {"reason": reason, **_values(record)}
        if exact is None:
            attributes |= {f"{name}_s": value for name, value in zip(PHASE_NAMES, record.phase_s, strict=True) if value}
        own = self._emit(record.step, begun_ns, record.end_ns, attributes)
        for phase, from_ns, to_ns in exact[1] if exact else ():
            identity = {"span_id": spans.phase_span_id(own, phase), "parent": own}
            self._write(catalog.SPAN_STEP_PHASE.name, from_ns, to_ns, {"phase": phase}, failed=False, **identity)

    def _emit(self, step: int, begun_ns: int, ended_ns: int, attributes: dict[str, object]) -> str:
        own = spans.step_span_id(self._run, step)
        self._written.append(step)
        self._write(catalog.SPAN_STEP.name, begun_ns, ended_ns, {"step": step, **attributes}, failed=False, span_id=own)
        return own


def _values(record: StepRecord) -> dict[str, object]:
    found: dict[str, object] = {}
    if record.flags & Flag.LOSS and isfinite(record.loss):
        found["loss"] = record.loss
    if record.flags & Flag.GRAD_NORM and isfinite(record.grad_norm):
        found["grad_norm"] = record.grad_norm
    if record.flags & Flag.SKIPPED:
        found["skipped"] = True
    return found
