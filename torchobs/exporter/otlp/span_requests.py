"""Build the requests of one push of spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from torchobs.exporter.otlp import span_encoder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

    from torchobs.exporter.otlp.span_encoder import Frame, Trace

MOST_SPANS = 512
"""Limit of one request: the SDK's default."""
MOST_BYTES = 2 * 1024**2


class SpanRequests:
    """Collects spans and encodes them as requests."""

    def __init__(self) -> None:
        self._found: list[tuple[ReadableSpan, Frame]] = []

    def add(self, resource: Resource, trace: Trace, frames: Iterable[Frame]) -> None:
        """Add the spans of the sampled frames; invalid frames are skipped."""
        for frame in filter(span_encoder.is_sampled, frames):
            try:
                self._found.append((span_encoder.span_of(frame, resource, trace), frame))
            except ValueError:
                continue

    def finish(self) -> list[tuple[bytes, int]]:
        """Return (serialised request, number of spans) pairs."""
        parts = (self._found[begin : begin + MOST_SPANS] for begin in range(0, len(self._found), MOST_SPANS))
        return [request for part in parts for request in _packed(part)]


def _packed(found: list[tuple[ReadableSpan, Frame]]) -> list[tuple[bytes, int]]:
    """Return the spans as one request; if it is too large for a receiver, as several, splitting the spans in halves."""
    request = encode_spans([span for span, _ in found])
    if request.ByteSize() > MOST_BYTES and len(found) > 1:
        half = len(found) // 2
        return [*_packed(found[:half]), *_packed(found[half:])]
    frames = {(frame["trace_id"], frame["span_id"]): frame for _, frame in found}
    for of_resource in request.resource_spans:
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                span_encoder.complete(span, frames[span.trace_id.hex(), span.span_id.hex()])
    return [(request.SerializeToString(), len(found))]
