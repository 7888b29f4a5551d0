"""Spans as OTLP has them, made of the frames of a rank's event ring.

A frame is sent once, by its position in the ring. An exporter that starts again sends what is still in the ring once more:
spans have their identifiers from the file, so that it is the same span again and not another.

The span of the run is sent when its rank has ended, with torchobs' events as its events. If the rank did not say how it ended,
the exporter does: the span ends with the rank's last heartbeat, as an error. Other spans that were announced and did not end
are closed in the same way.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status

from torchobs import catalog
from torchobs.exporter.otlp import values
from torchobs.flight import spans as identifiers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torchobs.flight.layout import Header

Frame = dict[str, Any]
MOST_EVENTS = 1024
"""of one run; the oldest go first"""
_MOST_OPEN = 1024

_KINDS = {
    "internal": Span.SPAN_KIND_INTERNAL,
    "server": Span.SPAN_KIND_SERVER,
    "client": Span.SPAN_KIND_CLIENT,
    "producer": Span.SPAN_KIND_PRODUCER,
    "consumer": Span.SPAN_KIND_CONSUMER,
}
_STATUSES = {"ok": Status.STATUS_CODE_OK, "error": Status.STATUS_CODE_ERROR}
_SAMPLED = 0x01
_HEX = re.compile(r"[0-9a-f]*")
_FIXED64, _UINT32 = 1 << 64, 1 << 32


class Trace:
    """What is known of one incarnation's spans."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._run_id = identifiers.run_span_id(header)
        self._run: Frame | None = None
        self._events: deque[Span.Event] = deque(maxlen=MOST_EVENTS)
        self._seen_events = 0
        self._open: dict[str, Frame] = {}
        self._next = 0
        self._finished = False

    def take(self, frames: Iterable[tuple[int, Frame]]) -> Iterator[Frame]:
        """Yield the spans that have ended and were not taken before, but for the run's own."""
        for position, frame in frames:
            if position < self._next:
                continue
            self._next = position + 1
            kind, span_id = frame.get("k"), frame.get("span_id")
            if kind == "event":
                if frame.get("name") != catalog.EVENT_SCALARS.name:  # points of curves, which are pushed as a metric
                    self._add_event(frame)
            elif not isinstance(span_id, str):
                continue
            elif span_id == self._run_id:
                self._run = frame
                if self._finished and kind == "span":
                    yield frame  # taken for dead, it was not
            elif kind == "span_start":
                self._announce(span_id, frame)
            elif kind == "span":
                self._open.pop(span_id, None)
                yield frame

    def finish(self, reason: str, last_ns: int) -> Iterator[Frame]:
        """Yield what has no end of its own, and the run's span; once. ``last_ns``: the last sign of life, Unix ns."""
        if self._finished:
            return
        self._finished = True
        ended: Frame = {"t1": last_ns, "status": "error", "description": f"the rank ended before it: {reason}"}
        if reason == "finished":
            ended = {"t1": last_ns, "status": "unset"}
        for frame in self._open.values():
            yield frame | ended | {"t1": max(last_ns, _time(frame.get("t0")))}
        self._open.clear()
        run = self._run or self._imagined()
        yield run if run.get("k") == "span" else run | ended | {"attrs": {"reason": reason}}

    def events_of(self, frame: Frame) -> tuple[list[Span.Event], int]:
        """Return torchobs' events if it is the run's span, and how many more there were."""
        if frame.get("span_id") != self._run_id:
            return [], 0
        return [*self._events], self._seen_events - len(self._events)

    def _announce(self, span_id: str, frame: Frame) -> None:
        self._open[span_id] = frame
        if len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _add_event(self, frame: Frame) -> None:
        header, attributes = self._header, _mapping(frame.get("attrs"))
        if isinstance(frame.get("step"), int):
            attributes = {**attributes, "step": frame["step"]}
        at_ns = _time(_whole(frame.get("t")) - header.monotonic_ns + header.wall_ns)
        self._events.append(
            Span.Event(name=_text(frame.get("name")), time_unix_nano=at_ns, attributes=values.key_values(attributes.items()))
        )
        self._seen_events += 1

    def _imagined(self) -> Frame:
        """Return the run's beginning where the ring has written over it: all but its parent can be worked out."""
        header = self._header
        return {
            "name": catalog.SPAN_RUN.name,
            "trace_id": identifiers.trace_id(header),
            "span_id": self._run_id,
            "flags": _SAMPLED,
            "kind": "internal",
            "t0": header.wall_ns,
            "scope": [values.SCOPE, None, None, {}],
        }


