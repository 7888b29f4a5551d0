"""The requests of one push of spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from torchobs.exporter.otlp import attributes as otlp_attributes
from torchobs.exporter.otlp import span_encoder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.proto.resource.v1.resource_pb2 import Resource
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

    from torchobs.exporter.otlp.span_encoder import Frame, Trace

MOST_SPANS = 512
"""Of one request: the SDK's own default."""
MOST_BYTES = 2 * 1024**2


class SpanRequests:
    """Requests in the making."""

    def __init__(self) -> None:
        self._done: list[tuple[bytes, int]] = []
        self._request, self._spans, self._bytes = ExportTraceServiceRequest(), 0, 0
        self._of: tuple[Resource, ResourceSpans] | None = None
        self._scopes: dict[str, ScopeSpans] = {}

    def add(self, resource: Resource, trace: Trace, frames: Iterable[Frame]) -> None:
        """Add the spans of those frames that are sampled; one that is no span is left out."""
        for frame in frames:
            if not span_encoder.is_sampled(frame):
                continue
            try:
                span = span_encoder.span_of(frame, *trace.events_of(frame))
            except ValueError:
                continue
            self._make_room(span.ByteSize())
            self._scope(resource, frame).spans.append(span)
            self._spans += 1

    def finish(self) -> list[tuple[bytes, int]]:
        """Return (serialised request, its spans) of each. Of use once."""
        self._cut()
        return self._done

    def _make_room(self, size: int) -> None:
        if self._spans >= MOST_SPANS or (self._spans and self._bytes + size > MOST_BYTES):
            self._cut()
        self._bytes += size

    def _scope(self, resource: Resource, frame: Frame) -> ScopeSpans:
        if self._of is None or self._of[0] is not resource:
            self._of, self._scopes = (resource, self._request.resource_spans.add(resource=resource)), {}
            self._bytes += self._of[1].ByteSize()
        key = repr(frame.get("scope"))
        found = self._scopes.get(key)
        if found is None:
            name, version, schema_url, attributes = span_encoder.scope_of(frame)
            version = version or (otlp_attributes.version_of(resource) if name == otlp_attributes.SCOPE else "")
            found = self._scopes[key] = self._of[1].scope_spans.add(schema_url=schema_url)
            found.scope.CopyFrom(otlp_attributes.scope(name, version, attributes.items()))
        return found

    def _cut(self) -> None:
        if self._spans:
            self._done.append((self._request.SerializeToString(), self._spans))
        self._request, self._spans, self._bytes = ExportTraceServiceRequest(), 0, 0
        self._of, self._scopes = None, {}
