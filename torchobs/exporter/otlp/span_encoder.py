"""Convert the frames of the ranks' event rings into OTLP spans and requests.

A frame is read and sent once. A restarted exporter sends the frames that are still in the ring again, with
the same identifiers, which come from the file.

Spans that were announced and are open when their rank has ended without a word are ended at its last heartbeat, as errors, the
rank's root span (:mod:`torchobs.exporter.otlp.root_spans`) among them.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from torchobs import catalog
from torchobs.exporter.otlp import attributes as otlp_attributes
from torchobs.exporter.otlp.attributes import mapping, namespaced, text, time_ns, whole
from torchobs.exporter.otlp.root_spans import OpenRoot, is_ours, is_root
from torchobs.flight.format.event_ring import fields_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from torchobs.flight.format.layout import Header

Frame = dict[str, Any]
_MOST_OPEN = 1024

_KINDS = {kind.name.lower(): kind for kind in SpanKind}
_STATUSES = {"ok": StatusCode.OK, "error": StatusCode.ERROR}
_SAMPLED = 0x01
_EVENTS = frozenset(event.name for event in catalog.EVENTS)
_SPANS = frozenset(span.name for span in catalog.SPANS)
_HEX = re.compile(r"[0-9a-f]*")
_UINT32 = 1 << 32


class Trace:
    """State of one incarnation's spans: those that are open, and torchobs' events."""

    def __init__(self, header: Header, *, with_events: bool = True) -> None:
        self.resource = otlp_attributes.resource_of(header)
        self._header, self._with_events = header, with_events
        self.root = OpenRoot(header)
        self._open: dict[str, Frame] = {}
        self._finished = False

    def take(self, payloads: Iterable[bytes]) -> Iterator[Frame]:
        """Yield the spans that have ended, of a ring's new payloads."""
        for frame in filter(None, map(fields_of, payloads)):
            kind, span_id = frame.get("k"), frame.get("span_id")
            if kind == "event":
                self._add_event(frame)
            elif not isinstance(span_id, str):
                continue
            elif kind == "span_start":
                self.root.begin(frame) if is_root(frame) else self._add_open(span_id, frame)
            elif kind == "span":
                self._open.pop(span_id, None)
                yield self.root.end(frame) if is_root(frame) else frame

    def finish(self, reason: str, last_ns: int) -> Iterator[Frame]:
        """Yield the open spans, ended, the root last; once. ``last_ns``: the rank's last heartbeat, Unix ns."""
        if self._finished:
            return
        self._finished = True
        ended: Frame = {"k": "span", "t1": last_ns, "status": "error", "description": f"the rank ended before it: {reason}"}
        if reason == "finished":
            ended = {"k": "span", "t1": last_ns, "status": "unset"}
        for frame in self._open.values():
            yield frame | ended | {"t1": max(last_ns, time_ns(frame.get("t0")))}
        self._open.clear()
        root = self.root.finish(ended, reason)
        if root is not None:
            yield root

    def _add_open(self, span_id: str, frame: Frame) -> None:
        self._open[span_id] = frame
        if len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _add_event(self, frame: Frame) -> None:
        name, attributes = text(frame.get("name")), mapping(frame.get("attrs"))
        if not self._with_events or name == catalog.EVENT_SCALARS.name:  # curves are pushed as a metric
            return
        if name in _EVENTS:
            attributes = namespaced(name, attributes)
        if isinstance(frame.get("step"), int):
            attributes = {**attributes, otlp_attributes.STEP: frame["step"]}
        at_ns = otlp_attributes.event_time_ns(self._header, frame)
        self.root.add_event(Event(name, otlp_attributes.cleaned(attributes.items()), at_ns))


def spans_of(trace: Trace, frames: Iterable[Frame]) -> Iterator[tuple[ReadableSpan, Frame]]:
    """Yield the spans of the sampled frames, each with its frame; invalid frames are skipped."""
    for frame in frames:
        if whole(frame.get("flags")) & _SAMPLED:
            with contextlib.suppress(ValueError):
                yield span_of(frame, trace), frame


def request_of(spans: Sequence[tuple[ReadableSpan, Frame]]) -> ExportTraceServiceRequest:
    """Return spans, each with its frame, as one request."""
    request = encode_spans([span for span, _ in spans])
    frames = {(frame["trace_id"], frame["span_id"]): frame for _, frame in spans}
    for of_resource in request.resource_spans:
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                _complete(span, frames[span.trace_id.hex(), span.span_id.hex()])
    return request


