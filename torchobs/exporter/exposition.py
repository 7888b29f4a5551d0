"""The metrics page as text: which series of each rank are on it, in which order, and under which names."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.catalog import BY_NAME, Kind
from torchobs.exporter import exporter_metrics
from torchobs.exporter.text_format import (
    BlockRenderer,
    Family,
    LabelledSeries,
    QuietSeries,
    SampleRenderer,
    family_of,
    label,
    sample_name,
)
from torchobs.ranks import labels
from torchobs.ranks.labels import NO_EXEMPLARS
from torchobs.ranks.snapshot import MOST_SERIES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torchobs.exporter.exporter_metrics import ScrapeInput
    from torchobs.exporter.text_format import FamilyLines, Format
    from torchobs.flight.series import Series
    from torchobs.ranks.snapshot import Rank


_OF_RANKS = (
    catalog.RANK_STATE_SET, catalog.RANK_UP, catalog.RANK_HEARTBEAT_TIMESTAMP, catalog.RANK_PROGRESS_AGE,
    catalog.RANK_START_TIME, catalog.RANK_RESTARTS, catalog.RANK_EXIT, catalog.RANK_INFO, catalog.WORLD_SIZE,
    catalog.RANK_SLOWDOWN, catalog.RANK_EXCESS, catalog.RANK_BEHIND, catalog.RANK_STALL_POSITION, catalog.RANK_EXCEPTION,
)  # fmt: skip
_OWN = ("torchobs.run.", "torchobs.build.", "torchobs.exporter.", "torchobs.host.", "system.")

_EXPORTER_S = frozenset(
    metric.name for metric in (*_OF_RANKS, *catalog.METRICS) if metric in _OF_RANKS or metric.name.startswith(_OWN)
)
"""Names of the metrics that only the exporter produces: of ranks, runs, itself and the machine."""

_FOREIGN = ("up", "target_info", "otel_scope_info", "scrape_duration_seconds", "scrape_samples_scraped",
            "scrape_samples_post_metric_relabeling", "scrape_series_added", "ALERTS", "ALERTS_FOR_STATE")  # fmt: skip
"""Series that Prometheus creates itself."""

_SUFFIXES = {
    Kind.COUNTER: ("", "_total", "_created"),
    Kind.HISTOGRAM: ("", "_bucket", "_sum", "_count", "_created"),
    Kind.GAUGE: ("",),
    Kind.UPDOWN: ("",),
}


class NameRegistry:
    """Names in use. The first to claim a name owns it; the catalog's names are claimed from the start."""

    def __init__(self, others: Iterable[str] = (), *, host: bool = False) -> None:
        """``others``: sample names that others add to the page; ``host``: it has the machine's metrics.

        The machine's have OpenTelemetry's names, which an application's own instruments may have where the page lacks them.
        """
        ours = (metric for metric in catalog.METRICS if host or not metric.name.startswith("system."))
        families = (family_of(metric.name, metric.kind, metric.unit) for metric in ours)
        self._fixed = frozenset((*_FOREIGN, *others, *chain.from_iterable(map(_samples, families))))
        self._claimed: dict[str, Family] = {}

    def claim(self, series: Series, family: Family) -> bool:
        """Claim the names of a series from a flight file, of that family; return False if another family owns one."""
        metric = BY_NAME.get(series.name) if series.scope is None else None
        if metric is not None:
            return (metric.kind, metric.unit) == (series.kind, series.unit) and series.name not in _EXPORTER_S
        samples = _samples(family)
        if any(sample in self._fixed or self._claimed.get(sample, family) != family for sample in samples):
            return False
        self._claimed |= dict.fromkeys(samples, family)
        return True

    def keep(self, used: Collection[Family]) -> None:
        """Free the names of all families that are not among ``used``."""
        self._claimed = {sample: family for sample, family in self._claimed.items() if family in used}


def _samples(family: Family) -> tuple[str, ...]:
    return tuple(family.name + suffix for suffix in _SUFFIXES[family.kind])


REASONS = catalog.EXPORTER_SERIES_DROPPED.attributes[0].values


