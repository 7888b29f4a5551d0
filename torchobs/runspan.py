"""The span of the whole run on this rank, and how the application's own spans come beneath it.

Its beginning is written at once, so that a run that was killed has a span, too; its end with the rank's. The launcher's
``TRACEPARENT`` is its parent.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.afterimport import after_import, cancel

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.abc import MetaPathFinder

    from opentelemetry.trace import SpanContext

    from torchobs.flight.writer import FlightWriter
    from torchobs.settings import Settings


class RunSpan:
    """One per session."""

    def __init__(self, chosen: Settings, writer: FlightWriter, active: Callable[[], FlightWriter | None]) -> None:
        self._chosen, self._writer, self._active = chosen, writer, active
        self._handles: list[MetaPathFinder | None] = []
        self._installed = False
        parent = (chosen.traceparent or "").split("-")  # checked by the settings: version-trace-span-flags
        self._remote = parent[2] if len(parent) > 2 else None  # noqa: PLR2004  # that format
        self._trace_id = parent[1] if self._remote else os.urandom(16).hex()
        self._flags = int(parent[3], 16) if self._remote else 1
        self._span_id = os.urandom(8).hex()

    def begin(self) -> None:
        """Write its beginning, and stand by for an application that uses OpenTelemetry."""
        self._writer.events.append({"k": "span_start", **self._identity()})
        if self._chosen.set_global_providers:
            # only an application that imports the API pays for it
            self._handles = [after_import(name, self._install) for name in ("opentelemetry.trace", "opentelemetry.metrics")]

    def end(self, *, failed: bool) -> None:
        """Write its end."""
        header = self._writer.header
        end_ns = header.wall_ns + self._writer.elapsed_ns()
        status = "error" if failed else "ok"
        self._writer.events.append({"k": "span", **self._identity(), "t1": end_ns, "status": status, "attrs": {}})

    def remove(self) -> None:
        """Take our providers out of use. Idempotent."""
        for handle in self._handles:
            if handle is not None:
                cancel(handle)
        if self._installed:
            from torchobs.flight import otel

            otel.uninstall()
            self._installed = False

    def sample(self) -> None:
        """Have the application's observable instruments asked, in a thread of their own."""
        self.observe(0.0)

    def observe(self, timeout_s: float) -> None:
        """The same, waiting so long for their answers."""
        if self._installed:
            from torchobs.flight import otel

            otel.observe(timeout_s)

    def write(self, name: str, begun_ns: int, ended_ns: int, attributes: dict[str, object], *, failed: bool) -> None:
        """Write a span beneath this one; times on CLOCK_MONOTONIC."""
        header = self._writer.header
        offset_ns = header.wall_ns - header.monotonic_ns
        own: dict[str, object] = {
            "name": name,
            "span_id": os.urandom(8).hex(),
            "parent": self._span_id,
            "t0": begun_ns + offset_ns,
        }
        ended = {"t1": ended_ns + offset_ns, "status": "error" if failed else "unset", "attrs": attributes}
        inherited = {key: value for key, value in self._identity().items() if key not in {"remote", "state"}}
        self._writer.events.append({"k": "span", **inherited, **own, **ended})

    def _identity(self) -> dict[str, object]:
        fields: dict[str, object] = {"name": catalog.SPAN_RUN.name, "trace_id": self._trace_id, "span_id": self._span_id}
        fields["flags"] = self._flags
        if self._remote:
            fields |= {"parent": self._remote, "remote": True}
            if self._chosen.tracestate:
                fields["state"] = self._chosen.tracestate
        return fields | {"kind": "internal", "t0": self._writer.header.wall_ns, "scope": ["torchobs", None, None, {}]}

    def _install(self) -> None:
        if self._installed:
            return
        self._installed = True
        from torchobs.flight import otel

        otel.install(self._active, self._context)

    def _context(self) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(
            int(self._trace_id, 16), int(self._span_id, 16), is_remote=False, trace_flags=TraceFlags(self._flags)
        )
