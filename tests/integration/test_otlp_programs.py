"""The real Collector and a real Prometheus: what is pushed is what the files hold, what is scraped, and has our names."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import threading
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from tests import flights
from tests.exporters import Service, start_program
from tests.otlp import Collector, pairs_of_json
from tests.page import page
from tests.prometheus_server import PrometheusServer, Series, newest_prometheus
from tests.rank_files import begin_run, live_rank, live_span, train
from tests.support import NEEDS_PROGRAM, free_port, wait_until
from torchobs import catalog
from torchobs.catalog import BY_NAME, Kind, prometheus_label, prometheus_name
from torchobs.exporter.config import ExporterConfig, PushConfig, PushTarget, address_of
from torchobs.flight.events import SpanIds, trace_id
from torchobs.flight.layout import Exit
from torchobs.flight.reader import Distribution, FlightFile, open_path
from torchobs.otel import FlightMeterProvider, FlightTracerProvider
from torchobs.ranks import state
from torchobs.ranks.labels import pushed_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torchobs.flight.writer import FlightWriter

IDENTITY = {"job_name": "gpt", "run_id": "run-1", "rank": "0"}
DATA = ("sum", "gauge", "histogram")


@pytest.fixture
def collector(program: Callable[[str], str], start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> Collector:
    """A running one."""
    return Collector(program("otelcol"), start, tmp_path)


def measure(writer: FlightWriter) -> None:
    """What an application records: every instrument."""
    meter = FlightMeterProvider(lambda: writer).get_meter("my.package", "1.2", "https://example.org/1", {"a": [1, 2]})
    requests, level = meter.create_counter("my.requests", "{request}", "Requests."), meter.create_up_down_counter("my.level")
    share, latency = meter.create_gauge("my.share", "1"), meter.create_histogram("my.latency", "s")
    for number in range(5):
        requests.add(number, {"route": f"/{number % 2}", "rank": "mine"})
        requests.add(0.5, {"route": "float"})
        level.add(-number, {"n": number, "b": True, "l": ["x", "ä"]})
        share.set(number / 7, {"empty": ""})
        latency.record(number * 10.0)


def work(writer: FlightWriter) -> None:
    """And every part of a span, below the run's."""
    header = writer.header
    run = SpanContext(int(trace_id(header), 16), int(SpanIds(header).run.span, 16), is_remote=False,
                      trace_flags=TraceFlags(1))  # fmt: skip
    provider = FlightTracerProvider(lambda: writer, lambda: run)
    tracer = provider.get_tracer("my.package", "1.2", "https://example.org/1", {"s": 1})
    remote = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1))
    with tracer.start_as_current_span("outer", kind=SpanKind.PRODUCER, links=[Link(remote, {"l": 1})]) as outer:
        outer.add_event("half", {"done": 0.5})
        with tracer.start_as_current_span("inner", attributes={"n": 1, "f": 2.5, "t": "ä", "s": [True, False]}) as inner:
            inner.set_status(Status(StatusCode.ERROR, "broken"))
    with trace.use_span(trace.NonRecordingSpan(remote)):
        tracer.start_span("of another").end()


