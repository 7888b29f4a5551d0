"""The same calls on torchobs and on the OpenTelemetry SDK give the same points and spans.

Deliberate differences (docs/opentelemetry.md) are kept out here and tested on their own in tests/unit/test_otel_*.py.
"""

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
from opentelemetry.sdk.metrics.export import Gauge, HistogramDataPoint, InMemoryMetricReader, NumberDataPoint, Sum
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typing_extensions import Self

from tests import otel
from torchobs.otel import FlightMeterProvider, FlightTracerProvider
from torchobs.otel.attributes import cleaned

KEYS = st.sampled_from(["a", "b", "route", "rank", "ä"])
TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)
NUMBERS = st.integers(-(2**40), 2**40) | st.floats(-1e12, 1e12).map(lambda value: value + 0.0)  # no -0.0: it equals 0.0
SCALARS = TEXTS | st.booleans() | st.none() | NUMBERS
ATTRIBUTES = st.none() | st.dictionaries(
    KEYS, st.sampled_from(["x", "y", 1, 1.0, True, "1"]) | SCALARS | st.lists(SCALARS, max_size=2), max_size=3
)
ODD = st.sampled_from([math.nan, math.inf, -math.inf, -1, -0.5, True, 0])


# --- metrics ------------------------------------------------------------------------------------------------------------------

SYNCHRONOUS = ("counter", "updown", "histogram", "advised", "gauge")
OBSERVED = ("observed.counter", "observed.updown", "observed.gauge")
MEASUREMENT = st.tuples(st.sampled_from(SYNCHRONOUS), NUMBERS | ODD, ATTRIBUTES)
OBSERVATIONS = st.lists(st.tuples(st.sampled_from(OBSERVED[1:]), NUMBERS | ODD, ATTRIBUTES), max_size=6)
ROUND = st.tuples(st.lists(MEASUREMENT, max_size=12), OBSERVATIONS, st.integers(0, 2**40))


@dataclass
class Library:
    """A library that measures, on whichever provider it is given."""

    provider: MeterProvider
    observations: list[tuple[str, float, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        meter = self.provider.get_meter("library", "1.2", "https://example.org/1")
        counter, updown = meter.create_counter("Counter", "1", "counts"), meter.create_up_down_counter("updown", "{item}")
        histogram, gauge = meter.create_histogram("histogram", "s"), meter.create_gauge("gauge", "By", "now")
        advised = meter.create_histogram("advised", explicit_bucket_boundaries_advisory=[-1, 0.5, 100])
        meter.create_observable_counter("observed.counter", [self._callback("observed.counter")], "s")
        meter.create_observable_up_down_counter("observed.updown", [self._callback("observed.updown")])
        meter.create_observable_gauge("observed.gauge", [self._callback("observed.gauge"), self._callback("nothing")])
        used = (counter.add, updown.add, histogram.record, advised.record, gauge.set)
        self.use: Mapping[str, Callable[..., None]] = dict(zip(SYNCHRONOUS, used, strict=True))

    def _callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(value, attributes) for metric, value, attributes in self.observations if metric == name]


def sdk_points(reader: InMemoryMetricReader) -> Iterator[otel.Seen]:
    """What the SDK would export."""
    data = reader.get_metrics_data()
    for scoped in (scope for resource in data.resource_metrics for scope in resource.scope_metrics) if data else ():
        scope = (scoped.scope.name, scoped.scope.version or "", scoped.scope.schema_url or "")
        for metric in scoped.metrics:
            kind = "GAUGE" if isinstance(metric.data, Gauge) else "HISTOGRAM"
            if isinstance(metric.data, Sum):
                kind = "COUNTER" if metric.data.is_monotonic else "UPDOWN"
            for point in metric.data.data_points:
                assert isinstance(point, (NumberDataPoint, HistogramDataPoint))
                attributes = otel.text(point.attributes or {})
                yield otel.Seen(
                    scope, metric.name, metric.unit or "", metric.description or "", kind, attributes, sdk_value(point)
                )


def sdk_value(point: NumberDataPoint | HistogramDataPoint) -> Any:
    """A point's value in the shape of ours; the SDK's count is the buckets' sum."""
    if isinstance(point, NumberDataPoint):
        return int(point.value) if isinstance(point.value, bool) else point.value  # OTLP has no boolean values
    assert point.count == sum(point.bucket_counts)
    bounds = tuple(map(float, point.explicit_bounds))
    return (tuple(point.bucket_counts), float(point.sum), float(point.min), float(point.max), bounds)


def comparable(points: Iterable[otel.Seen]) -> dict[tuple[Any, ...], Any]:
    """Points by what identifies them; sums rounded, for the SDK adds in one order and we add ints and floats apart."""
    values = {}
    for point in points:
        assert point[:-1] not in values
        values[point[:-1]] = rounded(point.value)
    return values


def rounded(value: Any) -> Any:
    """A value with its type, equal to ten digits of the largest number that was added."""
    if isinstance(value, tuple):
        counts, total, *rest = value
        return counts, pytest.approx(total, rel=1e-9, abs=1e-2), *rest
    return type(value).__name__, pytest.approx(value, rel=1e-9, abs=1e-2)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(ROUND, min_size=1, max_size=3))
