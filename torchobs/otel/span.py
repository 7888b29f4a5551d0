"""Spans of the OpenTelemetry API over a flight file: in memory while they last, written to the file at their end.

Semantics and default limits are the SDK's. No lock is taken: a signal handler may add to the span that it interrupts.
"""

# ruff: noqa: FBT001, FBT002  # the API's signatures
from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, format_span_id, format_trace_id

from torchobs.otel.attributes import clean, clean_key, cleaned, text
from torchobs.otel.log_once import warn_once
from torchobs.otel.span_codec import fit

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.util.types import Attributes, AttributeValue

    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.otel.attributes import Plain
    from torchobs.otel.metric_stream import Source


LIMIT = 128
"""Most attributes, events and links of a span, and attributes of an event or link: the SDK's defaults."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Common state of one tracer's spans while one file is written."""

    writer: FlightWriter
    source: Source
    scope: list[object]
    """as encoded in a frame"""

    def now_ns(self) -> int:
        """Unix time by the pair of clocks in the file's header: a span stays right when the wall clock jumps."""
        return self.writer.header.wall_ns + self.writer.elapsed_ns()

    def write(self, fields: Mapping[str, Any]) -> None:
        """Append a frame, unless another file is being written now. A shortened frame counts as dropped, too."""
        if self.source() is self.writer:
            payload, cut = fit(fields, self.writer.events.limit)
            self.writer.events.dropped += cut > 0
            self.writer.events.put(payload)


class Reactions(NamedTuple):
    """What to do with a span when its ``with`` block exits, with or without an exception."""

    record: bool
    set_status: bool
    end: bool = True


class Bounded:
    """Bounded attributes: the oldest is dropped beyond the limit. The SDK's rules, without its lock."""

    __slots__ = ("dropped", "values")

    def __init__(self, attributes: Attributes = None) -> None:
        self.values: dict[str, Plain] = {}
        self.dropped = 0
        if attributes:
            self.update(attributes)

    def update(self, attributes: Attributes) -> None:
        """Add all of them."""
        found = cleaned(attributes)
        if isinstance(attributes, Mapping):
            self.dropped += len(attributes) - len(found)
        if not self.values and len(found) <= LIMIT:
            self.values = found
            return
        for name, value in found.items():
            self._put(name, value)

    def set(self, key: object, value: object) -> None:
        """Add one; a key that is empty or not text is dropped."""
        if isinstance(key, str) and key:
            self._put(clean_key(key), clean(value))
        else:
            self.dropped += 1

    def _put(self, name: str, value: Plain) -> None:
        values = self.values
        values.pop(name, None)  # a key set again becomes the newest
        if len(values) >= LIMIT:
            self.dropped += 1
            values.pop(list(values)[0], None)  # noqa: RUF015  # list() is atomic, an iterator would see other threads' changes
        values[name] = value


