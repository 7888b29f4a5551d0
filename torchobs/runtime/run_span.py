"""The spans of the run on this rank, and the parent of the application's own spans.

The launcher's ``TRACEPARENT`` is the parent of the run's span; what comes later has traces of its own (:mod:`root_spans`).
"""

from __future__ import annotations

import os
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.format import event_ring
from torchobs.runtime.root_spans import LONGEST_NS, RootSpans
from torchobs.runtime.step_spans import StepSpans
from torchobs.support.import_hooks import after_import, cancel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.abc import MetaPathFinder

    from opentelemetry.trace import SpanContext

    from torchobs.config.settings import Settings
    from torchobs.flight.format.event_ring import SpanId
    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.probes.core.context import ProbeContext


class RunSpan:
    """One per session."""

    def __init__(self, settings: Settings, writer: FlightWriter, active: Callable[[], FlightWriter | None]) -> None:
        self._settings, self._writer, self._active = settings, writer, active
        self._handles: list[MetaPathFinder | None] = []
        self._installed = False
        parent = (settings.traceparent or "").split("-")  # checked by the settings: version-trace-span-flags
        self._flags = int(parent[3], 16) if settings.traceparent else 1
        self._roots = RootSpans(writer, self._flags, _remote(parent[2], settings.tracestate) if settings.traceparent else {})
        self._context: ProbeContext | None = None
        self._steps: StepSpans | None = None
        self.anomalous: deque[int] = deque(maxlen=100)
        """Anomalous steps that the sampler has found, for their spans"""

    def begin(self) -> None:
        """Write the span's start, and install our providers when the application imports OpenTelemetry."""
        self._roots.announce()
        if self._settings.set_global_providers:
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
        # of the first step the last call has told: an epoch may be known a little later than its first step
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

    def sample(self) -> None:
        """Collect the application's observable instruments, in a thread of their own."""
        self.observe(0.0)

    def observe(self, timeout_s: float) -> None:
        """Collect them, waiting at most that long for their callbacks."""
        if self._installed:
            from torchobs import otel

            otel.observe(timeout_s)

    def write(
        self, name: str, started_ns: int, ended_ns: int, attributes: Mapping[str, object], *, failed: bool
    ) -> None:  # fmt: skip
        """Write a child of the root span in which it began; times on CLOCK_MONOTONIC.

        An epoch longer than a segment stays in the file: what is sent of it are its segments.
        """
        root, flags = self._roots.at(started_ns), self._flags
        if name == catalog.SPAN_EPOCH.name and ended_ns - started_ns > LONGEST_NS:
            flags &= ~1
        ids = root.ids._replace(span=os.urandom(8).hex())
        self._append(name, ids, started_ns, ended_ns, attributes, {"parent": root.ids.span, "flags": flags}, failed=failed)

    def _append(
        self, name: str, ids: SpanId, started_ns: int, ended_ns: int, attributes: Mapping[str, object],
        more: Mapping[str, object], *, failed: bool = False,
    ) -> None:  # fmt: skip
        header = self._writer.header
        offset_ns = header.wall_ns - header.monotonic_ns
        own: dict[str, object] = {"k": "span", "name": name, "trace_id": ids.trace, "span_id": ids.span, "flags": self._flags}
        times = {"kind": "internal", "t0": started_ns + offset_ns, "t1": ended_ns + offset_ns}
        status: dict[str, object] = {"status": "error" if failed else "unset", "attrs": attributes}
        scope: dict[str, object] = {"scope": ["torchobs", None, None, {}]}
        self._writer.events.append({**own, **times, **status, **scope, **more})

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


def _remote(parent: str, state: str | None) -> dict[str, object]:
    """Return the fields of the run's frame that a launcher's span determines."""
    found: dict[str, object] = {"parent": parent, "remote": True}
    return found | {"state": state} if state else found


def trace_attributes(settings: Settings) -> dict[str, str | int]:
    """Return the flight file's resource attributes about the launcher's trace."""
    return {event_ring.TRACE_ID: settings.traceparent.split("-")[1]} if settings.traceparent else {}
