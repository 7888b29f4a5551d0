"""A real Prometheus: what is pushed is what is scraped, and has the names that we give it."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tests.exporters import Service
from tests.page import page
from tests.prometheus_server import PrometheusServer, Series, newest_prometheus
from tests.rank_files import live_rank, live_span, train
from tests.support import NEEDS_PROGRAM, free_port, wait_until
from torchobs import catalog
from torchobs.catalog import Kind, prometheus_label, prometheus_name
from torchobs.exporter.config import ExporterConfig, PushConfig, PushTarget, address_of
from torchobs.otel import FlightMeterProvider
from torchobs.ranks import state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torchobs.flight.writer import FlightWriter


MOVING = {metric.prometheus for metric in (catalog.RANK_PROGRESS_AGE, catalog.RANK_HEARTBEAT_TIMESTAMP)}
"""Other values at any two moments."""
PLACE = ("job", "instance")


def prometheus_3(*features: str, scrape: Sequence[str] = ()) -> PrometheusServer:
    """One that takes OTLP; for a `with` block."""
    program = newest_prometheus(major=3)
    if program is None:
        pytest.skip(f"{NEEDS_PROGRAM}: Prometheus 3 (prometheus or prometheus3), on PATH")
    return PrometheusServer(program, scrape=scrape, arguments=["--web.enable-otlp-receiver", *features])


@pytest.fixture
def rank(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlightWriter]:
    """A living rank that has trained, with instruments of its user; its heartbeat is old soon, which makes it no other."""
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
    writer.publish()
    yield writer
    writer.close()


def by_labels(samples: list[Series]) -> dict[tuple[tuple[str, str], ...], float]:
    """Values by names and labels, without where they came from."""
    assert len({key(sample.labels) for sample in samples}) == len(samples)
    return {key(sample.labels): sample.value for sample in samples}


def key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What is the same, scraped or pushed; Prometheus itself writes `le` as 128.0 and as 128."""
    kept = {name: value for name, value in labels.items() if name not in PLACE}
    if "le" in kept:
        kept["le"] = str(float(kept["le"]))
    return tuple(sorted(kept.items()))


def exemplars(server: PrometheusServer, selector: str) -> list[tuple[tuple[tuple[str, str], ...], str]]:
    """The exemplars of each series, as text."""
    when = {"start": f"{time.time() - 600:.3f}", "end": f"{time.time():.3f}"}
    answer = server.get("/api/v1/query_exemplars", query=selector, **when)
    return sorted((key(entry["seriesLabels"]), json.dumps(entry["exemplars"], sort_keys=True)) for entry in answer)


def test_what_is_pushed_is_what_is_scraped(rank: FlightWriter, flight_dir: Path) -> None:
    """The same series, but for job, instance and target_info; and it ends when the rank has ended, as a scraped one does."""
    address = f"127.0.0.1:{free_port()}"
    incarnation = rank.header.incarnation.hex()
    pushed, scraped = f'{{job="gpt", instance="{incarnation}"}}', '{job="torchobs", job_name="gpt", rank!=""}'
    with (
        prometheus_3("--enable-feature=exemplar-storage", scrape=[address]) as server,
        Service(ExporterConfig(
            listen=(address_of(address),), flight_dir=str(flight_dir), grace_s=3.0,
            push=PushConfig(metrics=PushTarget(f"{server.url}/api/v1/otlp/v1/metrics"), interval_s=1.0),
        )) as service,
    ):  # fmt: skip
        server.wait_for_scrapes(2)

        def answers(*selectors: str) -> list[list[Series]]:
            results = [server.query(selector) for selector in selectors]
            return results if all(results) else []  # a scrape that takes longer than its second ends what was scraped

        ours, theirs = map(by_labels, wait_until(lambda: answers(scraped, pushed)))
        (described,) = (of for of in theirs if ("__name__", "target_info") in of)
        assert {("host_name", "node-1"), ("k8s_pod_name", "pod-1"), ("torchobs_run_id", "run-1")} <= set(described)
        del theirs[described]
        assert theirs.keys() == ours.keys()
        assert len(ours) > 60
        moving = {of for of in ours if dict(of)["__name__"] in MOVING}
        assert {of: theirs[of] for of in theirs.keys() - moving} == {of: ours[of] for of in ours.keys() - moving}
        assert exemplars(server, pushed) == exemplars(server, scraped) != []
        of_exporter = wait_until(lambda: server.query('{job="torchobs-exporter"}'))
        assert {"torchobs_run_local_ranks", "torchobs_run_step_spread"} <= {sample.labels["__name__"] for sample in of_exporter}
        assert service.value("torchobs_exporter_otlp_dropped_total", signal="metrics", reason="refused") == 0
        rank.heartbeat()  # from which its grace counts
        rank.exit(1, 0)
        rank.close()
        wait_until(lambda: server.query(f'torchobs_rank_state{{instance="{incarnation}", state="finished"}} == 1'))
        assert not server.query(f'my_share_ratio{{instance="{incarnation}"}}')
        rest = f'{{job="gpt", instance="{incarnation}", __name__!="target_info"}}'
        wait_until(lambda: not server.query(rest), timeout_s=20)