@pytest.mark.parametrize("way", [("http", "none"), ("grpc", "gzip")], ids="-".join)
def test_the_collector_gets_what_was_recorded(
    collector: Collector, start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path, way: tuple[str, str]
) -> None:
    """From a rank's life to its end, by the program as people run it, with OpenTelemetry's own variables."""
    protocol, compression = way
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http if protocol == "http" else collector.grpc,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if protocol == "grpc" else "http/protobuf",
        "OTEL_EXPORTER_OTLP_COMPRESSION": compression,
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_METRIC_EXPORT_INTERVAL": "3600000",  # its own metrics are the last of all that it pushes, and come at its end
    }
    writer = live_rank(flight_dir, **{"k8s.pod.name": "pod-1"})
    begin_run(writer)
    train(writer, range(1, 4))
    live_span(writer, 2)
    exporter = start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir), **environ)
    wait_until(lambda: collector.resources("metrics"))
    measure(writer)
    work(writer)
    writer.event(catalog.EVENT_ANOMALY.name, {"kind": "loss_spike", "value": 3.5}, 2)
    writer.heartbeat()
    writer.publish()
    wait_until(lambda: len(sent_spans(collector)) == 4)
    writer.exit(Exit.EXCEPTION, 1)
    path = writer.path
    writer.close()
    wait_until(lambda: len(sent_spans(collector)) == 5)
    exporter.process.send_signal(signal.SIGTERM)
    exporter.process.wait(timeout=30)
    wait_until(lambda: any(is_own(resource) for resource, *_ in sent_points(collector)))
    file = open_path(path)
    try:
        check_points(collector, file)
        check_spans(collector, file)
    finally:
        file.close()
    complaints = [line for line in exporter.log.splitlines() if "level=error" in line or "level=warn" in line]
    assert [line for line in complaints if "does not answer within 2 s" not in line] == []  # which a busy machine may not


def sent_logs(collector: Collector) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each log record with its resource."""
    return [
        (pairs_of_json(of["resource"]["attributes"]), record)
        for of in collector.resources("logs")
        for of_scope in of["scopeLogs"]
        for record in of_scope["logRecords"]
    ]


def sent_spans(collector: Collector) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each span with its scope."""
    return [
        (of_scope["scope"], span)
        for of in collector.resources("spans")
        for of_scope in of["scopeSpans"]
        for span in of_scope["spans"]
    ]


def sent_points(collector: Collector) -> Iterator[tuple[Mapping[str, Any], Any, Any, Any]]:
    """Resource, scope, metric and point, in order."""
    for of in collector.resources("metrics"):
        resource = pairs_of_json(of["resource"]["attributes"])
        for of_scope in of["scopeMetrics"]:
            for metric in of_scope["metrics"]:
                (data,) = (metric[name] for name in DATA if name in metric)
                for point in data["dataPoints"]:
                    yield resource, of_scope["scope"], metric, point


def is_own(resource: Mapping[str, Any]) -> bool:
    """Whether it is the exporter itself."""
    return bool(resource["service.name"] == "torchobs-exporter")


def check_points(collector: Collector, file: FlightFile) -> None:
    """The last value of each series is what its file holds."""
    view, last = file.read(final=True), {}
    for resource, scope, metric, point in sent_points(collector):
        if is_own(resource):
            continue
        assert resource["service.instance.id"] == view.header.incarnation.hex()
        assert resource["k8s.pod.name"] == "pod-1"
        attributes = pairs_of_json(point["attributes"])
        assert attributes.items() >= IDENTITY.items()
        if not point.get("flags"):
            key = scope["name"], metric["name"], json.dumps(attributes, sort_keys=True)
            last[key] = point
    assert len(view.points) > 25
    for series, value in view.points:
        own = {pushed_name(name): listed(held) for name, held in series.attributes}
        name = "torchobs" if series.scope is None else series.scope.name
        key = name, series.name, json.dumps({**own, **IDENTITY}, sort_keys=True)
        known = BY_NAME.get(series.name)
        if known is not None and known.quiet is not None and value == known.quiet:
            assert key not in last, "it says nothing yet"
            continue
        assert value_of(last[key]) == expected(value), series.name


def listed(value: object) -> object:
    """An attribute as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def expected(value: object) -> object:
    """A value in the shape of :func:`value_of`."""
    if isinstance(value, Distribution):
        return sum(value.counts), list(value.counts), value.sum, value.least, value.greatest
    return value


def value_of(point: Mapping[str, Any]) -> object:
    """A point's value; JSON has 64-bit integers as text."""
    if "bucketCounts" in point:
        counts = [int(count) for count in point["bucketCounts"]]
        return int(point["count"]), counts, point["sum"], point.get("min"), point.get("max")
    return int(point["asInt"]) if "asInt" in point else point["asDouble"]