class FlightSpan(Span):
    """A recording span; a tracer makes it."""

    def __init__(
        self,
        origin: Origin,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        begin_ns: int,
        reactions: Reactions,
    ) -> None:
        self._origin, self._name, self._context, self._parent, self._kind = origin, name, context, parent, kind
        self._begin_ns, self._reactions = begin_ns, reactions
        self._attributes = Bounded()
        self._events: deque[list[Any]] = deque(maxlen=LIMIT)
        self._links: deque[list[Any]] = deque(maxlen=LIMIT)
        self._events_seen = self._links_seen = 0
        self._status = Status()
        self._unended = [None]  # popped by the first end(): later calls do nothing

    def get_span_context(self) -> SpanContext:
        """Return what identifies the span."""
        return self._context

    def is_recording(self) -> bool:
        """Return True if it has not ended."""
        return bool(self._unended)

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Set several attributes."""
        if self._may_change():
            self._attributes.update(attributes)

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Set an attribute."""
        if self._may_change():
            self._attributes.set(key, value)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        """Add a dated fact; ``timestamp`` in Unix ns, now by default."""
        if self._may_change():
            found = Bounded(attributes)
            at_ns = self._origin.now_ns() if timestamp is None else timestamp
            self._events.append([clean(at_ns), clean(name), found.values, found.dropped])
            self._events_seen += 1

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Add a link to another span; one without a valid context, attributes or trace state is ignored."""
        if (context.is_valid or attributes or context.trace_state) and self._may_change():
            found = Bounded(attributes)
            self._links.append([*_identity(context), found.values, found.dropped])
            self._links_seen += 1

    def begin_with(self, attributes: Attributes, links: Sequence[Link]) -> None:
        """Add the attributes and links given at creation."""
        if attributes:
            self._attributes.update(attributes)
        for link in links:
            self.add_link(link.context, link.attributes)

    def update_name(self, name: str) -> None:
        """Replace the name."""
        if self._may_change():
            self._name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the status: OK is final, UNSET changes nothing."""
        if not self._may_change():
            return
        code = status.status_code if isinstance(status, Status) else status
        if self._status.status_code is StatusCode.OK or code is StatusCode.UNSET:
            return
        if isinstance(status, Status):
            self._status = status
        elif isinstance(status, StatusCode):
            self._status = Status(status, description)

    def record_exception(
        self, exception: BaseException, attributes: Attributes = None, timestamp: int | None = None, escaped: bool = False
    ) -> None:
        """Add an exception as an event: class, message, and a stack of source lines without the values of variables."""
        module, name = type(exception).__module__, type(exception).__qualname__
        described: dict[str, Any] = {
            "exception.type": name if module in {None, "", "builtins"} else f"{module}.{name}",
            "exception.message": text(exception) or "",
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", described | dict(attributes or {}), timestamp)

    def end(self, end_time: int | None = None) -> None:
        """End it, at ``end_time`` (Unix ns), now by default, and write it to the file."""
        try:
            self._unended.pop()
        except IndexError:
            warn_once("end() was called on a span that has ended (%r)", self._name)
            return
        self._origin.write(self._begun() | self._done(self._origin.now_ns() if end_time is None else end_time))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """End the span; record an exception that leaves the block."""
        if exc_val is not None and self.is_recording():
            react(self, exc_val, self._reactions, escaped=True)
        super().__exit__(exc_type, exc_val, exc_tb)

    def _may_change(self) -> bool:
        if not self._unended:
            warn_once("a span was changed after its end (%r)", self._name)
        return bool(self._unended)

    def _begun(self) -> dict[str, Any]:
        parent = self._parent
        trace_id, span_id, flags, state = _identity(self._context)
        fields = {"k": "span", "name": clean(self._name), "trace_id": trace_id, "span_id": span_id, "flags": flags}
        if parent is not None:
            fields["parent"] = format_span_id(parent.span_id)
            if parent.is_remote:
                fields["remote"] = True
        if state:
            fields["state"] = state
        return fields | {"kind": self._kind.name.lower(), "t0": clean(self._begin_ns), "scope": self._origin.scope}

    def _done(self, end_ns: int) -> dict[str, Any]:
        status, events, links = self._status, list(self._events), list(self._links)
        fields: dict[str, Any] = {"t1": clean(end_ns), "status": status.status_code.name.lower()}
        if status.description:
            fields["description"] = clean(status.description)
        fields |= {"attrs": dict(self._attributes.values), "events": events, "links": links}
        dropped = [self._attributes.dropped, self._events_seen - len(events), self._links_seen - len(links)]
        return fields | {"dropped": dropped} if any(dropped) else fields


def react(span: Span, error: BaseException, reactions: Reactions, *, escaped: bool = False) -> None:
    """Record an exception that leaves a span's block."""
    if reactions.record:
        span.record_exception(error, escaped=escaped)
    if reactions.set_status:
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {text(error) or ''}"))


def _identity(context: SpanContext) -> tuple[str, str, int, str]:
    state = context.trace_state
    header = state.to_header() if state else ""
    return format_trace_id(context.trace_id), format_span_id(context.span_id), int(context.trace_flags), header