def span_of(frame: Frame, trace: Trace) -> ReadableSpan:
    """Return the span of a frame. Raises ``ValueError`` if it has no valid trace and span identifier."""
    dropped = [*_list(frame.get("dropped")), 0, 0, 0]
    events, more = trace.root.events_of(frame)
    cut, parent = _count(frame.get("cut")), frame.get("parent")
    name, attributes = text(frame.get("name")), mapping(frame.get("attrs"))
    if is_ours(frame) and name in _SPANS:
        attributes = namespaced(name, attributes)
    if cut:
        attributes = {**attributes, "torchobs.cut": cut}
    return ReadableSpan(
        name=name,
        context=_context(frame.get("trace_id"), frame.get("span_id")),
        parent=_context(frame.get("trace_id"), parent, is_remote=frame.get("remote") is True) if parent else None,
        resource=trace.resource,
        instrumentation_scope=_scope_of(frame, trace.resource),
        kind=_KINDS.get(text(frame.get("kind")), SpanKind.INTERNAL),
        start_time=time_ns(frame.get("t0")),
        end_time=time_ns(frame.get("t1")),
        attributes=_bounded(attributes, dropped[0]),
        events=_bounded_list([*events, *map(_event, _list(frame.get("events")))], _count(dropped[1]) + more),
        links=_bounded_list([link for link, _ in _links(frame)], dropped[2]),
        status=_status(frame),
    )


def _complete(message: Any, frame: Frame) -> None:
    """Set the W3C trace flags and trace state in an encoded span, which OpenTelemetry's encoder leaves out.

    The state is passed on unchanged; the API's ``TraceState`` would log a warning for each malformed one.
    """
    message.flags |= whole(frame.get("flags")) & 0xFF
    message.trace_state = text(frame.get("state"))
    for link, (_, (flags, state)) in zip(message.links, _links(frame), strict=False):
        link.flags, link.trace_state = whole(flags) & 0xFF, text(state)


def _scope_of(frame: Frame, resource: Resource) -> InstrumentationScope:
    fields = [*_list(frame.get("scope")), None, None, None, None]
    name, version, schema_url = (text(field) for field in fields[:3])
    if name == otlp_attributes.SCOPE and not version:
        return otlp_attributes.own_scope(resource)
    return otlp_attributes.scope(name, version, schema_url, mapping(fields[3]).items())


def _status(frame: Frame) -> Status:
    code = _STATUSES.get(text(frame.get("status")), StatusCode.UNSET)
    return Status(code, text(frame.get("description")) if code is StatusCode.ERROR else None)


def _event(item: object) -> Event:
    at_ns, name, attributes, dropped = [*_list(item), None, None, None, None][:4]
    return Event(text(name), _bounded(mapping(attributes), dropped), time_ns(at_ns))


def _links(frame: Frame) -> Iterator[tuple[Link, tuple[object, object]]]:
    """Yield a frame's links that have valid identifiers, with trace flags and state."""
    for item in _list(frame.get("links")):
        trace_id, span_id, flags, state, attributes, dropped = [*_list(item), *[None] * 6][:6]
        with contextlib.suppress(ValueError):
            yield Link(_context(trace_id, span_id), _bounded(mapping(attributes), dropped)), (flags, state)


def _bounded(attributes: Mapping[str, object], dropped: object) -> BoundedAttributes:
    found = BoundedAttributes(attributes=otlp_attributes.cleaned(attributes.items()))
    found.dropped = _count(dropped)
    return found


def _bounded_list(items: list[Any], dropped: object) -> BoundedList[Any]:
    found = BoundedList.from_seq(len(items), items)
    found.dropped = _count(dropped)
    return found


def _context(trace_id: object, span_id: object, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(_identifier(trace_id, 16), _identifier(span_id, 8), is_remote)


def _identifier(value: object, length: int) -> int:
    if not isinstance(value, str) or len(value) != 2 * length or not _HEX.fullmatch(value):
        raise ValueError("no identifier")
    return int(value, 16)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _count(value: object) -> int:
    return min(max(whole(value), 0), _UINT32 - 1)