def test_metrics_are_the_sdk_s(rounds: list[Any], flight_dir: Path) -> None:
    """Names, kinds, units, scopes, attribute sets, ints and floats, sums, buckets, bounds, least and greatest: all the same."""
    reader = InMemoryMetricReader()
    writer = otel.new_file(flight_dir, 1024 * 1024)
    provider = FlightMeterProvider(lambda: writer)
    ours, theirs = Library(provider), Library(SdkMeterProvider([reader], shutdown_on_exit=False))
    total = 0
    for measurements, observations, increment in rounds:
        total += increment
        for library in (ours, theirs):
            library.observations = [*observations, ("observed.counter", total, {"always": "there"})]
            for name, amount, attributes in measurements:
                if name != "gauge" or math.isfinite(amount):  # a gauge set to NaN differs on purpose
                    library.use[name](amount, attributes)
        assert provider.observe(10.0)
        assert comparable(otel.points(writer)) == comparable(sdk_points(reader))
    writer.close()


# --- spans --------------------------------------------------------------------------------------------------------------------

STATE = trace.TraceState([("vendor", "x")])
REMOTE = trace.SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=trace.TraceFlags(1), trace_state=STATE)
UNSAMPLED = trace.SpanContext(0xAAA, 0xBBB, is_remote=True, trace_flags=trace.TraceFlags(0))
INVALID = trace.SpanContext(0, 0, is_remote=False)
CONTEXTS = st.sampled_from([None, None, REMOTE, UNSAMPLED])
TIMES = st.integers(0, 2**62)
NESTED = st.dictionaries(
    st.sampled_from(["k", "l", "", "m"]), SCALARS | st.lists(SCALARS | st.lists(SCALARS, max_size=2), max_size=2), max_size=3
)
STATUSES = st.one_of(
    st.tuples(st.sampled_from(trace.StatusCode), st.none() | TEXTS),
    st.tuples(st.builds(trace.Status, st.sampled_from(trace.StatusCode), st.none() | TEXTS), st.none() | TEXTS),
)
ERRORS = st.sampled_from([ValueError("wrong"), KeyError(3), RuntimeError("äöü"), OSError(2, "no such file")])
LINKS = st.lists(st.tuples(st.sampled_from([REMOTE, UNSAMPLED, INVALID]), NESTED), max_size=3)
CALLS = st.one_of(
    st.tuples(st.just("set_attribute"), st.tuples(KEYS | st.just(""), SCALARS)),
    st.tuples(st.just("set_attributes"), st.tuples(NESTED)),
    st.tuples(st.just("add_event"), st.tuples(TEXTS, NESTED, TIMES)),
    st.tuples(st.just("add_link"), st.tuples(st.sampled_from([REMOTE, UNSAMPLED, INVALID]), NESTED)),
    st.tuples(st.just("update_name"), st.tuples(TEXTS)),
    st.tuples(st.just("set_status"), STATUSES),
    st.tuples(st.just("record_exception"), st.tuples(ERRORS, NESTED, TIMES, st.booleans())),
    st.tuples(st.just("end"), st.tuples(TIMES)),
)