def check_spans(collector: Collector, file: FlightFile) -> None:
    """Each frame was sent once, as it is named and timed; torchobs' event is a log record."""
    header, sent = file.header, sent_spans(collector)
    frames = [frame for frame in flights.frames(file) if frame["k"] == "span"]
    *of_user, (_, run) = sent
    assert sorted(
        (span["spanId"], span["traceId"], span.get("parentSpanId", ""), span["name"], int(span["endTimeUnixNano"]))
        for _, span in of_user
    ) == sorted((frame["span_id"], frame["trace_id"], frame.get("parent", ""), frame["name"], frame["t1"]) for frame in frames)
    assert (run["spanId"], run["traceId"]) == (SpanIds(header).run.span, trace_id(header))
    ((resource, record),) = sent_logs(collector)
    assert record["eventName"] == catalog.EVENT_ANOMALY.name
    assert resource["service.instance.id"] == header.incarnation.hex()
    assert (record["traceId"], record["spanId"]) == SpanIds(header).step(2)
    assert record["spanId"] in {span["spanId"] for _, span in sent}
    exemplars = {metric["name"] for *_, metric, point in sent_points(collector) if "exemplars" in point}
    assert exemplars == {"torchobs.step.duration", "torchobs.grad.norm_distribution"}


MOVING = {metric.prometheus for metric in (catalog.RANK_PROGRESS_AGE, catalog.RANK_HEARTBEAT_TIMESTAMP)}
"""Other values at any two moments."""
PLACE = ("job", "instance")


@pytest.fixture
def prometheus() -> Iterator[tuple[PrometheusServer, str]]:
    """One that takes OTLP, and scrapes the address."""
    program = newest_prometheus(major=3)
    if program is None:
        pytest.skip(f"{NEEDS_PROGRAM}: Prometheus 3 (prometheus or prometheus3), on PATH")
    address = f"127.0.0.1:{free_port()}"
    arguments = ["--web.enable-otlp-receiver", "--enable-feature=exemplar-storage"]
    with PrometheusServer(program, scrape=[address], arguments=arguments) as server:
        yield server, address


@pytest.fixture
def rank(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlightWriter]:
    """A living rank that has trained, with instruments of its user; a heartbeat that is late makes it no other."""
    monkeypatch.setattr(state, "UNRESPONSIVE_AFTER_S", 600.0)
    writer = live_rank(flight_dir, **{"k8s.pod.name": "pod-1", "ключ": "team", "job": "mine", "instance": "this"})
    train(writer, range(1, 5))
    live_span(writer, 2)
    meter = FlightMeterProvider(lambda: writer).get_meter("my.package", "1.2")
    meter.create_counter("my.requests", "{request}", "Requests.").add(3, {"http.route": "/ä", "rank": "mine", "none": ""})
    meter.create_up_down_counter("my.level").add(-2, {"flag": True, "n": 1.5})
    odd = {"ключ": "x", "слов": "y", "": "none", "__": "z", "__name__": "torchobs_rank_up", "job": "mine", "instance": "this"}
    meter.create_counter("my.odd").add(1, odd)
    meter.create_gauge("my.share", "1").set(0.25)
    for value in (0.001, 7.0, 1e9):
        meter.create_histogram("my.latency", "s").record(value, {"le.x": "y"})
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.2):
            writer.heartbeat()

    thread = threading.Thread(target=beat)
    thread.start()
    writer.publish()
    yield writer
    ended.set()
    thread.join()
    writer.close()


def by_labels(found: list[Series]) -> dict[tuple[tuple[str, str], ...], float]:
    """Values by names and labels, without where they came from."""
    assert len({key(one.labels) for one in found}) == len(found)
    return {key(one.labels): one.value for one in found}


