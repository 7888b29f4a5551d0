"""A page with every metric of the catalog, for the programs that judge names, rules and dashboards.

The exporter's own page has a test and a golden file of its own; this one exists before any training run does. Beside it: the
metrics page of a directory without a server, by a clock that a test moves.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from tests.rank_files import Clock, File
from torchobs import catalog
from torchobs.catalog import Kind, Metric, prometheus_label
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.exposition import Exposition
from torchobs.exporter.text_format import END, OPENMETRICS, TEXT, Format, pieces
from torchobs.flight.series import Scope
from torchobs.ranks.scanner import Scanner
from torchobs.ranks.snapshot import EMPTY

EXPORTER_S = ("torchobs.exporter.", "torchobs.build.", "torchobs.host.", "system.")
"""Beginnings of the names of what the exporter says of itself and of the machine; everything else is said of a rank."""
TYPES = {Kind.COUNTER: "counter", Kind.UPDOWN: "gauge", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}
JOB_NAME, RUN_ID = "gpt", "run-1"
DESCRIBED = {"host": "node-1", "script": "train", "launcher": "torchrun", "torch_version": "2", "python_version": "3"}
"""Labels of a rank that the catalog does not name."""


def page(metrics: Iterable[Metric], elapsed_s: float = 60.0, ranks: int = 2) -> str:
    """The classic text of `metrics` after `elapsed_s` seconds: gauges are 1, counts grow by 1 or more per second."""
    return generate_latest(_registry(metrics, elapsed_s, ranks)).decode()


def openmetrics_page(metrics: Iterable[Metric], elapsed_s: float) -> str:
    """The same of two ranks in OpenMetrics, with an exemplar in one bucket of each histogram."""
    written: bytes = openmetrics.generate_latest(_registry(metrics, elapsed_s, 2))  # type: ignore[no-untyped-call]
    return written.decode()


def _registry(metrics: Iterable[Metric], elapsed_s: float, ranks: int) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(metrics, elapsed_s, ranks))
    return registry


class _Page(Collector):
    def __init__(self, metrics: Iterable[Metric], elapsed_s: float, ranks: int) -> None:
        self._metrics, self._elapsed_s, self._ranks = metrics, elapsed_s, ranks

    def collect(self) -> Iterator[Family]:
        for metric in self._metrics:
            family = Family(metric.prometheus.removesuffix("_total"), metric.brief, TYPES[metric.kind])
            for number, labels in _label_sets(metric, self._ranks):
                for suffix, more, value in _samples(metric, self._elapsed_s, number):
                    exemplar = _exemplar(metric) if more.get("le") == str(_typical(metric)) else None
                    family.add_sample(metric.prometheus + suffix, {**labels, **more}, value, exemplar=exemplar)
            yield family


def _label_sets(metric: Metric, ranks: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Each series' labels; the n-th of a rank's counters grows n times as fast as its first."""
    whose = [{"job_name": JOB_NAME, "run_id": RUN_ID, "rank": str(rank)} for rank in range(ranks)]
    for identity in [{}] if metric.name.startswith(EXPORTER_S) else whose:
        choices = (attribute.values or (f"{attribute.name}0",) for attribute in metric.attributes)
        for number, values in enumerate(itertools.product(*choices), start=1):
            names = (prometheus_label(attribute.name) for attribute in metric.attributes)
            described = DESCRIBED if metric is catalog.RANK_INFO else {}
            yield number, {**identity, **described, **dict(zip(names, values, strict=True))}


def _samples(metric: Metric, elapsed_s: float, number: int) -> Iterator[tuple[str, Mapping[str, str], float]]:
    if metric.kind is not Kind.HISTOGRAM:
        yield "", {}, elapsed_s * number if metric.kind is Kind.COUNTER else 1.0
        return
    typical = _typical(metric) or 0.0
    for bound in metric.bounds:
        yield "_bucket", {"le": str(bound)}, elapsed_s if bound >= typical else 0.0
    yield "_bucket", {"le": "+Inf"}, elapsed_s
    yield "_sum", {}, elapsed_s * typical
    yield "_count", {}, elapsed_s


def _typical(metric: Metric) -> float | None:
    return metric.bounds[len(metric.bounds) // 2] if metric.bounds else None


def _exemplar(metric: Metric) -> Exemplar:
    return Exemplar({"trace_id": f"{1:032x}", "span_id": f"{1:016x}", "step": "1"}, _typical(metric) or 0.0, time.time())


USER = Scope("my.package", "1.0")


def parse_openmetrics(page: str) -> Iterator[Family]:
    """Parse a page; what OpenMetrics does not admit is a `ValueError`."""
    return openmetrics_parser.text_string_to_metric_families(page)  # type: ignore[no-untyped-call,no-any-return]


class Exporter:
    """Scan and exposition of one directory, by a clock that a test moves."""

    def __init__(self, directory: Path, **settings: object) -> None:
        config = ExporterConfig(flight_dir=str(directory))
        self.clock = Clock()
        self._scanner = Scanner(config, self.clock)
        self._exposition = Exposition(**settings)  # type: ignore[arg-type]  # as Exposition takes them
        self._scrape = ScrapeInput(EMPTY)
        self.acknowledged = 0
        self.close = self._scanner.close

    def scan(self, seconds: float = 1.0, *files: File) -> None:
        """Take a snapshot at a moment of the clock, when these files are saved."""
        for file in files:
            file.save()
        self.clock.seconds = seconds
        self._scrape = ScrapeInput(self._scanner.scan())

    @property
    def number(self) -> int:
        return self._scrape.snapshot.number

    @property
    def holding(self) -> bool:
        """Whether the last page has a counter at 0 that has counted."""
        return self._exposition.is_holding

    def openmetrics(self) -> str:
        return self.written(OPENMETRICS).decode()

    def text(self) -> str:
        return self.written(TEXT).decode()

    def written(self, style: Format) -> bytes:
        foreign = END.encode() if style.openmetrics else b""
        return b"".join(pieces(style, foreign, self._exposition.families(self._scrape, style, self.acknowledged)))

    def families(self) -> dict[str, Family]:
        """The parsed page; parsing checks what OpenMetrics demands."""
        return {family.name: family for family in parse_openmetrics(self.openmetrics())}

    def samples(self, name: str) -> list[Sample]:
        return [sample for family in self.families().values() for sample in family.samples if sample.name == name]


def user(name: str, kind: Kind = Kind.COUNTER, unit: str = "", brief: str = "", bounds: tuple[float, ...] = ()) -> Metric:
    """A user's instrument."""
    return Metric(name, kind, unit, brief, bounds=bounds)
