"""Observable instruments: callbacks that raise, hang, generate, step back or stop returning."""

import math
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from opentelemetry.metrics import CallbackOptions, Observation

from tests import otel, support
from torchobs import catalog
from torchobs.flight.reader.reader import open_path
from torchobs.flight.writer.writer import FlightWriter
from torchobs.otel import FlightMeterProvider


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
    assert [record.message for record in caplog.records if "RuntimeError" in record.message] != []
    assert len(caplog.records) == 1
    file = open_path(writer.path)
    errors = [point for point in file.read().points if point.series.name == catalog.PROBE_ERRORS.name]
    file.close()
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
    seen = []
    for _ in range(3):
        provider.observe(5.0)
        seen.append(otel.values(writer)["c", "{}"])
    assert seen == [1, 2, 2]


def test_an_observed_counter_never_steps_back(
    writer: FlightWriter, provider: FlightMeterProvider, caplog: pytest.LogCaptureFixture
) -> None:
    """A total that was reset counts on from where it stood, as Prometheus would; a negative one is ignored."""
    totals = iter([10, 15, 3, 4.5, -1])
    provider.get_meter("m").create_observable_counter("c", [lambda _: [Observation(next(totals))]])
    seen = []
    for _ in range(5):
        provider.observe(5.0)
        seen.append(otel.values(writer)["c", "{}"])
    assert seen == [10, 15, 18, 19.5, 19.5]
    assert len(caplog.records) == 1


def test_what_a_callback_no_longer_returns_has_no_value(writer: FlightWriter, provider: FlightMeterProvider) -> None:
    """A gauge of something that is gone ends; so does one that became NaN."""
    rounds = iter(
        [[Observation(1, {"a": 1}), Observation(2, {"a": 2})], [Observation(math.nan, {"a": 1})], [Observation(3, {"a": 2})]]
    )
    provider.get_meter("m").create_observable_gauge("g", [lambda _: next(rounds)])
    seen = []
    for _ in range(3):
        provider.observe(5.0)
        seen.append(otel.values(writer))
    assert seen == [{("g", '{"a": 1}'): 1, ("g", '{"a": 2}'): 2}, {}, {("g", '{"a": 2}'): 3}]


def test_observable_instruments_without_callbacks_start_no_thread(provider: FlightMeterProvider) -> None:
    """A process whose user observes nothing gets no thread for it."""
    before = {*threading.enumerate()}
    provider.get_meter("m").create_counter("c").add(1)
    assert provider.observe()
    assert {*threading.enumerate()} <= before  # another test's may end meanwhile
