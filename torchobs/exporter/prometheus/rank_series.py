"""Which series of a rank are on the page: by limits, names and duplicates, decided once; by its state and by quiet values."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.utils import floatToGoString

from torchobs import catalog
from torchobs.catalog import BY_NAME, Kind, cumulative
from torchobs.exporter.prometheus.name_registry import Family, family_of, sample_name
from torchobs.ranks import labels
from torchobs.ranks.memory_budget import MOST

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torchobs.exporter.prometheus.name_registry import NameRegistry
    from torchobs.flight.format.series import Series
    from torchobs.ranks.snapshot import Rank

REASONS = catalog.EXPORTER_SERIES_DROPPED.attributes[0].values
_SHOWN = -1
"""In place of a snapshot's number: the series may be shown to every scraper"""


class LabelledSeries(NamedTuple):
    """A series with its family and labels. Keeps ``series`` alive, because its ``id`` is a cache key."""

    series: Series
    family: Family
    labels: dict[str, str]
    buckets: tuple[dict[str, str], ...]
    brief: str
    survives: bool
    """whether a dead rank keeps it"""
    quiet: float | None
    shared: bool
    """as in :class:`~torchobs.catalog.Metric`"""

    @property
    def lines(self) -> int:
        """Most lines on the page."""
        return len(self.buckets) + 2 if self.buckets else 1


def label(series: Series, family: Family, identity: Mapping[str, str]) -> LabelledSeries:
    """Return a series with its labels; ``identity``: those of its rank."""
    known = BY_NAME.get(series.name)
    shared = known is not None and known.shared
    described = {name: value for name, value in identity.items() if name != "rank"} if shared else identity
    own = {**labels.of_attributes(series.attributes), **described}
    edges = [*map(floatToGoString, series.bounds), "+Inf"] if series.kind is Kind.HISTOGRAM else []
    return LabelledSeries(
        series=series,
        family=family,
        labels=own,
        buckets=tuple({**own, "le": edge} for edge in edges),
        brief=known.brief if known else series.brief or f"OpenTelemetry instrument {series.name}.",
        survives=cumulative(series.kind) or (known is not None and known.survives),
        quiet=known.quiet if known is not None else None,
        shared=shared,
    )


class SeriesLimits:
    """Limits of one page: series of a rank (a histogram is one), and lines of all ranks."""

    def __init__(self, per_rank: int = 20_000, total: int = MOST, drop: Sequence[str] = ()) -> None:
        """``total``: lines of all ranks; the last quarter is reserved for torchobs' own series.

        ``drop``: names of samples on the page, or prefixes of them followed by ``*``.
        """
        self.dropped = Counter(dict.fromkeys(REASONS, 0))
        """series not served, by reason"""
        self.taken = 0
        """lines on the page"""
        self._per_rank, self._total = per_rank, total
        self._drop_names = frozenset(text for text in drop if not text.endswith("*"))
        self._drop_prefixes = tuple(text.removesuffix("*") for text in drop if text.endswith("*"))
        self._was_full = False

    def refusal(self, family: Family, in_rank: int) -> str | None:
        """Return the reason not to admit another series of a rank that has ``in_rank``; ``None`` to admit it."""
        name = sample_name(family)
        if name in self._drop_names or name.startswith(self._drop_prefixes):
            return "drop_list"
        if in_rank >= self._per_rank:
            return "limit"
        if self.taken >= self._total:
            self._was_full = True
            return "total_limit"
        return None

    def take(self, entry: LabelledSeries) -> bool:
        """Reserve room for a series' lines; return False if there is none."""
        if self.taken + entry.lines > (self._total if entry.series.scope is None else 0.75 * self._total):
            self._was_full = True
            return False
        self.taken += entry.lines
        return True

    def give_back(self, lines: int) -> bool:
        """Free the room of ranks that are gone; return True if series were dropped for lack of room."""
        self.taken -= lines
        waiting, self._was_full = self._was_full and lines > 0, False
        return waiting


