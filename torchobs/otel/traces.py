"""The OpenTelemetry API's TracerProvider and its spans over a flight file.

=========== ==========================================================================================================
field       meaning
=========== ==========================================================================================================
k           ``span``; ``span_start`` for one announced at its begin, without the fields known only at its end
name        its name
trace_id    32 hexadecimal digits
span_id     16 hexadecimal digits
parent      the parent's ``span_id``; absent for a root
remote      true when the parent lives in another process
flags       W3C trace flags
state       W3C ``tracestate``; absent when empty
kind        ``internal``, ``server``, ``client``, ``producer`` or ``consumer``
t0, t1      begin and end, Unix time in ns
status      ``unset``, ``ok`` or ``error``
description why the status is ``error``; absent when not given
attrs       attributes (``attributes.py``)
events      ``[t, name, attrs, dropped attributes]`` each, ``t`` in Unix ns
links       ``[trace_id, span_id, flags, state, attrs, dropped attributes]`` each
scope       ``[name, version, schema_url, attrs]`` of the tracer
dropped     ``[attributes, events, links]`` beyond the limits; absent when none were
cut         number of values shortened or left out so that the frame fits; absent when zero
=========== ==========================================================================================================

Semantics and default limits are the SDK's, with docs/opentelemetry.md's exceptions. Identifiers are not drawn from
:mod:`random`, which would change the training's own random numbers.
"""

# ruff: noqa: FBT001, FBT002  # the API's signatures
from __future__ import annotations

import json
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TracerProvider,
    format_span_id,
    format_trace_id,
    get_current_span,
    use_span,
)
from opentelemetry.util._decorator import _agnosticcontextmanager

from torchobs.flight.series import Scope
from torchobs.otel.attributes import clean, clean_key, cleaned, frozen, text, warn_once

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.context import Context
    from opentelemetry.util.types import Attributes, AttributeValue

    from torchobs.flight.writer import FlightWriter
    from torchobs.otel.attributes import Plain
    from torchobs.otel.metrics import Source


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_LENGTHS = (4096, 256, 32)
_LONG = ("name", "description", "attrs", "events", "links", "scope")
_MANY = ("attrs", "events", "links")


def fit(fields: Mapping[str, Any], limit: int) -> tuple[bytes, int]:
    """Return the frame's payload of at most ``limit`` bytes (at least 2 KiB), and the number of values cut.

    A span that is too long loses the ends of its longest texts first, then its attributes, events and links.
    """
    payload, shorter, cut = _encode(fields).encode(), dict(fields), 0
    for length in _LENGTHS:
        if len(payload) <= limit:
            return payload, cut
        shorter, cut = _shorten(fields, length)
        payload = _encode(shorter | {"cut": cut}).encode()
    if len(payload) <= limit:
        return payload, cut
    cut += 1 + sum(len(shorter.get(name, ())) for name in _MANY)
    shorter.pop("state", None)
    least = {"attrs": {}, "events": [], "links": [], "scope": [*shorter["scope"][:3], {}], "cut": cut}
    return _encode(shorter | least).encode(), cut


def _shorten(fields: Mapping[str, Any], length: int) -> tuple[dict[str, Any], int]:
    cuts: list[None] = []

    def short(value: Any) -> Any:
        if isinstance(value, str) and len(value) > length:
            cuts.append(None)
            return value[:length]
        if isinstance(value, list):
            return [short(item) for item in value]
        return {short(key): short(item) for key, item in value.items()} if isinstance(value, dict) else value

    return {name: short(value) if name in _LONG else value for name, value in fields.items()}, len(cuts)


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
    """Changes to a span when an exception leaves its ``with`` block."""

    record: bool
    set_status: bool


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
        plain = cleaned(attributes)
        if isinstance(attributes, Mapping):
            self.dropped += len(attributes) - len(plain)
        if not self.values and len(plain) <= LIMIT:
            self.values = plain
            return
        for name, value in plain.items():
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
        self._event_count = self._link_count = 0
        self._status = Status()
        self._unended = [None]  # popped by the first end(): later calls do nothing

    def get_span_context(self) -> SpanContext:
        """Return the ids and flags of the span."""
        return self._context

    def is_recording(self) -> bool:
        """Return whether the span has not ended yet."""
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
            bounded = Bounded(attributes)
            at_ns = self._origin.now_ns() if timestamp is None else timestamp
            self._events.append([clean(at_ns), clean(name), bounded.values, bounded.dropped])
            self._event_count += 1

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Add a link to another span; one without a valid context, attributes or trace state is ignored."""
        if (context.is_valid or attributes or context.trace_state) and self._may_change():
            bounded = Bounded(attributes)
            self._links.append([*_identity(context), bounded.values, bounded.dropped])
            self._link_count += 1

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
            if self._reactions.record:
                self.record_exception(exc_val, escaped=True)
            if self._reactions.set_status:
                self.set_status(Status(StatusCode.ERROR, f"{type(exc_val).__name__}: {text(exc_val) or ''}"))
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
        dropped = [self._attributes.dropped, self._event_count - len(events), self._link_count - len(links)]
        return fields | {"dropped": dropped} if any(dropped) else fields


def _identity(context: SpanContext) -> tuple[str, str, int, str]:
    state = context.trace_state
    header = state.to_header() if state else ""
    return format_trace_id(context.trace_id), format_span_id(context.span_id), int(context.trace_flags), header


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_SAMPLED, _RANDOM = 0x01, 0x02


def nothing() -> None:
    """Return ``None``: there is no file; or no parent, so that spans without a context begin a trace."""


class FlightTracerProvider(TracerProvider):
    """Creates tracers for the file that ``source()`` returns; while it is ``None`` they record nothing.

    ``parent`` returns the parent of spans started without a context: the run's span, if there is one. In a forked child
    ``source`` must return ``None`` or the child's own writer.
    """

    def __init__(self, source: Source, parent: Callable[[], SpanContext | None] = nothing) -> None:
        self._source, self.parent = source, parent
        self._tracers: dict[Scope, FlightTracer] = {}

    def writer(self) -> FlightWriter | None:
        """Return the file's writer; ``None`` when nothing is recorded."""
        return self._source()

    def write_to(self, source: Source, parent: Callable[[], SpanContext | None] = nothing) -> None:
        """Set the functions that return the writer and the parent of root spans."""
        self._source, self.parent = source, parent

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> Tracer:
        """Return the tracer of that instrumentation scope."""
        name, version = clean_key(instrumenting_module_name or ""), clean_key(instrumenting_library_version or "")
        if not name:
            warn_once("a tracer should have a name, the instrumented library's or the module's")
        scope = Scope(name, version, clean_key(schema_url or ""), frozen(attributes))
        return self._tracers.setdefault(scope, FlightTracer(scope, self))

    def delegate(self) -> TracerProvider | None:
        """Return the provider that the application has set, to delegate to."""
        return None