def is_sampled(frame: Frame) -> bool:
    """Tell whether whoever began the trace wants its spans."""
    return bool(_whole(frame.get("flags")) & _SAMPLED)


def scope_of(frame: Frame) -> tuple[str, str, str, Mapping[str, object]]:
    """Return the name, version, schema URL and attributes of a frame's scope."""
    fields = [*_list(frame.get("scope")), None, None, None, None]
    name, version, schema_url = (_text(field) for field in fields[:3])
    return name, version, schema_url, _mapping(fields[3])


def span_of(frame: Frame, events: Iterable[Span.Event] = (), dropped_events: int = 0) -> Span:
    """Return the span of a frame. Raises ``ValueError`` for one without a trace's and a span's identifier."""
    dropped = [*_list(frame.get("dropped")), 0, 0, 0]
    span = Span(
        trace_id=_identifier(frame.get("trace_id"), 16),
        span_id=_identifier(frame.get("span_id"), 8),
        parent_span_id=_identifier(frame["parent"], 8) if frame.get("parent") else b"",
        trace_state=_text(frame.get("state")),
        flags=_flags(frame),
        name=_text(frame.get("name")),
        kind=_KINDS.get(_text(frame.get("kind")), Span.SPAN_KIND_INTERNAL),
        start_time_unix_nano=_time(frame.get("t0")),
        end_time_unix_nano=_time(frame.get("t1")),
        attributes=values.key_values(_attributes(frame)),
        events=[*events, *map(_event, _list(frame.get("events")))],
        links=[link for item in _list(frame.get("links")) if (link := _link(item)) is not None],
        dropped_attributes_count=_count(dropped[0]),
        dropped_events_count=_count(dropped[1]) + dropped_events,
        dropped_links_count=_count(dropped[2]),
    )
    code = _STATUSES.get(_text(frame.get("status")))
    if code is not None:
        span.status.CopyFrom(Status(code=code, message=_text(frame.get("description"))))
    return span


def _attributes(frame: Frame) -> Iterator[tuple[str, object]]:
    yield from _mapping(frame.get("attrs")).items()
    if cut := _count(frame.get("cut")):
        yield "torchobs.cut", cut


def _flags(frame: Frame) -> int:
    remote = SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK if frame.get("remote") is True else 0
    return _whole(frame.get("flags")) & 0xFF | SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | remote


def _event(item: object) -> Span.Event:
    at_ns, name, attributes, dropped = [*_list(item), None, None, None, None][:4]
    return Span.Event(
        time_unix_nano=_time(at_ns),
        name=_text(name),
        attributes=values.key_values(_mapping(attributes).items()),
        dropped_attributes_count=_count(dropped),
    )


def _link(item: object) -> Span.Link | None:
    trace_id, span_id, flags, state, attributes, dropped = [*_list(item), *[None] * 6][:6]
    try:
        identity = {"trace_id": _identifier(trace_id, 16), "span_id": _identifier(span_id, 8)}
    except ValueError:
        return None
    return Span.Link(
        **identity,
        flags=_whole(flags) & 0xFF,
        trace_state=_text(state),
        attributes=values.key_values(_mapping(attributes).items()),
        dropped_attributes_count=_count(dropped),
    )


def _identifier(value: object, length: int) -> bytes:
    if not isinstance(value, str) or len(value) != 2 * length or not _HEX.fullmatch(value):
        raise ValueError("no identifier")
    return bytes.fromhex(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _time(value: object) -> int:
    return min(max(_whole(value), 0), _FIXED64 - 1)


def _count(value: object) -> int:
    return min(max(_whole(value), 0), _UINT32 - 1)
