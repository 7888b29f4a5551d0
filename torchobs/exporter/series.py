"""The samples of one series on the page: its labels are made once, its values at every scrape."""

from __future__ import annotations

from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from torchobs.catalog import BY_NAME, Kind
from torchobs.exporter import labels
from torchobs.exporter.names import sample_name
from torchobs.flight.reader import Distribution

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchobs.exporter.names import Family
    from torchobs.flight.series import Series


class Labelled(NamedTuple):
    """A series with its place on the page. Holds ``series``, whose ``id`` is the cache's key."""

    series: Series
    family: Family
    sample: str
    labels: dict[str, str]
    buckets: tuple[dict[str, str], ...]
    brief: str
    survives: bool
    """whether a dead rank keeps it"""


def cumulative(kind: Kind) -> bool:
    """Tell whether a value only grows, so that it means something after its process has gone."""
    return kind in {Kind.COUNTER, Kind.HISTOGRAM}


def label(series: Series, family: Family, identity: Mapping[str, str]) -> Labelled:
    """Give a series its labels."""
    own = {**labels.of_attributes(series.attributes), **identity}
    histogram = series.kind is Kind.HISTOGRAM
    edges = [*map(floatToGoString, series.bounds), "+Inf"] if histogram else []
    known = BY_NAME.get(series.name)
    return Labelled(
        series=series,
        family=family,
        sample=sample_name(family),
        labels=own,
        buckets=tuple({**own, "le": edge} for edge in edges),
        brief=known.brief if known else series.brief or f"OpenTelemetry instrument {series.name}.",
        survives=cumulative(series.kind) or (known is not None and known.survives),
    )


def samples(entry: Labelled, value: float | Distribution, created: float | None) -> Iterator[Sample]:
    """Yield the samples for a value; none for one that a page cannot show (not finite, or a counter below zero)."""
    if isinstance(value, Distribution):
        if not entry.buckets:
            return
        yield from _of_histogram(entry, value)
    elif entry.buckets or not isfinite(value) or (entry.series.kind is Kind.COUNTER and value < 0):
        return
    else:
        yield Sample(entry.sample, entry.labels, value)
    if created is not None and cumulative(entry.series.kind):
        yield Sample(f"{entry.family.name}_created", entry.labels, created)


def _of_histogram(entry: Labelled, value: Distribution) -> Iterator[Sample]:
    name, total = entry.family.name, 0
    for total, bucket in zip(accumulate(value.counts), entry.buckets, strict=True):
        yield Sample(f"{name}_bucket", bucket, total)
    if value.sum < 0 or (entry.series.bounds and entry.series.bounds[0] < 0):
        return  # with negative values a sum is no counter: OpenMetrics has neither it nor the count then
    yield Sample(f"{name}_count", entry.labels, total)
    yield Sample(f"{name}_sum", entry.labels, value.sum)
