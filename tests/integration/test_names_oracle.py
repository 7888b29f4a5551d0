"""The oracle of our names is Prometheus 3 itself: what its OTLP endpoint makes of the same instruments."""

import itertools
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tests.page import page
from tests.prometheus_server import PrometheusServer, newest_prometheus
from tests.support import NEEDS_PROGRAM
from torchobs import catalog
from torchobs.catalog import Kind, prometheus_label, prometheus_name

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
def prometheus() -> Iterator[PrometheusServer]:
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


def send(prometheus: PrometheusServer, points: Sequence[export.Metric]) -> bool:
    """Push them; whether Prometheus took them all."""
    scope = export.ScopeMetrics(InstrumentationScope("test"), points, "")
    exporter = OTLPMetricExporter(f"{prometheus.url}/api/v1/otlp/v1/metrics")
    result = exporter.export(export.MetricsData([export.ResourceMetrics(Resource({}), [scope], "")]))
    exporter.shutdown()
    return result is export.MetricExportResult.SUCCESS


def received(prometheus: PrometheusServer, selector: str) -> dict[str, set[str]]:
    """The names of the series by their mark."""
    found = defaultdict(set)
    for series in prometheus.get("/api/v1/series", **{"match[]": selector}):
        found[series[MARK]].add(series["__name__"])
    return found


def expected(name: str, kind: Kind) -> set[str]:
    """The names of the samples of the family `name`."""
    return {f"{name}_bucket", f"{name}_count", f"{name}_sum"} if kind is Kind.HISTOGRAM else {name}


def test_prometheus_names_the_catalog_as_we_do(prometheus: PrometheusServer) -> None:
    """Every metric and label has one name, whether it is scraped from the page or pushed over OTLP."""
    points = [
        point(
            one.name, one.unit, one.kind, {MARK: one.name, **{attribute.name: "x" for attribute in one.attributes}}, one.bounds
        )
        for one in catalog.METRICS
    ]
    assert send(prometheus, points)
    names = received(prometheus, '{mark=~"(torchobs|hw|system)[.].+"}')
    assert names == {metric.name: expected(metric.prometheus, metric.kind) for metric in catalog.METRICS}
    assert labels_in(prometheus) == {
        prometheus_label(attribute.name) for one in catalog.METRICS for attribute in one.attributes
    }


def labels_in(prometheus: PrometheusServer) -> set[str]:
    """The labels that the catalog's series have, the mark and what Prometheus needs itself left out."""
    series = prometheus.get("/api/v1/series", **{"match[]": '{mark=~"(torchobs|hw|system)[.].+"}'})
    return {label for one in series for label in one} - {MARK, "__name__", "le"}


def test_prometheus_names_a_user_s_instruments_as_we_do(prometheus: PrometheusServer) -> None:
    """Whatever a user calls an instrument, in whatever unit."""
    cases = [(f"{number}", *case) for number, case in enumerate(itertools.product(NAMES, UNITS, Kind))]
    assert send(prometheus, [point(name, unit, kind, {MARK: mark}) for mark, name, unit, kind in cases])
    names = received(prometheus, '{mark=~"[0-9]+"}')
    differ = {
        (name, unit, kind): names[mark]
        for mark, name, unit, kind in cases
        if names[mark] != expected(prometheus_name(name, unit, kind), kind)
    }
    assert differ == {}


def test_prometheus_names_a_user_s_attributes_as_we_do(prometheus: PrometheusServer) -> None:
    """Whatever a user calls an attribute."""
    points = [point("labels", "", Kind.GAUGE, {MARK: f"label {number}", name: "x"}) for number, name in enumerate(ATTRIBUTES)]
    assert send(prometheus, points)
    series = prometheus.get("/api/v1/series", **{"match[]": "labels"})
    found = {one[MARK]: one.keys() - {MARK, "__name__"} for one in series}
    assert found == {f"label {number}": {prometheus_label(name)} for number, name in enumerate(ATTRIBUTES)}


@pytest.mark.parametrize("name", ["日本", "_", "..."])
def test_prometheus_refuses_a_name_of_which_nothing_is_left(prometheus: PrometheusServer, name: str) -> None:
    """It gets another name on the page and in the push."""
    assert not send(prometheus, [point(name, "", Kind.GAUGE, {})])
    assert prometheus_name(name, "", Kind.GAUGE) == "unnamed"


@pytest.mark.parametrize("name", ["", "日本", "__"])
def test_prometheus_refuses_a_label_of_which_nothing_is_left(prometheus: PrometheusServer, name: str) -> None:
    """The same for labels."""
    assert not send(prometheus, [point("refused", "", Kind.GAUGE, {name: "x"})])
    assert prometheus_label(name).startswith("key")


def test_prometheus_lets_no_attribute_rename_a_series(prometheus: PrometheusServer) -> None:
    """Over OTLP `__name__` is dropped. On a page it would be a forged name, hence the only label that we name otherwise."""
    assert send(prometheus, [point("renamed", "", Kind.GAUGE, {MARK: "renamed", "__name__": "torchobs_rank_up"})])
    assert received(prometheus, '{mark="renamed"}') == {"renamed": {"renamed"}}
    assert prometheus_label("__name__") == "key__name__"


@pytest.mark.parametrize("name", ["promtool", "promtool3"])
def test_promtool_has_no_complaint_about_the_page(name: str, program: Callable[[str], str]) -> None:
    """`promtool check metrics` on a page of everything."""
    text = page(catalog.METRICS)
    checked = subprocess.run([program(name), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert all(f"# TYPE {metric.prometheus} " in text for metric in catalog.METRICS)
