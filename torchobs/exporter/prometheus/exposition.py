"""The page's text in one pass over a snapshot: its ranks, the series of each, their lines, and the lines of each family."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from torchobs.exporter import exporter_metrics
from torchobs.exporter.prometheus.line_renderer import BlockRenderer, SampleRenderer
from torchobs.exporter.prometheus.name_registry import NameRegistry
from torchobs.exporter.prometheus.rank_series import QuietSeries, RankSeries, SeriesLimits
from torchobs.ranks import labels
from torchobs.ranks.exemplars import NONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torchobs.exporter.exporter_metrics import ScrapeInput
    from torchobs.exporter.prometheus.line_renderer import FamilyLines
    from torchobs.exporter.prometheus.text_format import Heading, Style
    from torchobs.flight.format.series import Series
    from torchobs.ranks.snapshot import Rank

_Key = tuple[int, str]
"""A rank: the number of its file's opening, and its label"""


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
        self._ranks: dict[_Key, _RankLines] = {}
        self._own: dict[Style, SampleRenderer] = {}
        self.is_holding = False
        """whether the last page shows a counter at 0 that has counted already (``QuietSeries``)"""

    def families(self, scrape: ScrapeInput, style: Style, acknowledged: int = 0) -> Iterator[str]:
        """Yield the text of every family, each family once.

        ``acknowledged``: number of a snapshot; every expected scraper has received its page or a newer one.
        """
        return _by_family(chain.from_iterable(self._lines(scrape, style, acknowledged)))

    def _lines(self, scrape: ScrapeInput, style: Style, acknowledged: int) -> Iterator[Iterable[FamilyLines]]:
        """Yield the lines of each rank, then those of the exporter's and the machine's metrics."""
        number, ranks = scrape.snapshot.number, {(rank.opened, rank.rank): rank for rank in scrape.snapshot.ranks}
        self._forget_all_but(ranks)
        sharing, self.is_holding = _first_ranks(ranks), False
        for key, rank in ranks.items():
            if key not in self._ranks:
                series = RankSeries(rank, self._names, self._limits)
                self._ranks[key] = _RankLines(rank, series, QuietSeries(number), created=self._created)
            known = self._ranks[key]
            known.quiet.begin(number, acknowledged)
            yield known.of_exporter(rank, style)
            yield from known.of_blocks(rank, style, shared=key in sharing)
            self.is_holding |= known.is_holding
        if style not in self._own:
            self._own[style] = SampleRenderer(style, labels.of_catalog)
        machine = scrape.host.said if scrape.host else ()
        yield self._own[style].lines([*exporter_metrics.of_exporter(scrape, self._limits.dropped), *machine])

    def _forget_all_but(self, served: Mapping[_Key, Rank]) -> None:
        gone = [self._ranks.pop(key) for key in self._ranks.keys() - served.keys()]
        if not gone:
            return
        if self._limits.give_back(sum(one.series.lines for one in gone)):  # the latest ranks had found no room: place all again
            self._limits.give_back(sum(one.series.lines for one in self._ranks.values()))
            for one in self._ranks.values():
                one.clear()
        self._names.keep({entry.family for one in self._ranks.values() for entry in one.series.entries()})


def _first_ranks(ranks: Mapping[_Key, Rank]) -> set[_Key]:
    """Return for each run the rank that shows the metrics all ranks share: the first living one, else the first."""
    first: dict[tuple[str, str], _Key] = {}
    for key, rank in sorted(ranks.items(), key=lambda one: (not one[1].up, len(one[1].rank), one[1].rank)):
        first.setdefault((rank.job_name, rank.run_id), key)
    return set(first.values())


class _RankLines:
    """The lines of one rank, by its renderers for each style."""

    def __init__(self, rank: Rank, series: RankSeries, quiet: QuietSeries, *, created: bool) -> None:
        self.series, self.quiet = series, quiet
        self._born_s = rank.view.header.wall_ns / 1e9 if created else None
        self._own: dict[Style, SampleRenderer] = {}
        self._blocks: dict[tuple[Style, int], _Block] = {}
        self.is_holding = False
        """whether the last page shows a counter of the rank at 0 that has counted"""

    def clear(self) -> None:
        """Decide anew about all series."""
        self.series.clear()
        self._blocks.clear()

    def of_exporter(self, rank: Rank, style: Style) -> list[FamilyLines]:
        """Return the lines of the exporter's own metrics of the rank."""
        if style not in self._own:
            self._own[style] = SampleRenderer(style, lambda own: {**own, **self.series.identity})
        return self._own[style].lines([*exporter_metrics.of_rank(rank)])

    def of_blocks(self, rank: Rank, style: Style, *, shared: bool) -> Iterator[list[FamilyLines]]:
        """Yield the lines of each value block; ``shared``: include metrics that ranks share."""
        self.is_holding = False
        for index, block in enumerate(rank.view.blocks):
            known = self._blocks.get((style, index))
            if known is None or known.series is not block.series or (known.up, known.shared) != (rank.up, shared):
                shown = self.series.select(block.series, up=rank.up, shared=shared)
                renderer = BlockRenderer(shown, style, self.quiet, born_s=self._born_s)
                known = self._blocks[style, index] = _Block(block.series, rank.up, shared, renderer)
            yield known.renderer.lines(block, NONE if index else rank.exemplars)
            self.is_holding |= known.renderer.is_holding


class _Block(NamedTuple):
    """A renderer, and the series and the state of the rank that it is for."""

    series: tuple[Series, ...]
    up: bool
    shared: bool
    renderer: BlockRenderer


class _FamilyText(NamedTuple):
    heading: Heading
    lines: list[str]
    created: list[str]


def _by_family(found: Iterable[FamilyLines]) -> Iterator[str]:
    """Yield the text of each family, in the order of their first lines.

    In the classic format ``_created`` samples are separate families behind their own.
    """
    families: dict[str, _FamilyText] = {}
    for heading, lines, created in found:
        text = families.get(heading.family)
        if text is None:
            text = families[heading.family] = _FamilyText(heading, [], [])
        text.lines.append(lines)
        if created:
            text.created.append(created)
    for heading, all_lines, all_created in families.values():
        yield heading.text
        yield from all_lines
        if all_created:
            yield f"\n{heading.created}"
            yield from all_created
        yield "\n"