def key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What is the same, scraped or pushed; Prometheus itself writes `le` as 128.0 and as 128."""
    kept = {name: value for name, value in labels.items() if name not in PLACE}
    if "le" in kept:
        kept["le"] = str(float(kept["le"]))
    return tuple(sorted(kept.items()))


def exemplars(server: PrometheusServer, selector: str) -> list[tuple[tuple[tuple[str, str], ...], str]]:
    """The exemplars of each series, as text."""
    when = {"start": f"{time.time() - 600:.3f}", "end": f"{time.time():.3f}"}
    found = server.get("/api/v1/query_exemplars", query=selector, **when)
    return sorted((key(one["seriesLabels"]), json.dumps(one["exemplars"], sort_keys=True)) for one in found)


def test_what_is_pushed_is_what_is_scraped(
    prometheus: tuple[PrometheusServer, str], rank: FlightWriter, flight_dir: Path
) -> None:
    """The same series, but for job, instance and target_info; and it ends when the rank has ended, as a scraped one does."""
    server, address = prometheus
    target = PushTarget(f"{server.url}/api/v1/otlp/v1/metrics")
    config = ExporterConfig(flight_dir=str(flight_dir), push=PushConfig(metrics=target, interval_s=1.0), grace_s=3.0)
    incarnation = rank.header.incarnation.hex()
    pushed, scraped = f'{{job="gpt", instance="{incarnation}"}}', '{job="torchobs", job_name="gpt", rank!=""}'
    with Service(replace(config, listen=(address_of(address),))) as service:
        server.wait_for_scrapes(2)

        def answers(*selectors: str) -> list[list[Series]]:
            found = [server.query(selector) for selector in selectors]
            return found if all(found) else []  # a scrape that takes longer than its second ends what was scraped

        ours, theirs = map(by_labels, wait_until(lambda: answers(scraped, pushed)))
        info = [of for of in theirs if ("__name__", "target_info") in of]
        (described,) = info
        assert {("host_name", "node-1"), ("k8s_pod_name", "pod-1"), ("torchobs_run_id", "run-1")} <= set(described)
        assert {("key____", "team"), ("exported_job", "mine"), ("exported_instance", "this")} <= set(described)
        (odd,) = (dict(of) for of in theirs if ("__name__", "my_odd_total") in of)
        assert odd.items() >= {"key____": "x;y", "exported_job": "mine", "exported_instance": "this"}.items()
        del theirs[described]
        assert theirs.keys() == ours.keys()
        assert len(ours) > 60
        moving = {of for of in ours if dict(of)["__name__"] in MOVING}
        assert {of: theirs[of] for of in theirs.keys() - moving} == {of: ours[of] for of in ours.keys() - moving}
        assert exemplars(server, pushed) == exemplars(server, scraped) != []
        own, shown = wait_until(lambda: answers('{job="torchobs-exporter"}', '{job="torchobs", job_name=""}'))
        names = {one.labels["__name__"] for one in own} - {"target_info"}
        assert {"torchobs_run_local_ranks", "torchobs_run_step_spread"} <= names
        names = {name for name in names if not name.startswith("torchobs_run_")}
        dropped = catalog.EXPORTER_SERIES_DROPPED.prometheus  # of the page
        page = {one.labels["__name__"] for one in shown}
        assert names == {name for name in page if name.startswith(("torchobs_exporter_", "torchobs_build_"))} - {dropped}
        counts = service.value("torchobs_exporter_otlp_dropped_total", signal="metrics", reason="refused")
        assert counts == 0
        rank.exit(1, 0)
        rank.close()
        wait_until(lambda: server.query(f'torchobs_rank_state{{instance="{incarnation}", state="finished"}} == 1'))
        assert not server.query(f'my_share_ratio{{instance="{incarnation}"}}')
        rest = f'{{job="gpt", instance="{incarnation}", __name__!="target_info"}}'
        wait_until(lambda: not server.query(rest), timeout_s=20)


MARK = "mark"
"""An attribute that tells which instrument a series came from."""

NAMES = (
    *("a.b-c", "a..b", "__a__b", "1st", "9.9", "naïve.größe", "a²b", "a٣b", ":a:b:", "a:b.c", "a/b c", "Total"),
    *("foo_total", "foo.total.bar", "total", "foo.ratio", "foo.ratio.bar", "ratio", "foo_total.ratio"),
    *("a.seconds", "a.seconds.b", "a.per_second", "a.per.second", "bytes.per.second", "x.bytes.total", "requests"),
)
UNITS = (
    *("", "1", "s", "ms", "us", "ns", "min", "h", "d", " s ", "By", "KiBy", "MBy", "Cel", "Hz", "%", "m", "g", "W"),
    *("By/s", "MiBy/min", "1/s", "1/m", "1/mo", "/s", "s/", "1/1", "{request}", "{request}/s", "By/{thing}", "{a}s", "x}"),
    *("foo", "foo/bar/baz", "packets/second", "total", "ratio", "a-b", "a_b", "_s_", "_", "s/_", "µs", "°C", "m²", "m²/s²"),
    "requests",
)
ATTRIBUTES = (
    *("a.b", "a..b", "a-b c", "A", "1st", "9.9", "_x", "__x", "___x", "_1", "_", "_a_", "a.", "a:b", "..a", "naïve", "ä", "é1"),
    "le",
)


@pytest.fixture(scope="module")
def otlp_prometheus() -> Iterator[PrometheusServer]:
    """A Prometheus 3 that takes OTLP."""
    program = newest_prometheus(major=3)
    if program is None:
        pytest.skip(f"{NEEDS_PROGRAM}: Prometheus 3 (prometheus or prometheus3), on PATH")
    with PrometheusServer(program, arguments=["--web.enable-otlp-receiver"]) as server:
        yield server


def point(name: str, unit: str, kind: Kind, attributes: dict[str, str], bounds: Sequence[float] = ()) -> export.Metric:
    """One instrument with one point, as the SDK's reader hands it to an exporter (its API would refuse the odd names)."""
    now = time.time_ns()
    number = export.NumberDataPoint(attributes, now - 1, now, 1.0)
    data: export.Gauge | export.Sum | export.Histogram = export.Gauge([number])
    if kind in (Kind.COUNTER, Kind.UPDOWN):
        data = export.Sum([number], export.AggregationTemporality.CUMULATIVE, is_monotonic=kind is Kind.COUNTER)
    if kind is Kind.HISTOGRAM:
        counts = [1] + [0] * len(bounds)
        histogram = export.HistogramDataPoint(attributes, now - 1, now, 1, 1.0, counts, list(bounds), 1.0, 1.0)
        data = export.Histogram([histogram], export.AggregationTemporality.CUMULATIVE)
    return export.Metric(name, "", unit, data)


