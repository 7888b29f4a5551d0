"""Render the page's metric families: from the ranks' files, the exporter's metrics of each rank, and its own metrics."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import Kind
from torchobs.exporter import exporter_metrics
from torchobs.exporter.prometheus.block_renderer import BlockRenderer
from torchobs.exporter.prometheus.name_registry import NameRegistry
from torchobs.exporter.prometheus.quiet_series import QuietSeries
from torchobs.exporter.prometheus.sample_renderer import SampleRenderer
from torchobs.exporter.prometheus.series_limits import SeriesLimits
from torchobs.exporter.prometheus.series_lines import label
from torchobs.exporter.prometheus.text_format import header
from torchobs.ranks import labels
from torchobs.ranks.exemplars import NONE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from torchobs.exporter.exporter_metrics import ScrapeInput
    from torchobs.exporter.prometheus.line_template import Chunk
    from torchobs.exporter.prometheus.name_registry import Family
    from torchobs.exporter.prometheus.series_lines import Labelled
    from torchobs.exporter.prometheus.text_format import Style
    from torchobs.flight.format.series import Series
    from torchobs.ranks.snapshot import Rank

_TYPES = {Kind.COUNTER: "counter", Kind.GAUGE: "gauge", Kind.UPDOWN: "gauge", Kind.HISTOGRAM: "histogram"}
_OM_UNITS = {"s": "seconds", "By": "bytes"}


class Exposition:
    """Renders the page. To be used by one thread at a time."""

    def __init__(
        self, others: Iterable[str] = (), *, limits: SeriesLimits | None = None, created: bool = False, host: bool = False
    ) -> None:
        """``others``: sample names that others add to the page; ``created``: add ``_created`` samples.

        ``host``: include the machine's metrics.
        """
        self._names = NameRegistry(others, host=host)
        self._limits, self._created = limits or SeriesLimits(), created
        self._ranks: dict[tuple[int, str], _RankSeries] = {}
        self._own: dict[Style, SampleRenderer] = {}
        self._heads: dict[Style, dict[str, _Head]] = {}
        self.holding = False
        """whether the last page shows a counter at 0 that has counted already (``quiet_series``)"""

    def families(self, facts: ScrapeInput, style: Style, acknowledged: int = 0) -> Iterator[str]:
        """Yield the text of every family, each family once.

        ``acknowledged``: number of a snapshot; every expected scraper has received its page or a newer one.
        """
        served = {(rank.opened, rank.rank): rank for rank in facts.snapshot.ranks}
        self._forget(served.keys())
        page = _Page(style, self._heads.setdefault(style, {}))
        speakers, self.holding = _speakers(served), False
        for key, rank in served.items():
            known = self._ranks.get(key)
            if known is None:
                known = self._ranks[key] = _RankSeries(rank, self._names, self._limits, created=self._created)
            page.add(known.exporter_chunks(rank, style))
            known.quiet.begin(facts.snapshot.number, acknowledged)
            for chunks in known.chunks(rank, style, shared=key in speakers):
                page.add(chunks)
            known.quiet.end()
            self.holding = self.holding or known.quiet.holding
        own = self._own.get(style)
        if own is None:
            own = self._own[style] = SampleRenderer(style, labels.of_catalog)
        page.add(
            own.chunks([*exporter_metrics.of_exporter(facts, self._limits.dropped), *(facts.host.said if facts.host else ())])
        )
        return page.families()

    def _forget(self, served: Iterable[tuple[int, str]]) -> None:
        gone = self._ranks.keys() - set(served)
        left = [self._ranks.pop(key) for key in gone]
        if gone:
            if self._give_back(left):  # place all again: the latest ranks had found no room
                self._give_back(self._ranks.values())
                for known in self._ranks.values():
                    known.clear()
            self._names.keep({entry.family for known in self._ranks.values() for entry in known.entries()})
            self._heads.clear()  # which hold names of families that are gone

    def _give_back(self, ranks: Collection[_RankSeries]) -> bool:
        return self._limits.give_back(sum(known.lines for known in ranks))


def _speakers(served: Mapping[tuple[int, str], Rank]) -> set[tuple[int, str]]:
    """Return for each run the rank that shows the metrics all ranks share: the first living one, else the first."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for key, rank in sorted(served.items(), key=lambda one: (not one[1].up, len(one[1].rank), one[1].rank)):
        first.setdefault((rank.job_name, rank.run_id), key)
    return set(first.values())


class _Head(NamedTuple):
    """A family's header lines, and those of its ``_created`` samples if these form a family of their own."""

    family: Family
    brief: str
    text: str
    created: str


class _Text(NamedTuple):
    head: _Head
    lines: list[str]
    created: list[str]


