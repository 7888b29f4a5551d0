"""The OpenTelemetry API's meters and tracers over a flight file: what they promise beyond being like the SDK's."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import threading
import time
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import context as context_api
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, Tracer, TraceState, set_span_in_context

from tests import otel, support
from tests.support import finish
from torchobs import catalog
from torchobs.flight.reader import open_path
from torchobs.otel import FlightMeterProvider, FlightTracerProvider
from torchobs.otel.traces import fit

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from torchobs.flight.writer import FlightWriter


@pytest.fixture
def writer(flight_dir: Path) -> Iterator[FlightWriter]:
    """A flight file."""
    opened = otel.new_file(flight_dir, 1024 * 1024)
    yield opened
    opened.close()


@pytest.fixture
def provider(writer: FlightWriter) -> FlightMeterProvider:
    """The provider that writes to it."""
    return FlightMeterProvider(lambda: writer)


@pytest.fixture
def meter(provider: FlightMeterProvider) -> Meter:
    """A meter of that provider."""
    return provider.get_meter("tests", "1.0")


@pytest.fixture
def tracer(writer: FlightWriter) -> Tracer:
    """A tracer that writes to it."""
    return FlightTracerProvider(lambda: writer).get_tracer("tests", "1.0")


def test_adding_from_eight_threads_loses_nothing(writer: FlightWriter, provider: FlightMeterProvider, meter: Meter) -> None:
    """8 × 10,000 additions, to series that several threads make at the same time, are all there: exactly."""
    counter, histogram = meter.create_counter("adds"), meter.create_histogram("sizes")
    begin = threading.Barrier(8)

    def work(number: int) -> None:
        begin.wait()
        for index in range(10_000):
            counter.add(1, {"shared": str(index % 7)})
            if index % 10 == 0:
                histogram.record(number)

    finish([threading.Thread(target=work, args=(number,)) for number in range(8)])
    provider.observe()  # what was put aside while another thread made the series
    values = otel.values(writer)
    assert sum(value for (name, _), value in values.items() if name == "adds") == 80_000
    counts, total, least, greatest, _ = values["sizes", "{}"]
    assert (sum(counts), total, least, greatest) == (8_000, 28_000.0, 0.0, 7.0)


def test_a_signal_handler_may_add_to_what_it_interrupts(writer: FlightWriter, provider: FlightMeterProvider) -> None:
    """No deadlock and no lost addition when a handler adds in the middle of an addition, to old series and to new ones."""
    counter = provider.get_meter("tests").create_counter("interrupted")
    added = dict.fromkeys(("main", "handler"), 0)

    def add(who: str) -> None:
        added[who] += 1
        counter.add(1, {"who": "both"})
        counter.add(1, {who: added[who]})

    otel.interrupted(lambda: add("main"), lambda: add("handler"), 100)
    provider.observe()
    values = otel.values(writer)
    assert values["interrupted", '{"who": "both"}'] == sum(added.values())
    assert sum(values.values()) == 2 * sum(added.values())


def test_measurements_wait_for_nobody_and_are_not_lost(writer: FlightWriter, provider: FlightMeterProvider) -> None:
    """While another thread is making a series, a new one's measurements are put aside and added with the next round."""
    counter = provider.get_meter("tests").create_counter("aside")
    times = []
    with writer.table._lock:
        for number in range(3):
            begun = time.monotonic()
            counter.add(5, {"new": number})
            times.append(time.monotonic() - begun)
    assert min(times) < 1  # waiting for the lock would never end; the fastest, whatever else the machine does
    assert otel.values(writer) == {}
    provider.observe()
    assert otel.values(writer) == {("aside", f'{{"new": {number}}}'): 5 for number in range(3)}


