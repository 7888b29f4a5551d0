"""The root span of the run on this rank, and the parent of the application's own spans.

Its start is written at once, so that a killed run has a span too; its end with the rank's. The launcher's ``TRACEPARENT`` is
its parent.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.format import span_ids
from torchobs.runtime.step_spans import StepSpans
from torchobs.support.import_hooks import after_import, cancel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.abc import MetaPathFinder

    from opentelemetry.trace import SpanContext

    from torchobs.config.settings import Settings
    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.probes.core.context import ProbeContext


class RunSpan:
    """One per session."""

    def __init__(self, settings: Settings, writer: FlightWriter, active: Callable[[], FlightWriter | None]) -> None:
        self._settings, self._writer, self._active = settings, writer, active
        self._handles: list[MetaPathFinder | None] = []
        self._installed = False
        parent = (settings.traceparent or "").split("-")  # checked by the settings: version-trace-span-flags
        self._remote = parent[2] if len(parent) > 2 else None  # noqa: PLR2004  # that format
        self._trace_id = span_ids.trace_id(writer.header)
        self._flags = int(parent[3], 16) if self._remote else 1
        self._span_id = span_ids.run_span_id(writer.header)
        self._steps: StepSpans | None = None
        self.anomalous: deque[int] = deque(maxlen=100)
        """Anomalous steps that the sampler has found, for their spans"""

    def begin(self) -> None:
        """Write the span's start, and install our providers when the application imports OpenTelemetry."""
        self._writer.events.append({"k": "span_start", **self._identity()})
        if self._settings.set_global_providers:
            # only an application that imports the API pays for it
            self._handles = [after_import(name, self._install) for name in ("opentelemetry.trace", "opentelemetry.metrics")]

    def watch(self, context: ProbeContext) -> None:
        """Record steps as spans too, unless the launcher's trace is not sampled."""
        if self._flags & 1:
            self._steps = StepSpans(context, self.write, self._span_id, self.anomalous)

    def sample_steps(self) -> None:
        """Write the spans of steps that were selected."""
        if self._steps is not None:
            self._steps.sample()

    def end(self, *, failed: bool) -> None:
        """Write the span's end."""
        if self._steps is not None:
            self._steps.end()
        header = self._writer.header
        end_ns = header.wall_ns + self._writer.elapsed_ns()
        status = "error" if failed else "ok"
        self._writer.events.append({"k": "span", **self._identity(), "t1": end_ns, "status": status, "attrs": {}})

    def remove(self) -> None:
        """Uninstall our providers. Idempotent."""
        for handle in self._handles:
            if handle is not None:
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
        self, name: str, started_ns: int, ended_ns: int, attributes: Mapping[str, object], *,
        failed: bool, span_id: str | None = None, parent: str | None = None,
    ) -> None:  # fmt: skip
        """Write a child span of this one, or of ``parent``; times on CLOCK_MONOTONIC."""
        header = self._writer.header
        offset_ns = header.wall_ns - header.monotonic_ns
        own: dict[str, object] = {
            "name": name,
            "span_id": span_id or os.urandom(8).hex(),
            "parent": parent or self._span_id,
            "t0": started_ns + offset_ns,
        }
        ended = {"t1": ended_ns + offset_ns, "status": "error" if failed else "unset", "attrs": attributes}
        inherited = {key: value for key, value in self._identity().items() if key not in {"remote", "state"}}
        self._writer.events.append({"k": "span", **inherited, **own, **ended})

    def _identity(self) -> dict[str, object]:
        fields: dict[str, object] = {"name": catalog.SPAN_RUN.name, "trace_id": self._trace_id, "span_id": self._span_id}
        fields["flags"] = self._flags
        if self._remote:
            fields |= {"parent": self._remote, "remote": True}
            if self._settings.tracestate:
                fields["state"] = self._settings.tracestate
        return fields | {"kind": "internal", "t0": self._writer.header.wall_ns, "scope": ["torchobs", None, None, {}]}

    def _install(self) -> None:
        if self._installed:
            return
        self._installed = True
        from torchobs import otel

        otel.install(self._active, self._context)

    def _context(self) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        step = self._steps.parent_span() if self._steps is not None else None
        own = int(step or self._span_id, 16)
        return SpanContext(int(self._trace_id, 16), own, is_remote=False, trace_flags=TraceFlags(self._flags))


def trace_attributes(settings: Settings) -> dict[str, str | int]:
    """Return the flight file's resource attributes about the launcher's trace."""
    return {span_ids.TRACE_ID: settings.traceparent.split("-")[1]} if settings.traceparent else {}