def send(otlp_prometheus: PrometheusServer, points: Sequence[export.Metric]) -> bool:
    """Push them; whether Prometheus took them all."""
    scope = export.ScopeMetrics(InstrumentationScope("test"), points, "")
    exporter = OTLPMetricExporter(f"{otlp_prometheus.url}/api/v1/otlp/v1/metrics")
    result = exporter.export(export.MetricsData([export.ResourceMetrics(Resource({}), [scope], "")]))
    exporter.shutdown()
    return result is export.MetricExportResult.SUCCESS


def received(otlp_prometheus: PrometheusServer, selector: str) -> dict[str, set[str]]:
    """The names of the series by their mark."""
    found = defaultdict(set)
    for series in otlp_prometheus.get("/api/v1/series", **{"match[]": selector}):
        found[series[MARK]].add(series["__name__"])
    return found


def expected_names(name: str, kind: Kind) -> set[str]:
    """The names of the samples of the family `name`."""
    return {f"{name}_bucket", f"{name}_count", f"{name}_sum"} if kind is Kind.HISTOGRAM else {name}


def test_prometheus_names_the_catalog_as_we_do(otlp_prometheus: PrometheusServer) -> None:
    """Every metric and label has one name, whether it is scraped from the page or pushed over OTLP."""
    points = [
        point(
            one.name, one.unit, one.kind, {MARK: one.name, **{attribute.name: "x" for attribute in one.attributes}}, one.bounds
        )
        for one in catalog.METRICS
    ]
    assert send(otlp_prometheus, points)
    names = received(otlp_prometheus, '{mark=~"(torchobs|hw|system)[.].+"}')
    assert names == {metric.name: expected_names(metric.prometheus, metric.kind) for metric in catalog.METRICS}
    assert labels_in(otlp_prometheus) == {
        prometheus_label(attribute.name) for one in catalog.METRICS for attribute in one.attributes
    }