class _Page:
    """The families of one page, in the order of their first sample."""

    def __init__(self, style: Style, heads: dict[str, _Head]) -> None:
        """``heads``: cache of header lines, extended here."""
        self._style, self._heads = style, heads
        self._families: dict[str, _Text] = {}

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Add lines to their families."""
        families = self._families
        for family, brief, lines, created in chunks:
            text = families.get(family.name)
            if text is None:
                text = families[family.name] = _Text(self._head(family, brief), [], [])
            text.lines.append(lines)
            if created:
                text.created.append(created)

    def families(self) -> Iterator[str]:
        """Yield the families' texts. In the classic format ``_created`` samples are separate families behind their own."""
        for text in self._families.values():
            yield text.head.text
            yield from text.lines
            if text.created:
                yield f"\n{text.head.created}"
                yield from text.created
            yield "\n"

    def _head(self, family: Family, brief: str) -> _Head:
        known = self._heads.get(family.name)
        if known is None or known.family != family or known.brief != brief:
            unit = _OM_UNITS.get(family.unit, "")
            unit = unit if family.name.endswith(f"_{unit}") else ""
            escaped = labels.text(brief)
            text = header(self._style, family.name, _TYPES[family.kind], unit, escaped)
            created = header(self._style, f"{family.name}_created", "gauge", "", escaped)
            known = self._heads[family.name] = _Head(family, brief, text, created)
        return known


class _RankSeries:
    """The labelled series of one rank."""

    def __init__(self, rank: Rank, names: NameRegistry, limits: SeriesLimits, *, created: bool) -> None:
        self.identity = dict(zip(labels.IDENTITY, (rank.job_name, rank.run_id, rank.rank), strict=True))
        self._names, self._limits = names, limits
        self._born_s = rank.view.header.wall_ns / 1e9 if created else None
        self._entries: dict[int, Labelled | None] = {}
        self._taken: set[tuple[str, ...]] = set()
        """name and labels of each series on the page, to detect duplicates"""
        self._texts: dict[tuple[Style, int], BlockRenderer] = {}
        self._kept: dict[int, Series] = {}
        self._said: dict[Style, SampleRenderer] = {}
        self._counted: set[int] = set()
        self.quiet = QuietSeries()
        self.lines = 0
        """number of their lines"""

    @property
    def size(self) -> int:
        """Number of series on the page."""
        return len(self._taken)

    def entries(self) -> Iterator[Labelled]:
        """Yield the series on the page."""
        return (entry for entry in self._entries.values() if entry is not None)

    def clear(self) -> None:
        """Take all series off the page, to be placed again; the count of dropped series stays."""
        self._counted.update(one for one, entry in self._entries.items() if entry is None)
        for placed in (self._entries, self._taken, self._texts):
            placed.clear()
        self.lines = 0

    def exporter_chunks(self, rank: Rank, style: Style) -> list[Chunk]:
        """Return the lines of the exporter's own metrics of the rank."""
        text = self._said.get(style)
        if text is None:
            text = self._said[style] = SampleRenderer(style, lambda own: {**own, **self.identity})
        return text.chunks([*exporter_metrics.of_rank(rank)])

    def chunks(self, rank: Rank, style: Style, *, shared: bool) -> Iterator[list[Chunk]]:
        """Yield the lines of every series shown in the rank's state; ``shared``: include metrics that ranks share."""
        for index, block in enumerate(rank.view.blocks):
            text = self._texts.get((style, index))
            if text is None or text.series is not block.series or text.up != rank.up or text.shared != shared:
                entries = [self._entries[id(one)] if id(one) in self._entries else self._enter(one) for one in block.series]
                text = self._texts[style, index] = BlockRenderer(
                    block.series, entries, style, self.quiet, up=rank.up, shared=shared, born_s=self._born_s
                )
            yield text.chunks(block, NONE if index else rank.exemplars)

    def _enter(self, series: Series) -> Labelled | None:
        self._kept[id(series)] = series  # keeps it alive, so that no other object gets its id
        placed = self._place(series)
        if isinstance(placed, str) and id(series) not in self._counted:
            self._limits.dropped[placed] += 1
        entry = self._entries[id(series)] = None if isinstance(placed, str) else placed
        return entry

    def _place(self, series: Series) -> Labelled | str:
        """Return the series with its labels, or the reason why it is not on the page."""
        if (reason := self._limits.refusal(series, self.size)) is not None:
            return reason
        family = self._names.claim(series)
        if family is not None:
            entry = label(series, family, self.identity)
            key = family.name, *chain.from_iterable(sorted(entry.labels.items()))  # one flat tuple: pairs take 240 bytes more
            if key not in self._taken:
                if not (lines := self._limits.take(entry)):
                    return "total_limit"
                self.lines += lines
                self._taken.add(key)
                return entry
        return "conflict"