class FlightTracer(Tracer):
    """Starts spans."""

    def __init__(self, scope: Scope, provider: FlightTracerProvider) -> None:
        self._scope, self._provider = scope, provider
        self._origin: Origin | None = None
        self._inherited: tuple[TracerProvider, Tracer] | None = None

    def start_span(  # noqa: PLR0913, PLR0917  # the API's signature
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        """See :class:`opentelemetry.trace.Tracer`. Where nothing is recorded the span propagates its parent's context."""
        delegate = self._delegated_tracer()
        if delegate is not None:
            arguments = (name, context, kind, attributes, links, start_time, record_exception, set_status_on_exception)
            return delegate.start_span(*arguments)
        current, origin = get_current_span(context).get_span_context(), self._current_origin()
        if origin is None:
            return NonRecordingSpan(current)
        parent = current if current.is_valid else self._provider.parent() if context is None else None
        child = _context_below(parent)
        if not child.trace_flags.sampled:
            return NonRecordingSpan(child)
        begin_ns = origin.now_ns() if start_time is None else start_time
        reactions = Reactions(record_exception, set_status_on_exception)
        span = FlightSpan(origin, name, child, parent, kind, begin_ns, reactions)
        span.begin_with(attributes, links or ())
        return span

    @_agnosticcontextmanager  # as the SDK has it: also a decorator of functions and coroutines
    def start_as_current_span(  # noqa: PLR0913, PLR0917  # the API's signature
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> Iterator[Span]:
        """See :class:`opentelemetry.trace.Tracer`."""
        arguments = (name, context, kind, attributes, links, start_time, record_exception, set_status_on_exception)
        with use_span(self.start_span(*arguments), end_on_exit, record_exception, set_status_on_exception) as span:
            yield span

    def _delegated_tracer(self) -> Tracer | None:
        provider = self._provider.delegate()
        if provider is None:
            return None
        if self._inherited is None or self._inherited[0] is not provider:
            name, version, schema_url, _ = self._scope
            self._inherited = provider, provider.get_tracer(name, version or None, schema_url or None)
        return self._inherited[1]

    def _current_origin(self) -> Origin | None:
        """Return the origin for the file being written; ``None`` when there is none."""
        provider, origin = self._provider, self._origin
        writer = provider.writer()
        if writer is None:
            return None
        if origin is None or origin.writer is not writer:
            scope: list[object] = [*self._scope[:3], dict(self._scope.attributes)]
            origin = self._origin = Origin(writer, provider.writer, scope)
        return origin


def _context_below(parent: SpanContext | None) -> SpanContext:
    """Return the context of a new span: with its parent's trace and sampling decision, or a new trace."""
    random = os.urandom(24)
    span_id = int.from_bytes(random[:8], "big") or 1
    if parent is None:
        trace_id = int.from_bytes(random[8:], "big") or 1
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(_SAMPLED | _RANDOM))
    flags = TraceFlags(parent.trace_flags & (_SAMPLED | _RANDOM))
    return SpanContext(parent.trace_id, span_id, is_remote=False, trace_flags=flags, trace_state=parent.trace_state)