class SeriesLimits:
    """The limit of one page: lines of all ranks. One rank has no more series than its file has room for."""

    def __init__(self, total: int = MOST_SERIES, drop: Sequence[str] = ()) -> None:
        """``total``: lines of all ranks; the last quarter is reserved for torchobs' own series.

        ``drop``: names of samples on the page, or prefixes of them followed by ``*``.
        """
        self.dropped = Counter(dict.fromkeys(REASONS, 0))
        """series not served, by reason"""
        self.taken = 0
        """lines on the page"""
        self._total = total
        self._drop_names = frozenset(text for text in drop if not text.endswith("*"))
        self._drop_prefixes = tuple(text.removesuffix("*") for text in drop if text.endswith("*"))
        self._was_full = False

    def drops(self, family: Family) -> bool:
        """Return whether a family is not to be served."""
        name = sample_name(family)
        return name in self._drop_names or name.startswith(self._drop_prefixes)

    def reserve(self, entry: LabelledSeries) -> bool:
        """Reserve room for a series' lines; return False if there is none."""
        if self.taken + entry.lines > (self._total if entry.series.scope is None else 0.75 * self._total):
            self._was_full = True
            return False
        self.taken += entry.lines
        return True

    def give_back(self, ranks: Iterable[RankLines]) -> bool:
        """Free the room of ranks; return True if series were dropped for lack of room."""
        lines = sum(entry.lines for rank in ranks for entry in rank.entries())
        self.taken -= lines
        had_no_room, self._was_full = self._was_full and lines > 0, False
        return had_no_room


class RankLines:
    """The lines of one rank: selects and labels its series, and keeps renderers for each format.

    Whether a series is admitted is decided once.
    """

    def __init__(self, rank: Rank, number: int, names: NameRegistry, limits: SeriesLimits) -> None:
        """``number``: that of the first snapshot with the rank."""
        self.quiet = QuietSeries(number)
        self.is_holding = False
        """whether the last page shows a counter at 0 that has counted already"""
        self._identity = dict(zip(labels.IDENTITY, (rank.job_name, rank.run_id, rank.rank), strict=True))
        self._names, self._limits = names, limits
        self._entries: dict[int, LabelledSeries | None] = {}
        """the admitted series, by the series' id"""
        self._refused: dict[int, Series] = {}
        """series that were counted as dropped; alive, so that no other object gets its id"""
        self._taken: set[tuple[str, ...]] = set()
        """name and labels of each admitted series, to detect duplicates"""
        self._renderers: dict[Format, SampleRenderer] = {}
        self._blocks: dict[tuple[Format, int], tuple[tuple[tuple[Series, ...], bool, bool], BlockRenderer]] = {}
        """the renderer of each block, with its series and the rank's state"""

    def of_exporter(self, rank: Rank, form: Format) -> list[FamilyLines]:
        """Return the lines of the exporter's own metrics of the rank."""
        if form not in self._renderers:
            identity = self._identity  # a closure over self would be a cycle, and keep a gone rank's lines for minutes
            self._renderers[form] = SampleRenderer(form, lambda attributes: {**labels.of_catalog(attributes), **identity})
        return self._renderers[form].lines([*exporter_metrics.of_rank(rank)])

    def of_blocks(self, rank: Rank, form: Format, *, shared: bool) -> Iterator[list[FamilyLines]]:
        """Yield the lines of each value block; ``shared``: include metrics that ranks share."""
        self.is_holding = False
        for index, block in enumerate(rank.view.blocks):
            shown, kept = (block.series, rank.up, shared), self._blocks.get((form, index))
            if kept is None or kept[0] != shown:
                selected = self.select(block.series, up=rank.up, shared=shared)
                kept = self._blocks[form, index] = shown, BlockRenderer(selected, form, self.quiet)
            yield kept[1].lines(block, NO_EXEMPLARS if index else rank.exemplars)
            self.is_holding |= kept[1].is_holding

    def select(self, series: Collection[Series], *, up: bool, shared: bool) -> list[tuple[int, LabelledSeries]]:
        """Return the series of a block that are shown in the rank's state, with their index in the block."""
        for candidate in series:
            if id(candidate) not in self._entries:
                self._entries[id(candidate)] = self._admit(candidate)
        entries = ((index, self._entries[id(candidate)]) for index, candidate in enumerate(series))
        return [
            (index, entry)
            for index, entry in entries
            if entry is not None and (up or entry.survives) and (shared or not entry.shared)
        ]

    def entries(self) -> list[LabelledSeries]:
        """Return the admitted series."""
        return [entry for entry in self._entries.values() if entry is not None]

    def clear(self) -> None:
        """Decide anew about all series; the count of dropped series stays."""
        self._entries.clear()
        self._taken.clear()
        self._blocks.clear()

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
        if self._limits.drops(family):
            return "drop_list"
        if not self._names.claim(series, family):
            return "conflict"
        entry = label(series, family, self._identity)
        key = family.name, *chain.from_iterable(sorted(entry.labels.items()))  # one flat tuple: pairs take 240 bytes more
        if key in self._taken:
            return "conflict"
        if not self._limits.reserve(entry):
            return "total_limit"
        self._taken.add(key)
        return entry


