"""The OpenTelemetry API's tracers over a flight file: what they promise beyond being like the SDK's."""

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import context as context_api
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, Tracer, TraceState, set_span_in_context

from tests import otel
from tests.support import finish
from torchobs.flight.writer import FlightWriter
from torchobs.otel import FlightTracerProvider
from torchobs.otel.traces import fit

REMOTE = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1), trace_state=TraceState([("vendor", "x")]))


@pytest.fixture
def writer(flight_dir: Path) -> Iterator[FlightWriter]:
    """A flight file."""
    opened = otel.new_file(flight_dir, 1024 * 1024)
    yield opened
    opened.close()


@pytest.fixture
def provider(writer: FlightWriter) -> FlightTracerProvider:
    """The provider that writes to it."""
    return FlightTracerProvider(lambda: writer)


@pytest.fixture
def tracer(provider: FlightTracerProvider) -> Tracer:
    """A tracer of that provider."""
    return provider.get_tracer("tests", "1.0")


def test_roots_are_children_of_the_run_s_span(writer: FlightWriter) -> None:
    """Where the session names a parent, spans without any context are its children; an explicitly empty context is not."""
    tracer = FlightTracerProvider(lambda: writer, lambda: REMOTE).get_tracer("t")
    tracer.start_span("child").end()
    tracer.start_span("root", context=context_api.Context()).end()
    child, root = otel.frames(writer)
    assert child["parent"] == f"{0xDEF:016x}"
    assert "parent" not in root


def test_without_a_file_spans_hand_their_parent_on() -> None:
    """Before init() and after shutdown() nothing is recorded, and propagation to other services still works."""
    tracer = FlightTracerProvider(lambda: None).get_tracer("t")
    with tracer.start_as_current_span("a", context=set_span_in_context(NonRecordingSpan(REMOTE))) as span:
        assert span.get_span_context() == REMOTE
        assert not span.is_recording()
    assert not tracer.start_span("b").get_span_context().is_valid


def test_a_span_belongs_to_the_file_in_which_it_began(flight_dir: Path) -> None:
    """One that ends after shutdown(), or in the next session, is no part of that other run."""
    current: list[FlightWriter | None] = [otel.new_file(flight_dir)]
    first = current[0]
    tracer = FlightTracerProvider(lambda: current[0]).get_tracer("t")
    spans = [tracer.start_span("a"), tracer.start_span("b")]
    current[0] = None
    spans[0].end()
    current[0] = second = otel.new_file(flight_dir)
    spans[1].end()
    tracer.start_span("c").end()
    assert first is not None
    assert otel.frames(first) == []
    assert [frame["name"] for frame in otel.frames(second)] == ["c"]
    first.close()
    second.close()


def test_identifiers_do_not_depend_on_the_training_s_seed(writer: FlightWriter, tracer: Tracer) -> None:
    """All ranks seed `random` alike: their spans differ all the same, and their random numbers are what they would be."""
    drawn = []
    for traced in (True, False, True):
        random.seed(0)
        for _ in range(3):
            if traced:
                tracer.start_span("a").end()
            drawn.append(random.random())
    assert drawn[:3] == drawn[3:6]
    assert len({frame["trace_id"] for frame in otel.frames(writer)}) == 6


def test_a_forked_child_s_identifiers_are_its_own(tracer: Tracer) -> None:
    """Parent and child start the same spans after the fork; no identifier comes twice."""
    reading, writing = os.pipe()
    child = os.fork()
    ids = [tracer.start_span("a").get_span_context()[:2] for _ in range(100)]
    if child == 0:
        os.write(writing, json.dumps(ids).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        others = [tuple(pair) for pair in json.load(pipe)]
    assert len(others) == 100
    assert not {*ids} & {*others}


def test_a_span_ended_by_two_threads_is_written_once(writer: FlightWriter, tracer: Tracer) -> None:
    """Exactly one end() counts, whoever is first."""
    for _ in range(20):
        span = tracer.start_span("a")
        begin = threading.Barrier(4)
        finish([threading.Thread(target=lambda: (begin.wait(), span.end())) for _ in range(4)])  # noqa: B023  # joined below
    assert len(otel.frames(writer)) == 20


def test_a_signal_handler_may_change_the_span_it_interrupts(writer: FlightWriter, tracer: Tracer) -> None:
    """The SDK's span takes a lock here and hangs forever."""
    span = tracer.start_span("a")
    handled: list[int] = []

    def handle() -> None:
        handled.append(1)
        span.set_attribute("handled", len(handled))
        tracer.start_span("in handler").end()

    def work() -> None:
        span.set_attribute("main", len(handled))
        tracer.start_span("in main").end()

    otel.interrupted(work, handle, 50)
    span.end()
    assert otel.frames(writer)[-1]["attrs"]["handled"] == 50


def test_a_clock_that_jumps_makes_no_negative_span(
    writer: FlightWriter, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock set back by a day while a span lasts: its length is right, its start where the file's clock has it."""
    begun_ns = time.time_ns()
    span = tracer.start_span("a")
    monkeypatch.setattr(time, "time_ns", lambda: begun_ns - 86_400 * 10**9)
    time.sleep(0.01)
    span.end()
    (frame,) = otel.frames(writer)
    assert 0.01e9 <= frame["t1"] - frame["t0"] < 5e9
    assert abs(frame["t0"] - begun_ns) < 5e9


def test_an_oversized_span_is_cut_and_counted_not_lost(writer: FlightWriter, tracer: Tracer) -> None:
    """A text of 100 KB loses its end, short attributes stay whole, and the frame says how many values were cut."""
    tracer.start_span("a", attributes={"long": "x" * 100_000, "short": "kept"}).end()
    (frame,) = otel.frames(writer)
    assert frame["attrs"]["short"] == "kept"
    assert frame["attrs"]["long"] == "x" * 4096
    assert frame["cut"] == 1
    assert writer.events.dropped == 1


@pytest.mark.parametrize("size", [1, 1_000, 20_000, 300_000])
@pytest.mark.parametrize("field", ["name", "description", "state", "attrs", "events", "links", "scope"])
def test_every_frame_fits(field: str, size: int) -> None:
    """Whichever part of a span is long, its frame has at most the bytes that the ring takes."""
    long = "é" * size
    many = [[0, long, {long: long}, 0]] * 5
    attributes = {f"{index}{long}": long for index in range(3)}
    shapes = {"attrs": attributes, "events": many, "links": many, "scope": [long, long, long, {long: long}]}
    plain = {"k": "span", "name": "", "attrs": {}, "events": [], "links": [], "scope": ["", "", "", {}]}
    whole = plain | {field: shapes.get(field, long)}
    payload, cut = fit(whole, 11_000)
    assert len(payload) <= 11_000
    assert json.loads(payload).get("cut", 0) == cut
    assert (cut == 0) == (json.loads(payload) == whole) == (len(json.dumps(whole, separators=(",", ":"))) <= 11_000)


def test_stacks_carry_no_values(writer: FlightWriter, tracer: Tracer) -> None:
    """Lines of source, as the program wrote them, and nothing of what its variables hold."""
    secret = str(7**70)
    with pytest.raises(ZeroDivisionError), tracer.start_as_current_span("a"):
        len(secret) / 0
    attributes = otel.frames(writer)[0]["events"][0][2]
    assert "len(secret) / 0" in attributes["exception.stacktrace"]
    assert secret not in attributes["exception.stacktrace"]