def test_ten_thousand_attribute_sets_are_counted_and_their_sum_is_right(writer: FlightWriter, meter: Meter) -> None:
    """What does not fit is one series `otel.metric.overflow`, and counted once; other instruments and ours have room left."""
    counter, late = meter.create_counter("many"), meter.create_histogram("late")
    for _ in range(2):
        for number in range(10_000):
            counter.add(1, {"layer": f"blocks.{number}.attention.weight"})
    values = otel.values(writer)
    separate = [value for (_, attributes), value in values.items() if "overflow" not in attributes]
    assert values["many", '{"otel.metric.overflow": true}'] == 20_000 - 2 * len(separate)
    assert set(separate) == {2}
    assert writer.table.dropped == 10_000 - len(separate)
    assert len(separate) > 500
    late.record(7.0, {"any": "thing"})
    assert otel.values(writer)["late", '{"otel.metric.overflow": true}'][1] == 7.0
    assert writer.table.cell(catalog.FLIGHT_DROPPED, {"what": "series"}) is not None


def test_amounts_may_be_any_number(writer: FlightWriter, meter: Meter) -> None:
    """NumPy scalars, one-element tensors, Decimals: integers stay integers, the rest becomes float."""
    torch = pytest.importorskip("torch")
    counter = meter.create_counter("c")
    for amount in (True, torch.tensor(2), Decimal("0.5"), torch.tensor(1.5)):
        counter.add(amount)  # type: ignore[arg-type]  # a Decimal is no float to a type checker
    assert otel.values(writer) == {("c", "{}"): 5.0}


@pytest.mark.parametrize("amount", [-1, -0.5, math.nan, math.inf, -math.inf, 10**400, "three", None, [1]])
def test_impossible_amounts_are_ignored_with_one_warning(
    writer: FlightWriter, meter: Meter, caplog: pytest.LogCaptureFixture, amount: float
) -> None:
    """A counter and a histogram never see them; the log has one line for each, not one for each step."""
    counter, histogram = meter.create_counter("c"), meter.create_histogram("h")
    for _ in range(3):
        counter.add(amount)
        histogram.record(amount)
    assert otel.values(writer) == {}
    assert len(caplog.records) == 2


