"""The catalog keeps the conventions that its names are translated by, and translates as Prometheus does."""

import math
import re
from collections import Counter

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.semconv._incubating.metrics import hw_metrics, system_metrics

from tests.support import for_each
from torchobs import catalog
from torchobs.catalog import Kind, Metric, prometheus_label


def test_every_definition_is_in_its_list() -> None:
    """Nothing escapes the page and the docs; an anomaly's kind gives its severity, and each event has a name for people."""
    defined = [value for value in vars(catalog).values() if isinstance(value, Metric)]
    assert set(catalog.METRICS) == set(defined)
    assert list(catalog.BY_NAME.values()) == list(catalog.METRICS)
    assert min(len(catalog.EVENTS), len(catalog.SPANS)) > 1
    assert tuple(catalog.ANOMALY_SEVERITY) == catalog.ANOMALY_KINDS
    titles = [catalog.event_title(event.name) for event in catalog.EVENTS]
    assert len(set(titles)) == len(titles)
    assert [title for title in titles if re.search(r"\b(Amp|Grad|Gpu|Loop)\b|[._]", title)] == []
    assert catalog.event_title("torchobs.memory.out_of_memory") == "Out of memory"
    assert catalog.event_title("mine.of_my_own") == "Mine of my own"


def test_no_name_is_another_s_namespace() -> None:
    """OpenTelemetry's rule: `a.b` and `a.b.c` cannot both be names; nor do two metrics share a family of Prometheus."""
    for definitions in (catalog.METRICS, catalog.EVENTS, catalog.SPANS):
        names = [entry.name for entry in definitions]
        assert len(names) == len(set(names))
        within = {(name, other) for name in names for other in names if other.startswith(f"{name}.")}
        assert within <= {("torchobs.steps", f"torchobs.steps.{name}") for name in ("planned", "resumed_from")}
        assert [name for name in names if not name.startswith(("torchobs.", "hw.", "system."))] == []
    families = [metric.prometheus for metric in catalog.METRICS]
    families += [entry.prometheus.removesuffix("_total") for entry in catalog.METRICS if entry.kind is Kind.COUNTER]
    histograms = [entry.prometheus for entry in catalog.METRICS if entry.kind is Kind.HISTOGRAM]
    families += [name + suffix for name in histograms for suffix in ("_bucket", "_count", "_sum")]
    assert [name for name, count in Counter(families).items() if count > 1] == []


OPEN = (
    *(catalog.PROBE, catalog.DEVICE, catalog.GPU_ID, catalog.SYSTEM_DEVICE, catalog.NETWORK_INTERFACE),
    catalog.DEBUG_OPERATION,  # a person names it; torchobs.debug limits how many there are
)
"""Attributes with values that are not in the catalog: a probe's series begin with it, a device's at its first sight."""
TAKEN = {"job", "instance", "namespace", "pod", "container", "node", "service", "job_name", "run_id", "rank", "le", "quantile"}
"""Labels that the scrape adds, or that every series of a rank carries"""


@for_each({metric.name: (metric,) for metric in catalog.METRICS})
def test_every_metric_keeps_the_conventions(metric: Metric) -> None:
    """Suffixes, base units, a sentence, bounds that are powers of two, labels of its own, closed sets of what is counted."""
    name = metric.prometheus
    assert name.endswith("_total") == (metric.kind is Kind.COUNTER)
    if metric.kind is not Kind.HISTOGRAM:
        assert not name.endswith(("_count", "_sum", "_bucket", "_created"))
    assert name.endswith("_ratio") == (metric.unit == "1" and metric.kind is Kind.GAUGE)
    assert (metric.unit == "1") <= (metric.kind is Kind.GAUGE or metric.name.startswith("hw."))
    assert metric.unit in {"", "1", "s", "By", "By/s", "J", "W", "Hz", "Cel"} or (
        metric.unit[0] + metric.unit[-1] == "{}" and metric.unit[1:-1].islower()
    )
    assert not (metric.integer and metric.unit == "s")
    assert re.fullmatch(r"\w.*\.", metric.brief)
    assert bool(metric.bounds) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert all(math.frexp(bound)[0] == 0.5 for bound in metric.bounds)
    labels = [prometheus_label(attribute.name) for attribute in metric.attributes]
    assert not TAKEN & set(labels)
    assert len(labels) == len(set(labels))
    for attribute in metric.attributes:
        assert len(attribute.values) == len(set(attribute.values))
        if metric.kind is Kind.COUNTER and attribute not in OPEN:
            assert attribute.values


CONVENTIONS = {"hw": hw_metrics, "system": system_metrics}
_OTEL_KINDS = {Kind.COUNTER: "Counter", Kind.GAUGE: "Gauge", Kind.UPDOWN: "UpDownCounter"}
COLLECTOR_S = (catalog.SYSTEM_CPU_LOAD, catalog.SYSTEM_FILESYSTEM_INODES)
"""Of the Collector's hostmetrics receiver: the conventions have no such metric."""
STANDARD = [metric for metric in catalog.METRICS if metric.name.startswith(("hw.", "system.")) and metric not in COLLECTOR_S]


@for_each({metric.name: (metric,) for metric in STANDARD})
def test_hardware_and_system_are_named_as_opentelemetry_names_them(metric: Metric) -> None:
    """Name, kind and unit are those of the semantic conventions, which come with the SDK."""
    make = getattr(CONVENTIONS[metric.name.partition(".")[0]], f"create_{metric.name.replace('.', '_')}")
    of_conventions = make(MeterProvider().get_meter("test"), *([[]] if metric.kind is Kind.GAUGE else []))
    assert (of_conventions.name, of_conventions.unit) == (metric.name, metric.unit)
    assert type(of_conventions).__name__.endswith(_OTEL_KINDS[metric.kind])
