"""torchobs as the default of the OpenTelemetry API's globals. One process per test: the API's globals are set once."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import support

PREPARED = """
import logging, sys
from opentelemetry import metrics, trace
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pathlib import Path
from tests import otel
from torchobs.otel import install, observe, uninstall

logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
writer = otel.new_file(Path(sys.argv[1]))
reader, spans = InMemoryMetricReader(), InMemorySpanExporter()

def the_application_sets_its_own():
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader], shutdown_on_exit=False))

def theirs():
    data = reader.get_metrics_data()
    found = data.resource_metrics[0].scope_metrics if data else []
    return {metric.name: metric.data.data_points[0] for scope in found for metric in scope.metrics}

def ours():
    return {name: value for (name, _), value in otel.values(writer).items()}

def our_spans():
    return [frame["name"] for frame in otel.frames(writer)]

def their_spans():
    return [span.name for span in spans.get_finished_spans()]
"""


@pytest.fixture
def script(flight_dir: Path) -> Callable[[str], None]:
    """Run lines in a process of their own, in which neither the API nor torchobs has anything to log."""

    def run(lines: str) -> None:
        argv = [sys.executable, "-c", PREPARED + textwrap.dedent(lines), str(flight_dir)]
        env = support.clean_environment()
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=support.ROOT, env=env, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")

    return run


def test_an_application_that_sets_its_own_later_gets_all(script: Callable[[str], None]) -> None:
    """Without a warning, and what a library got at its import goes over to it: under `torchobs run` that is any application."""
    script(
        """
        proxied = metrics.get_meter("before").create_counter("proxied")
        sizes = metrics.get_meter("before").create_histogram("sizes", explicit_bucket_boundaries_advisory=[1, 2])
        metrics.get_meter("before").create_observable_gauge("watched", [lambda _: [Observation(7)]])
        proxied_tracer = trace.get_tracer("before")
        proxied.add(100)
        install(lambda: writer)
        # set-up code looks for the API's proxies to see whether it may set a provider: ours are such
        from opentelemetry.metrics._internal import _ProxyMeterProvider
        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        assert isinstance(metrics.get_meter_provider(), _ProxyMeterProvider)
        sizes.record(1.5)
        meter, tracer = metrics.get_meter("between"), trace.get_tracer("between")
        counter, updown = meter.create_counter("counter", "1", "d"), meter.create_up_down_counter("updown")
        gauge = meter.create_gauge("gauge")
        histogram = meter.create_histogram("histogram", explicit_bucket_boundaries_advisory=[1, 2])
        for kind in ("counter", "up_down_counter", "gauge"):
            getattr(meter, f"create_observable_{kind}")(f"observed.{kind}", [lambda _: [Observation(7)]])

        def use(amount):
            for one in (proxied, counter, updown):
                one.add(amount)
            gauge.set(amount)
            histogram.record(amount)
            with proxied_tracer.start_as_current_span(f"proxied {amount}"), tracer.start_as_current_span(f"span {amount}"):
                pass

        use(1)
        observe(5.0)
        the_application_sets_its_own()
        use(2)
        meter.create_counter("made.after").add(5)
        metrics.get_meter("after").create_counter("got.after").add(6)
        observe(5.0)
        found = theirs()
        for name in ("proxied", "counter", "updown", "gauge"):
            assert found[name].value == 2, name
        for kind in ("counter", "up_down_counter", "gauge"):
            assert found[f"observed.{kind}"].value == 7, kind
        assert found["histogram"].explicit_bounds == (1.0, 2.0)
        assert (found["made.after"].value, found["got.after"].value) == (5, 6)
        assert their_spans() == ["span 2", "proxied 2"]
        assert our_spans() == ["span 1", "proxied 1"]
        assert (ours()["counter"], ours()["proxied"], ours()["watched"]) == (1, 1, 7)
        assert ours()["sizes"] == ((0, 1, 0), 1.5, 1.5, 1.5, (1.0, 2.0))
        """
    )


def test_install_and_uninstall_may_be_repeated(script: Callable[[str], None]) -> None:
    """init(), shutdown(), init() in one process: the same instrument writes to each session's file, and to none between."""
    script(
        """
        install(lambda: writer)
        counter, tracer = metrics.get_meter("m").create_counter("c"), trace.get_tracer("t")
        counter.add(1)
        uninstall()
        counter.add(10)
        tracer.start_span("between").end()
        assert (ours(), our_spans()) == ({"c": 1}, [])
        second = otel.new_file(Path(sys.argv[1]))
        install(lambda: second)
        counter.add(100)
        tracer.start_span("second").end()
        assert (ours(), our_spans()) == ({"c": 1}, [])
        assert otel.values(second) == {("c", "{}"): 100}
        assert [frame["name"] for frame in otel.frames(second)] == ["second"]
        uninstall()
        the_application_sets_its_own()
        counter.add(1000)
        tracer.start_span("theirs").end()
        assert theirs()["c"].value == 1000
        assert their_spans() == ["theirs"]
        install(lambda: second)
        counter.add(10000)
        assert theirs()["c"].value == 11000
        assert otel.values(second) == {("c", "{}"): 100}
        """
    )