@dataclass(frozen=True)
class Planned:
    """One span: how it is started, what is done with it, what is started inside it."""

    name: str
    parent: trace.SpanContext | None
    kind: trace.SpanKind
    attributes: dict[str, Any] | None
    links: list[tuple[trace.SpanContext, dict[str, Any]]]
    begin: int
    calls: list[tuple[str, tuple[Any, ...]]]
    end: int
    inner: "list[Planned]"


def planned(inner: st.SearchStrategy[list[Planned]]) -> st.SearchStrategy[list[Planned]]:
    """Spans that have such spans inside."""
    begin = (TEXTS, CONTEXTS, st.sampled_from(trace.SpanKind), st.none() | NESTED, LINKS, TIMES)
    return st.lists(st.builds(Planned, *begin, st.lists(CALLS, max_size=5), TIMES, inner), min_size=1, max_size=2)


PLANS: st.SearchStrategy[list[Planned]] = st.recursive(st.just([]), planned, max_leaves=4)


def perform(tracer: trace.Tracer, plan: list[Planned], ended: list[trace.SpanContext]) -> None:
    """Do as planned; note the spans in the order in which they end."""
    for one in plan:
        context = None if one.parent is None else trace.set_span_in_context(trace.NonRecordingSpan(one.parent), Context())
        links = [trace.Link(linked, attributes) for linked, attributes in one.links]
        manager = tracer.start_as_current_span(one.name, context, one.kind, one.attributes, links, one.begin, end_on_exit=False)
        with manager as span:
            assert trace.get_current_span() is span
            perform(tracer, one.inner, ended)
            for name, arguments in one.calls:
                if name == "end" and span.is_recording():
                    ended.append(span.get_span_context())
                getattr(span, name)(*arguments)
        if span.is_recording():
            ended.append(span.get_span_context())
        span.end(one.end)


def sdk_frame(span: ReadableSpan, identities: dict[int, int]) -> dict[str, Any]:
    """A span of the SDK's in the shape of our frames."""
    context, scope, status = span.context, span.instrumentation_scope, span.status
    assert context is not None
    assert scope is not None
    frame: dict[str, Any] = {
        "k": "span",
        "name": span.name,
        "number": identities[context.span_id],
        "trace": trace_of(trace.format_trace_id(context.trace_id)),
        "flags": int(context.trace_flags),
        "kind": span.kind.name.lower(),
        "t0": span.start_time,
        "t1": span.end_time,
        "status": status.status_code.name.lower(),
        "attrs": list(cleaned(span.attributes).items()),
        "events": [[event.timestamp, event.name, cleaned(event.attributes), event.dropped_attributes] for event in span.events],
        "links": [[*identity(link.context), cleaned(link.attributes), link.dropped_attributes] for link in span.links],
        "scope": [scope.name, scope.version, scope.schema_url, cleaned(scope.attributes)],
        "dropped": [span.dropped_attributes, span.dropped_events, span.dropped_links],
        "description": status.description or None,
        "state": context.trace_state.to_header() or None,
        "parent": None if span.parent is None else known(span.parent.span_id, identities),
        "remote": span.parent is not None and span.parent.is_remote,
    }
    return frame


def our_frame(frame: dict[str, Any], identities: dict[int, int]) -> dict[str, Any]:
    """A frame of ours, with what it leaves out, and the span's number in place of its random identifiers."""
    compared = {"dropped": [0, 0, 0], "description": None, "state": None, "parent": None, "remote": False} | frame
    compared["number"] = identities[int(compared.pop("span_id"), 16)]
    compared["trace"] = trace_of(compared.pop("trace_id"))
    if compared["parent"] is not None:
        compared["parent"] = known(int(compared["parent"], 16), identities)
    return compared | {"attrs": list(compared["attrs"].items())}