class RankSeries:
    """Selects and labels the series of one rank. Whether a series is admitted is decided once."""

    def __init__(self, rank: Rank, names: NameRegistry, limits: SeriesLimits) -> None:
        self.identity = dict(zip(labels.IDENTITY, (rank.job_name, rank.run_id, rank.rank), strict=True))
        self._names, self._limits = names, limits
        self._entries: dict[int, LabelledSeries | None] = {}
        """the admitted series, by the series' id"""
        self._refused: dict[int, Series] = {}
        """series that were counted as dropped; alive, so that no other object gets its id"""
        self._taken: set[tuple[str, ...]] = set()
        """name and labels of each admitted series, to detect duplicates"""

    def select(self, series: Collection[Series], *, up: bool, shared: bool) -> list[tuple[int, LabelledSeries]]:
        """Return the series of a block that are shown in the rank's state, with their index in the block.

        ``shared``: include metrics that ranks share.
        """
        for one in series:
            if id(one) not in self._entries:
                self._entries[id(one)] = self._admit(one)
        entries = ((index, self._entries[id(one)]) for index, one in enumerate(series))
        return [
            (index, entry)
            for index, entry in entries
            if entry is not None and (up or entry.survives) and (shared or not entry.shared)
        ]

    def entries(self) -> Iterator[LabelledSeries]:
        """Yield the admitted series."""
        return (entry for entry in self._entries.values() if entry is not None)

    @property
    def lines(self) -> int:
        """Number of lines reserved for them."""
        return sum(entry.lines for entry in self.entries())

    def clear(self) -> None:
        """Decide anew about all series; the count of dropped series stays."""
        self._entries.clear()
        self._taken.clear()

    def _admit(self, series: Series) -> LabelledSeries | None:
        admitted = self._place(series)
        if isinstance(admitted, LabelledSeries):
            return admitted
        if id(series) not in self._refused:
            self._refused[id(series)] = series
            self._limits.dropped[admitted] += 1
        return None

    def _place(self, series: Series) -> LabelledSeries | str:
        """Return the series with its labels, or the reason why it is not on the page."""
        family = family_of(series.name, series.kind, series.unit)
        if (reason := self._limits.refusal(family, len(self._taken))) is not None:
            return reason
        if not self._names.claim(series, family):
            return "conflict"
        entry = label(series, family, self.identity)
        key = family.name, *chain.from_iterable(sorted(entry.labels.items()))  # one flat tuple: pairs take 240 bytes more
        if key in self._taken:
            return "conflict"
        if not self._limits.take(entry):
            return "total_limit"
        self._taken.add(key)
        return entry


class QuietSeries:
    """Keeps series of one rank off the page while they have their default value, and has new counters scraped at zero first.

    Most counters of a closed set never count anything in a run: no loss scaler, no compilation, no failed probe. They are in
    the flight file from the start, but on the page only from their first event on. A counter whose first sample is 1 has an
    ``increase()`` of 0; so the page shows it at 0 until every expected scraper has received such a page, and its value then.
    A series that has counted before the exporter first sees its rank is shown as it is, because an earlier exporter may have
    served it.
    """

    def __init__(self, first: int) -> None:
        """``first``: number of the first snapshot with the rank."""
        self._first = self._number = first
        self._acknowledged = 0
        self._since: dict[int, int] = {}
        """snapshot in which each series on the page first had another value, by the series' id"""

    def begin(self, number: int, acknowledged: int) -> None:
        """Begin the page of a snapshot; every expected scraper has received that of ``acknowledged`` or a newer one."""
        self._number, self._acknowledged = number, acknowledged

    @property
    def revealed(self) -> int:
        """Number of series that are on the page."""
        return len(self._since)

    def shown(self, entry: LabelledSeries, values: Sequence[float]) -> Sequence[float]:
        """Return the numbers to show for a series with ``values``: none, zeros, or ``values`` itself."""
        key = id(entry.series)
        since = self._since.get(key)
        if since is None:
            if all(value == entry.quiet for value in values):
                return ()
            begins = cumulative(entry.series.kind) and self._number != self._first
            since = self._since[key] = self._number if begins else _SHOWN
        if since > self._acknowledged:
            return (0.0,) * len(values)
        self._since[key] = _SHOWN  # for good: a scraper that is seen for the first time must not reset it
        return values