_Key = tuple[int, str]
"""A rank: the number of its file's opening, and its label"""


class Exposition:
    """Renders the page. To be used by one thread at a time."""

    def __init__(self, others: Iterable[str] = (), *, limits: SeriesLimits | None = None, host: bool = False) -> None:
        """``others``: sample names that others add to the page; ``host``: include the machine's metrics."""
        self._names = NameRegistry(others, host=host)
        self._limits = limits or SeriesLimits()
        self._ranks: dict[_Key, RankLines] = {}
        self._renderers: dict[Format, SampleRenderer] = {}
        self.is_holding = False
        """whether the last page shows a counter at 0 that has counted already (``QuietSeries``)"""

    def families(self, scrape: ScrapeInput, form: Format, acknowledged: int = 0) -> Iterator[str]:
        """Yield the text of every family, each family once.

        ``acknowledged``: number of a snapshot; every expected scraper has received its page or a newer one.
        """
        return _by_family(chain.from_iterable(self._lines(scrape, form, acknowledged)))

    def _lines(self, scrape: ScrapeInput, form: Format, acknowledged: int) -> Iterator[Iterable[FamilyLines]]:
        """Yield the lines of each rank, then those of the exporter's and the machine's metrics."""
        number, ranks = scrape.snapshot.number, {(rank.opened, rank.rank): rank for rank in scrape.snapshot.ranks}
        self._forget_all_but(ranks)
        sharing, self.is_holding = _first_ranks(ranks), False
        for key, rank in ranks.items():
            if key not in self._ranks:
                self._ranks[key] = RankLines(rank, number, self._names, self._limits)
            lines = self._ranks[key]
            lines.quiet.begin(number, acknowledged)
            yield lines.of_exporter(rank, form)
            yield from lines.of_blocks(rank, form, shared=key in sharing)
            self.is_holding |= lines.is_holding
        if form not in self._renderers:
            self._renderers[form] = SampleRenderer(form, labels.of_catalog)
        machine = scrape.host.said if scrape.host else ()
        yield self._renderers[form].lines([*exporter_metrics.of_exporter(scrape, self._limits.dropped), *machine])

    def _forget_all_but(self, served: Mapping[_Key, Rank]) -> None:
        departed = [self._ranks.pop(key) for key in self._ranks.keys() - served.keys()]
        if not departed:
            return
        if self._limits.give_back(departed):  # the latest ranks had found no room: place all again
            self._limits.give_back(self._ranks.values())
            for lines in self._ranks.values():
                lines.clear()
        self._names.keep({entry.family for lines in self._ranks.values() for entry in lines.entries()})


def _first_ranks(ranks: Mapping[_Key, Rank]) -> set[_Key]:
    """Return for each run the rank that shows the metrics all ranks share: the first living one, else the first."""
    first: dict[tuple[str, str], _Key] = {}
    for key, rank in sorted(ranks.items(), key=lambda item: (not item[1].up, len(item[1].rank), item[1].rank)):
        first.setdefault((rank.job_name, rank.run_id), key)
    return set(first.values())


def _by_family(parts: Iterable[FamilyLines]) -> Iterator[str]:
    """Yield the text of each family, in the order of their first lines."""
    families: dict[str, list[str]] = {}
    for heading, lines in parts:
        text = families.get(heading.family)
        if text is None:
            text = families[heading.family] = [heading.text]
        text.append(lines)
    for text in families.values():
        yield from text
        yield "\n"
