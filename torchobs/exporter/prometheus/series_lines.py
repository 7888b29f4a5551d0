"""Lines of one series on the page: the labels are formatted once, the values at every scrape."""

from __future__ import annotations

from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.utils import floatToGoString

from torchobs.catalog import BY_NAME, Kind, cumulative
from torchobs.exporter.prometheus.name_registry import sample_name
from torchobs.exporter.prometheus.text_format import exemplar, number, prefix
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks import exemplars, labels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchobs.exporter.prometheus.name_registry import Family
    from torchobs.exporter.prometheus.text_format import Style
    from torchobs.flight.format.series import Series
    from torchobs.flight.reader.decode import Value
    from torchobs.ranks.exemplars import Shown


class Labelled(NamedTuple):
    """A series with its family and labels. Keeps ``series`` alive, because its ``id`` is a cache key."""

    series: Series
    family: Family
    sample: str
    labels: dict[str, str]
    buckets: tuple[dict[str, str], ...]
    brief: str
    survives: bool
    """whether a dead rank keeps it"""
    quiet: float | None
    shared: bool
    """as in :class:`~torchobs.catalog.Metric`"""


def label(series: Series, family: Family, identity: Mapping[str, str]) -> Labelled:
    """Return a series with its labels."""
    known = BY_NAME.get(series.name)
    shared = known is not None and known.shared
    described = {name: value for name, value in identity.items() if name != "rank"} if shared else identity
    own = {**labels.of_attributes(series.attributes), **described}
    histogram = series.kind is Kind.HISTOGRAM
    edges = [*map(floatToGoString, series.bounds), "+Inf"] if histogram else []
    return Labelled(
        series=series,
        family=family,
        sample=sample_name(family),
        labels=own,
        buckets=tuple({**own, "le": edge} for edge in edges),
        brief=known.brief if known else series.brief or f"OpenTelemetry instrument {series.name}.",
        survives=cumulative(series.kind) or (known is not None and known.survives),
        quiet=known.quiet if known is not None else None,
        shared=shared,
    )


class Lines:
    """The lines of one series in one style, with cached prefixes."""

    __slots__ = ("_created", "_entry", "_with_sum", "prefixes")

    def __init__(self, entry: Labelled, style: Style) -> None:
        name, bounds = entry.family.name, entry.series.bounds
        self._entry = entry
        # with negative values the sum is not monotonic, and OpenMetrics then forbids both sum and count
        self._with_sum = not (bounds and bounds[0] < 0)
        if entry.buckets:
            parts = [prefix(style, f"{name}_bucket", own) for own in entry.buckets]
            parts += [prefix(style, f"{name}{suffix}", entry.labels) for suffix in ("_count", "_sum")]
        else:
            parts = [prefix(style, entry.sample, entry.labels)]
        self.prefixes = tuple([f"\n{part}" for part in parts])
        """the lines up to their numbers, each preceded by its line break"""
        self._created = f"\n{prefix(style, f'{name}_created', entry.labels)}" if cumulative(entry.series.kind) else ""

    def numbers(self, value: Value | None) -> Sequence[float]:
        """Return the numbers of the first lines; none for values that a page cannot show (not finite, a negative counter)."""
        entry = self._entry
        if isinstance(value, Distribution):
            return self._of_histogram(value) if entry.buckets else ()
        if value is None or entry.buckets or not isfinite(value) or (value < 0 and entry.series.kind is Kind.COUNTER):
            return ()
        return (float(value),)

    def created(self, born_s: float) -> str:
        """Return the ``_created`` line of a counter or histogram, empty for others."""
        return f"{self._created}{number(born_s)}" if self._created else ""

    def exemplars(self, shown: Shown) -> list[tuple[int, str]]:
        """Return the exemplars to append to bucket lines, with their line's index."""
        found = exemplars.of(self._entry.series, shown) if self._entry.buckets else {}
        return [(index, exemplar(one.labels, one.value, one.at_ns)) for index, one in found.items()]

    def _of_histogram(self, value: Distribution) -> Sequence[float]:
        totals = [*map(float, accumulate(value.counts))]
        return [*totals, totals[-1], value.sum] if self._with_sum and value.sum >= 0 else totals
