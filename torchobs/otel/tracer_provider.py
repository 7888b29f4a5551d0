"""The OpenTelemetry API's TracerProvider over a flight file: a user's spans survive a kill once they have ended.

Every span is recorded, except below a parent that was not sampled. Identifiers come from the operating system and not from
:mod:`random`: training often seeds that equally on all ranks, which would give the spans of all ranks the same identifiers, and
drawing from it would change the training's own random numbers.
"""

# ruff: noqa: FBT001, FBT002  # the API's signatures
from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)

from torchobs.flight.format.series import Scope
from torchobs.otel.attributes import clean_key, frozen
from torchobs.otel.log_once import warn_once
from torchobs.otel.span import FlightSpan, Origin, Reactions, react

if TYPE_CHECKING:
    from contextvars import Token
    from types import TracebackType

    from opentelemetry.util.types import Attributes

    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.otel.metric_stream import Source

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_SAMPLED, _RANDOM = 0x01, 0x02


def no_parent() -> None:
    """Return ``None``: spans without a context begin a trace."""


class FlightTracerProvider(TracerProvider):
    """Creates tracers for the file that ``source()`` returns; while it is ``None`` they record nothing.

    ``parent`` returns the parent of spans started without a context: the run's span, if there is one. In a forked child
    ``source`` must return ``None`` or the child's own writer.
    """

    def __init__(self, source: Source, parent: Callable[[], SpanContext | None] = no_parent) -> None:
        self._source, self.parent = source, parent
        self._tracers: dict[Scope, FlightTracer] = {}

    def writer(self) -> FlightWriter | None:
        """Return the file's writer; ``None`` when nothing is recorded."""
        return self._source()

    def write_to(self, source: Source, parent: Callable[[], SpanContext | None] = no_parent) -> None:
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
            given = (name, context, kind, attributes, links, start_time, record_exception, set_status_on_exception)
            return delegate.start_span(*given)
        current, origin = get_current_span(context).get_span_context(), self._current_origin()
        if origin is None:
            return NonRecordingSpan(current)
        parent = current if current.is_valid else self._provider.parent() if context is None else None
        own = _context_below(parent)
        if not own.trace_flags.sampled:
            return NonRecordingSpan(own)
        begin_ns = origin.now_ns() if start_time is None else start_time
        reactions = Reactions(record_exception, set_status_on_exception)
        span = FlightSpan(origin, name, own, parent, kind, begin_ns, reactions)
        span.begin_with(attributes, links or ())
        return span

    def start_as_current_span(  # type: ignore[override]  # noqa: PLR0913, PLR0917  # the API's wrapper class is private
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
    ) -> CurrentSpan:
        """See :class:`opentelemetry.trace.Tracer`: a context manager, and a decorator of functions and coroutines."""
        given = (name, context, kind, attributes, links, start_time, record_exception, set_status_on_exception)
        reactions = Reactions(record_exception, set_status_on_exception, end_on_exit)
        return CurrentSpan(functools.partial(self.start_span, *given), reactions)

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


class CurrentSpan(AbstractContextManager[Span]):
    """Starts a span on entering and makes it the current one; a decorator starts one for each call.

    Like the API's ``use_span``, which however raises another exception when an exception's text cannot be computed.
    """

    __slots__ = ("_entered", "_reactions", "_start")

    def __init__(self, start: Callable[[], Span], reactions: Reactions) -> None:
        self._start, self._reactions = start, reactions
        self._entered: list[tuple[Span, Token[Context]]] = []

    def __enter__(self) -> Span:
        span = self._start()
        self._entered.append((span, attach(set_span_in_context(span))))
        return span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        span, token = self._entered.pop()
        detach(token)
        if isinstance(error, Exception) and span.is_recording():
            react(span, error, self._reactions)
        if self._reactions.end:
            span.end()

    def __call__(self, function: FunctionT) -> FunctionT:
        """Decorate a function or a coroutine function."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run(*args: Any, **kwargs: Any) -> Any:
                with CurrentSpan(self._start, self._reactions):
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                with CurrentSpan(self._start, self._reactions):
                    return function(*args, **kwargs)

        return cast("FunctionT", run)


def _context_below(parent: SpanContext | None) -> SpanContext:
    """Return the context of a new span: with its parent's trace and sampling decision, or a new trace."""
    random = os.urandom(24)
    span_id = int.from_bytes(random[:8], "big") or 1
    if parent is None:
        trace_id = int.from_bytes(random[8:], "big") or 1
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(_SAMPLED | _RANDOM))
    flags = TraceFlags(parent.trace_flags & (_SAMPLED | _RANDOM))
    return SpanContext(parent.trace_id, span_id, is_remote=False, trace_flags=flags, trace_state=parent.trace_state)