MARK = "mark"
"""An attribute with the instrument that a series came from."""

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
    """One that is only pushed to."""
    with prometheus_3() as server:
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
    names = defaultdict(set)
    for series in otlp_prometheus.get("/api/v1/series", **{"match[]": selector}):
        names[series[MARK]].add(series["__name__"])
    return names


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
    series = otlp_prometheus.get("/api/v1/series", **{"match[]": '{mark=~"(torchobs|hw|system)[.].+"}'})
    labels = {label for one in series for label in one} - {MARK, "__name__", "le"}
    assert labels == {prometheus_label(attribute.name) for one in catalog.METRICS for attribute in one.attributes}


def test_prometheus_names_what_a_user_has_as_we_do(otlp_prometheus: PrometheusServer) -> None:
    """Whatever a user calls an instrument, in whatever unit, or an attribute."""
    cases = [(f"{number}", *case) for number, case in enumerate(itertools.product(NAMES, UNITS, Kind))]
    assert send(otlp_prometheus, [point(name, unit, kind, {MARK: mark}) for mark, name, unit, kind in cases])
    names = received(otlp_prometheus, '{mark=~"[0-9]+"}')
    differ = {
        (name, unit, kind): names[mark]
        for mark, name, unit, kind in cases
        if names[mark] != expected_names(prometheus_name(name, unit, kind), kind)
    }
    assert differ == {}
    points = [point("labels", "", Kind.GAUGE, {MARK: f"label {number}", name: "x"}) for number, name in enumerate(ATTRIBUTES)]
    assert send(otlp_prometheus, points)
    series = otlp_prometheus.get("/api/v1/series", **{"match[]": "labels"})
    labels = {sample[MARK]: sample.keys() - {MARK, "__name__"} for sample in series}
    assert labels == {f"label {number}": {prometheus_label(name)} for number, name in enumerate(ATTRIBUTES)}


def test_prometheus_refuses_names_of_which_nothing_is_left(otlp_prometheus: PrometheusServer) -> None:
    """They get others on the page and in the push."""
    for name in ("日本", "_", "..."):
        assert not send(otlp_prometheus, [point(name, "", Kind.GAUGE, {})])
        assert prometheus_name(name, "", Kind.GAUGE) == "unnamed"
    for label in ("", "日本", "__"):
        assert not send(otlp_prometheus, [point("refused", "", Kind.GAUGE, {label: "x"})])
        assert prometheus_label(label).startswith("key")


def test_promtool_has_no_complaint_about_the_page(promtool: str) -> None:
    """`promtool check metrics` on a page of everything."""
    text = page(catalog.METRICS)
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert all(f"# TYPE {metric.prometheus} " in text for metric in catalog.METRICS)