def labels_in(otlp_prometheus: PrometheusServer) -> set[str]:
    """The labels that the catalog's series have, the mark and what Prometheus needs itself left out."""
    series = otlp_prometheus.get("/api/v1/series", **{"match[]": '{mark=~"(torchobs|hw|system)[.].+"}'})
    return {label for one in series for label in one} - {MARK, "__name__", "le"}


def test_prometheus_names_a_user_s_instruments_as_we_do(otlp_prometheus: PrometheusServer) -> None:
    """Whatever a user calls an instrument, in whatever unit."""
    cases = [(f"{number}", *case) for number, case in enumerate(itertools.product(NAMES, UNITS, Kind))]
    assert send(otlp_prometheus, [point(name, unit, kind, {MARK: mark}) for mark, name, unit, kind in cases])
    names = received(otlp_prometheus, '{mark=~"[0-9]+"}')
    differ = {
        (name, unit, kind): names[mark]
        for mark, name, unit, kind in cases
        if names[mark] != expected_names(prometheus_name(name, unit, kind), kind)
    }
    assert differ == {}


def test_prometheus_names_a_user_s_attributes_as_we_do(otlp_prometheus: PrometheusServer) -> None:
    """Whatever a user calls an attribute."""
    points = [point("labels", "", Kind.GAUGE, {MARK: f"label {number}", name: "x"}) for number, name in enumerate(ATTRIBUTES)]
    assert send(otlp_prometheus, points)
    series = otlp_prometheus.get("/api/v1/series", **{"match[]": "labels"})
    found = {one[MARK]: one.keys() - {MARK, "__name__"} for one in series}
    assert found == {f"label {number}": {prometheus_label(name)} for number, name in enumerate(ATTRIBUTES)}


@pytest.mark.parametrize("name", ["日本", "_", "..."])
def test_prometheus_refuses_a_name_of_which_nothing_is_left(otlp_prometheus: PrometheusServer, name: str) -> None:
    """It gets another name on the page and in the push."""
    assert not send(otlp_prometheus, [point(name, "", Kind.GAUGE, {})])
    assert prometheus_name(name, "", Kind.GAUGE) == "unnamed"


@pytest.mark.parametrize("name", ["", "日本", "__"])
def test_prometheus_refuses_a_label_of_which_nothing_is_left(otlp_prometheus: PrometheusServer, name: str) -> None:
    """The same for labels."""
    assert not send(otlp_prometheus, [point("refused", "", Kind.GAUGE, {name: "x"})])
    assert prometheus_label(name).startswith("key")


def test_prometheus_lets_no_attribute_rename_a_series(otlp_prometheus: PrometheusServer) -> None:
    """Over OTLP `__name__` is dropped. On a page it would be a forged name, hence the only label that we name otherwise."""
    assert send(otlp_prometheus, [point("renamed", "", Kind.GAUGE, {MARK: "renamed", "__name__": "torchobs_rank_up"})])
    assert received(otlp_prometheus, '{mark="renamed"}') == {"renamed": {"renamed"}}
    assert prometheus_label("__name__") == "key__name__"


def test_promtool_has_no_complaint_about_the_page(promtool: str) -> None:
    """`promtool check metrics` on a page of everything."""
    text = page(catalog.METRICS)
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert all(f"# TYPE {metric.prometheus} " in text for metric in catalog.METRICS)