def test_a_name_used_for_two_things_warns_once(writer: FlightWriter, meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    """Both are in the file, apart; Prometheus can show one of them, so the log says so."""
    meter.create_counter("twice").add(1)
    meter.create_up_down_counter("twice").add(2)
    meter.create_up_down_counter("twice").add(2)
    assert sorted(point.value for point in otel.points(writer)) == [1, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "torchobs: instrument 'twice': there is another one of this name with another kind, unit or description"
    ]


def test_impossible_names_and_boundaries_cost_no_training(
    writer: FlightWriter, meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK raises: a name that is none gives an instrument that does nothing, boundaries the default ones; one warning."""
    for name in ("", "1st", "with space", "ä", "x" * 256):
        meter.create_counter(name).add(1)
        meter.create_histogram(name).record(1)
        meter.create_gauge(name).set(1)
        meter.create_up_down_counter(name).add(1)
        for kind in ("gauge", "counter", "up_down_counter"):
            getattr(meter, f"create_observable_{kind}")(name, [lambda _: [Observation(1)]])
    assert otel.values(writer) == {}
    assert len(caplog.records) == 5 * 7
    caplog.clear()
    odd: list[Any] = [[1, 1], [2, 1], [math.nan], [1, math.inf], ["x"], "text", 5]
    for number, boundaries in enumerate(odd):
        meter.create_histogram(f"h{number}", explicit_bucket_boundaries_advisory=boundaries).record(6)
        counts, *_, bounds = otel.values(writer)[f"h{number}", "{}"]
        assert (len(bounds), counts[2]) == (15, 1)
    assert len(caplog.records) == len(odd)


def test_a_callback_that_raises_spoils_nothing_else(
    writer: FlightWriter, provider: FlightMeterProvider, caplog: pytest.LogCaptureFixture
) -> None:
    """What it had returned before counts, other callbacks run, it is called again; counted each time, logged once."""

    def failing(_: CallbackOptions) -> Iterator[Observation]:
        yield Observation(1, {"n": 1})
        raise RuntimeError

    provider.get_meter("m").create_observable_gauge("g", [failing, lambda _: [Observation(2, {"n": 2})]])
    for _ in range(3):
        assert provider.observe(5.0)
    assert otel.values(writer) == {("g", '{"n": 1}'): 1, ("g", '{"n": 2}'): 2}
    (record,) = caplog.records
    assert "RuntimeError" in record.message
    with closing(open_path(writer.path)) as file:
        errors = [point for point in file.read().points if point.series.name == catalog.PROBE_ERRORS.name]
    assert [(point.series.attributes, point.value) for point in errors] == [((("probe", "callbacks"),), 3)]


def test_a_callback_that_hangs_holds_nobody_up(writer: FlightWriter, provider: FlightMeterProvider) -> None:
    """It runs in a thread of its own, one at a time; the thread that keeps the heartbeat only starts it."""
    go, calls = threading.Event(), []

    def hanging(options: CallbackOptions) -> list[Observation]:
        calls.append(options.timeout_millis)
        go.wait(30)
        return [Observation(1)]

    provider.get_meter("m").create_observable_gauge("g", [hanging])
    begun = time.monotonic()
    assert not provider.observe()
    assert not provider.observe()
    assert time.monotonic() - begun < 5  # of the 30 s that it hangs
    assert not provider.observe(0.01)
    go.set()
    support.wait_until(lambda: otel.values(writer) == {("g", "{}"): 1})
    assert calls == [10_000.0]
    assert provider.observe(10.0)


def test_generators_are_callbacks_too(writer: FlightWriter, provider: FlightMeterProvider) -> None:
    """As the API describes them: each is sent the options and yields observations; one that ends is silent."""

    def twice() -> Generator[list[Observation], CallbackOptions, None]:
        options = yield []
        assert isinstance(options, CallbackOptions)
        yield [Observation(1)]
        yield [Observation(2)]

    provider.get_meter("m").create_observable_counter("c", [twice()])
    totals = []
    for _ in range(3):
        provider.observe(5.0)
        totals.append(otel.values(writer)["c", "{}"])
    assert totals == [1, 2, 2]


def test_an_observed_counter_never_steps_back(
    writer: FlightWriter, provider: FlightMeterProvider, caplog: pytest.LogCaptureFixture
) -> None:
    """A total that was reset counts on from where it stood, as Prometheus would; a negative one is ignored."""
    totals = iter([10, 15, 3, 4.5, -1])
    provider.get_meter("m").create_observable_counter("c", [lambda _: [Observation(next(totals))]])
    shown = []
    for _ in range(5):
        provider.observe(5.0)
        shown.append(otel.values(writer)["c", "{}"])
    assert shown == [10, 15, 18, 19.5, 19.5]
    assert len(caplog.records) == 1


def test_what_a_callback_no_longer_returns_has_no_value(writer: FlightWriter, provider: FlightMeterProvider) -> None:
    """A gauge of something that is gone ends; so does one that became NaN."""
    rounds = iter(
        [[Observation(1, {"a": 1}), Observation(2, {"a": 2})], [Observation(math.nan, {"a": 1})], [Observation(3, {"a": 2})]]
    )
    provider.get_meter("m").create_observable_gauge("g", [lambda _: next(rounds)])
    shown = []
    for _ in range(3):
        provider.observe(5.0)
        shown.append(otel.values(writer))
    assert shown == [{("g", '{"a": 1}'): 1, ("g", '{"a": 2}'): 2}, {}, {("g", '{"a": 2}'): 3}]


REMOTE = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1), trace_state=TraceState([("vendor", "x")]))


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


def test_every_frame_fits() -> None:
    """Whichever part of a span is long, its frame has at most the bytes that the ring takes."""
    for size, field in itertools.product(
        (1, 1_000, 20_000, 300_000), ("name", "description", "state", "attrs", "events", "links", "scope")
    ):
        long = "é" * size
        many = [[0, long, {long: long}, 0]] * 5
        attributes = {f"{index}{long}": long for index in range(3)}
        shapes = {"attrs": attributes, "events": many, "links": many, "scope": [long, long, long, {long: long}]}
        plain = {"k": "span", "name": "", "attrs": {}, "events": [], "links": [], "scope": ["", "", "", {}]}
        whole = plain | {field: shapes.get(field, long)}
        payload, cut = fit(whole, 11_000)
        assert len(payload) <= 11_000, (field, size)
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