def identity(context: trace.SpanContext) -> tuple[str, str, int, str]:
    """A linked span."""
    state = context.trace_state.to_header()
    return trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id), int(context.trace_flags), state


def known(span_id: int, identities: dict[int, int]) -> int | str:
    """The number of a span of the plan; else the identifier of the one that was given from outside."""
    return identities.get(span_id, trace.format_span_id(span_id))


def trace_of(trace_id: str) -> str:
    """A given trace; random ones are compared by parents and children only."""
    return trace_id if int(trace_id, 16) in {REMOTE.trace_id, UNSAMPLED.trace_id} else "own"


@dataclass
class Both:
    """A tracer of each, and what became of their spans."""

    flight_dir: Path

    def __enter__(self) -> Self:
        self.writer = otel.new_file(self.flight_dir, 1024 * 1024)
        self.exporter = InMemorySpanExporter()
        sdk = SdkTracerProvider(shutdown_on_exit=False)
        sdk.add_span_processor(SimpleSpanProcessor(self.exporter))
        scope = ("library", "1.2", "https://example.org/1", {"a": [1]})
        self.theirs, self.ours = sdk.get_tracer(*scope), FlightTracerProvider(lambda: self.writer).get_tracer(*scope)
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()

    def run(self, work: Callable[[trace.Tracer], list[trace.SpanContext]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What ours and theirs recorded of the same work, which returns the spans in the order in which they end."""
        numbers = [
            {context.span_id: number for number, context in enumerate(work(tracer))} for tracer in (self.ours, self.theirs)
        ]
        assert len(numbers[0]) == len(numbers[1])
        ours = [our_frame(frame, numbers[0]) for frame in otel.frames(self.writer)]
        return ours, [sdk_frame(span, numbers[1]) for span in self.exporter.get_finished_spans()]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=PLANS)
def test_spans_are_the_sdk_s(plan: list[Planned], flight_dir: Path) -> None:
    """Names, kinds, times, parents, flags, trace states, statuses, attributes in their order, events, links: all the same."""

    def work(tracer: trace.Tracer) -> list[trace.SpanContext]:
        ended: list[trace.SpanContext] = []
        perform(tracer, plan, ended)
        return ended

    with Both(flight_dir) as both:
        ours, theirs = both.run(work)
        assert ours == theirs


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("set_status", [True, False])
@pytest.mark.parametrize("error", [ValueError("wrong"), GeneratorExit()], ids=["error", "exit"])
@pytest.mark.parametrize("way", ["start_as_current_span", "start_span", "decorated"])
def test_exceptions_leave_the_same_traces(
    flight_dir: Path, way: str, error: BaseException, *, set_status: bool, record: bool
) -> None:
    """Whether a block ends by an exception or a generator's exit, and whatever the flags say."""
    flags: dict[str, Any] = {"record_exception": record, "set_status_on_exception": set_status, "start_time": 5}

    def work(tracer: trace.Tracer) -> list[trace.SpanContext]:
        spans: list[trace.Span] = []
        manager = getattr(tracer, way if way == "start_span" else "start_as_current_span")("block", **flags)

        def fail(span: trace.Span | None = None) -> None:
            spans.append(span or trace.get_current_span())
            raise error

        with suppress(BaseException):
            if way == "decorated":
                manager(fail)()
            with manager as span:
                fail(span)
        return [span.get_span_context() for span in spans if span.get_span_context().is_valid]

    with Both(flight_dir) as both:
        ours, theirs = both.run(work)
    for frame in (*ours, *theirs):
        frame["t1"] = 0
        for event in frame["events"]:
            event[0] = 0
            stack = event[2].pop("exception.stacktrace")
            assert stack.splitlines()[-1] == traceback.format_exception_only(error)[-1].strip()
    assert ours == theirs
    assert len(ours) == 1
