"""The OpenTelemetry API's meters over a flight file: what they promise beyond being like the SDK's."""

from __future__ import annotations

import math
import threading
import time
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from tests import otel, support
from tests.support import finish
from torchobs import catalog
from torchobs.flight.reader import open_path
from torchobs.otel import FlightMeterProvider

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
    found = otel.values(writer)
    assert sum(value for (name, _), value in found.items() if name == "adds") == 80_000
    counts, total, least, greatest, _ = found["sizes", "{}"]
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
    found = otel.values(writer)
    assert found["interrupted", '{"who": "both"}'] == sum(added.values())
    assert sum(found.values()) == 2 * sum(added.values())


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
    found = otel.values(writer)
    own = [value for (_, attributes), value in found.items() if "overflow" not in attributes]
    assert found["many", '{"otel.metric.overflow": true}'] == 20_000 - 2 * len(own)
    assert set(own) == {2}
    assert writer.table.dropped == 10_000 - len(own)
    assert len(own) > 500
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
    """Both are in the file, told apart; Prometheus can show one of them, so the user hears of it."""
    meter.create_counter("twice").add(1)
    meter.create_up_down_counter("twice").add(2)
    meter.create_up_down_counter("twice").add(2)
    assert sorted(seen.value for seen in otel.points(writer)) == [1, 4]
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
