"""Ownership of metric names on the page: two families whose samples share a name are an error in OpenMetrics."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.catalog import BY_NAME, Kind, prometheus_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torchobs.catalog import Metric
    from torchobs.flight.format.series import Series

_OF_RANKS = (
    catalog.RANK_STATE_SET, catalog.RANK_UP, catalog.RANK_HEARTBEAT_TIMESTAMP, catalog.RANK_PROGRESS_AGE,
    catalog.RANK_START_TIME, catalog.RANK_RESTARTS, catalog.RANK_EXIT, catalog.RANK_INFO, catalog.WORLD_SIZE,
    catalog.RANK_SLOWDOWN, catalog.RANK_EXCESS, catalog.RANK_BEHIND, catalog.RANK_STALL_POSITION, catalog.RANK_EXCEPTION,
)  # fmt: skip
_OWN = ("torchobs.run.", "torchobs.build.", "torchobs.exporter.", "torchobs.host.", "system.")

COMMON_METRICS = tuple(metric for metric in catalog.METRICS if metric.name.startswith("system."))
"""Metrics of the machine with OpenTelemetry's names, which an application's own instruments may have as well."""

EXPORTER_S = frozenset((*_OF_RANKS, *(metric for metric in catalog.METRICS if metric.name.startswith(_OWN))))
"""Metrics that only the exporter produces: of ranks, runs, itself and the machine. A flight file that has one is forged."""

_FOREIGN = ("up", "target_info", "otel_scope_info", "scrape_duration_seconds", "scrape_samples_scraped",
            "scrape_samples_post_metric_relabeling", "scrape_series_added", "ALERTS", "ALERTS_FOR_STATE")  # fmt: skip
"""Series that Prometheus creates itself."""

# by name: searching a tuple would compare all fields of the metrics, for every series
_COMMON_NAMES, _EXPORTER_S_NAMES = (frozenset(metric.name for metric in metrics) for metrics in (COMMON_METRICS, EXPORTER_S))

_SUFFIXES = {
    Kind.COUNTER: ("", "_total", "_created"),
    Kind.HISTOGRAM: ("", "_bucket", "_sum", "_count", "_created"),
    Kind.GAUGE: ("",),
    Kind.UPDOWN: ("",),
}


class Family(NamedTuple):
    """A metric family; ``name`` is OpenMetrics', a counter's without ``_total``."""

    name: str
    kind: Kind
    unit: str


@lru_cache(4096)
def family_of(name: str, kind: Kind, unit: str) -> Family:
    """Return the family of an OpenTelemetry instrument's series.

    A colon becomes an underscore: OpenTelemetry forbids it, Prometheus reserves it for recording rules, and prometheus-client
    0.26 keeps it in a family's name but not in those of its samples.
    """
    translated = prometheus_name(name, unit, kind).replace(":", "_")
    return Family(translated.removesuffix("_total") if kind is Kind.COUNTER else translated, kind, unit)


def sample_name(family: Family) -> str:
    """Return the name of a counter's or a gauge's sample."""
    return f"{family.name}_total" if family.kind is Kind.COUNTER else family.name


class NameRegistry:
    """The names in use. The first to claim a name owns it; the catalog's names are claimed from the start."""

    def __init__(self, others: Iterable[str] = (), *, host: bool = False) -> None:
        """``others``: sample names that others add to the page; ``host``: it has :data:`COMMON_METRICS`."""
        self._fixed = frozenset((*_FOREIGN, *others, *_samples_of(set(catalog.METRICS) - set(COMMON_METRICS))))
        self._common = _samples_of(COMMON_METRICS) if host else {}
        self._claimed: dict[str, Family] = {}

    def claim(self, series: Series, family: Family) -> bool:
        """Claim the names of a series from a flight file, of that family; return False if another family owns one."""
        known = BY_NAME.get(series.name)
        if known is not None and (series.scope is None or series.name not in _COMMON_NAMES):
            ours = series.scope is None and (known.kind, known.unit) == (series.kind, series.unit)
            return ours and series.name not in _EXPORTER_S_NAMES
        samples = _samples(family)
        if any(self._is_taken(sample, family) for sample in samples):
            return False
        self._claimed |= dict.fromkeys(samples, family)
        return True

    def _is_taken(self, sample: str, family: Family) -> bool:
        common = self._common.get(sample)
        if sample in self._fixed or (common is not None and not _are_alike(common, family)):
            return True
        return self._claimed.get(sample, family) != family

    def keep(self, used: Collection[Family]) -> None:
        """Free the names of all families that are not among ``used``."""
        self._claimed = {sample: family for sample, family in self._claimed.items() if family in used}


def _samples(family: Family) -> tuple[str, ...]:
    return tuple(family.name + suffix for suffix in _SUFFIXES[family.kind])


def _samples_of(metrics: Iterable[Metric]) -> dict[str, Family]:
    """Return the families by the names of their samples."""
    families = [family_of(metric.name, metric.kind, metric.unit) for metric in metrics]
    return {sample: family for family in families for sample in _samples(family)}


def _are_alike(one: Family, other: Family) -> bool:
    """Return True if both can be one family on a page."""
    gauges = {Kind.GAUGE, Kind.UPDOWN}
    return one.name == other.name and (one.kind is other.kind or {one.kind, other.kind} <= gauges)
