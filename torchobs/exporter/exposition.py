"""The page's families: what the ranks' files hold, what the exporter says of the ranks, what it says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import Kind
from torchobs.exporter import described, labels
from torchobs.exporter.encoder import header, number, prefix
from torchobs.exporter.exemplars import NONE
from torchobs.exporter.gauges import Gauges, is_gauge
from torchobs.exporter.limits import Limits
from torchobs.exporter.names import Family, Names, family_of, sample_name
from torchobs.exporter.series import Labelled, Lines, label

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torchobs.catalog import Metric
    from torchobs.exporter.described import Facts, Said
    from torchobs.exporter.encoder import Style
    from torchobs.exporter.exemplars import Shown
    from torchobs.exporter.scan import Rank
    from torchobs.flight.points import Block, Value
    from torchobs.flight.series import Series

_TYPES = {Kind.COUNTER: "counter", Kind.GAUGE: "gauge", Kind.UPDOWN: "gauge", Kind.HISTOGRAM: "histogram"}
_OM_UNITS = {"s": "seconds", "By": "bytes"}


class Exposition:
    """Writes the page. One thread at a time."""

    def __init__(
        self, others: Iterable[str] = (), *, limits: Limits | None = None, created: bool = False, host: bool = False
    ) -> None:
        """``others`` are sample names that the page has from elsewhere; ``created`` adds ``_created`` samples.

        ``host``: the machine's own metrics are to be on it.
        """
        self._names = Names(others, host=host)
        self._limits, self._created = limits or Limits(), created
        self._ranks: dict[tuple[int, str], _RankSeries] = {}

    def families(self, facts: Facts, style: Style) -> Iterator[str]:
        """Yield every family as text, each family once."""
        page = _Page(style)
        served = {(rank.opened, rank.rank): rank for rank in facts.snapshot.ranks}
        self._forget(served.keys())
        for key, rank in served.items():
            known = self._ranks.get(key)
            if known is None:
                known = self._ranks[key] = _RankSeries(rank, self._names, self._limits)
            for said in described.of_rank(rank):
                page.put(said.metric, known.prefix(style, said), said.value)
            known.add_to(page, rank, created=self._created)
        for said in described.of_exporter(facts, self._limits.dropped):
            page.add(said.metric, said.attributes, said.value)
        for said in facts.host.said if facts.host is not None else ():
            page.add(said.metric, said.attributes, said.value)
        return page.families()

    def _forget(self, served: Iterable[tuple[int, str]]) -> None:
        gone = self._ranks.keys() - set(served)
        left = [self._ranks.pop(key) for key in gone]
        if gone:
            if self._give_back(left):  # all of them anew: whoever came last had to stay outside
                self._give_back(self._ranks.values())
                self._ranks.clear()
            self._names.keep({entry.family for known in self._ranks.values() for entry in known.entries()})

    def _give_back(self, ranks: Collection[_RankSeries]) -> bool:
        return self._limits.give_back(sum(known.size for known in ranks), sum(known.weight for known in ranks))


class _Text(NamedTuple):
    header: str
    lines: list[str]
    created: list[str]


class _Page:
    """Families in the order of their first sample."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self._families: dict[str, _Text] = {}

    def of(self, family: Family, brief: str) -> _Text:
        """Return the family's text, to be added to."""
        found = self._families.get(family.name)
        if found is None:
            unit = _OM_UNITS.get(family.unit, "")
            unit = unit if family.name.endswith(f"_{unit}") else ""
            first = header(self.style, family.name, _TYPES[family.kind], unit, labels.text(brief))
            created = header(self.style, f"{family.name}_created", "gauge", "", labels.text(brief))
            found = self._families[family.name] = _Text(first, [], [] if self.style.openmetrics else [created])
        return found

    def add(self, metric: Metric, own: Mapping[str, str], value: float) -> None:
        """Add one sample of a metric of the catalog."""
        family = family_of(metric.name, metric.kind, metric.unit)
        line = f"{prefix(self.style, sample_name(family), labels.of_catalog(own))}{number(value)}\n"
        self.of(family, metric.brief).lines.append(line)

    def put(self, metric: Metric, prefix: str, value: float) -> None:
        """Add one sample of a metric of the catalog, whose line is made up to its value."""
        family = family_of(metric.name, metric.kind, metric.unit)
        self.of(family, metric.brief).lines.append(f"{prefix}{number(value)}\n")

    def families(self) -> Iterator[str]:
        """Yield them. The classic format has ``_created`` as families of their own, behind those that they belong to."""
        for text in self._families.values():
            yield text.header
            yield from text.lines
            if len(text.created) > 1:
                yield from text.created


class _Chunk(NamedTuple):
    """The lines that a rank has of a family."""

    family: Family
    brief: str
    lines: str
    created: str


class _BlockText:
    """What a rank's page has of one value block, in one style and state: written again only when the block has changed."""

    def __init__(self, series: tuple[Series, ...], entries: Iterable[Labelled | None], style: Style, *, up: bool) -> None:
        self.series, self.style, self.up = series, style, up
        self._written: tuple[Block, Shown, list[_Chunk]] | None = None
        served = [(index, entry) for index, entry in enumerate(entries) if entry is not None and (up or entry.survives)]
        self._samples: dict[Family, tuple[str, list[str], list[str]]] = {}
        for _, entry in served:
            self._samples.setdefault(entry.family, (entry.brief, [], []))
        mixed = {entry.family for index, entry in served if not is_gauge(series[index])}
        self._rows = [self._row(index, entry) for index, entry in served if entry.family in mixed]
        self._gauges = [*self._columns([(index, entry) for index, entry in served if entry.family not in mixed])]

    def _columns(self, served: Sequence[tuple[int, Labelled]]) -> Iterator[tuple[Gauges, list[str]]]:
        """Yield the gauges of each family, and where their lines go."""
        by_family: dict[Family, list[tuple[int, str]]] = {}
        for index, entry in served:
            by_family.setdefault(entry.family, []).append((index, Lines(entry, self.style).plain))
        return ((Gauges(rows), self._samples[family][1]) for family, rows in by_family.items())

    def _row(self, index: int, entry: Labelled) -> tuple[int, str, Lines, list[str], list[str]]:
        lines = Lines(entry, self.style)
        _, samples, created = self._samples[entry.family]
        return index, lines.plain, lines, samples, samples if self.style.openmetrics else created

    def chunks(self, block: Block, shown: Shown, born_s: float | None) -> list[_Chunk]:
        """Return the lines by family. ``born_s``: when everything began to count, if that shall be said."""
        if self._written is None or self._written[0] is not block or self._written[1] is not shown:
            self._written = block, shown, self._write(block.values, shown, born_s)
        return self._written[2]

    def _write(self, values: Sequence[Value | None], shown: Shown, born_s: float | None) -> list[_Chunk]:
        for index, plain, lines, samples, created in self._rows:
            value = values[index]
            if value is None:
                continue
            text = f"{plain}{number(value)}\n" if plain and value.__class__ is float else lines.of(value, shown)
            if text:
                samples.append(text)
                if born_s is not None:
                    created.append(lines.created(born_s))
        for gauges, samples in self._gauges:
            if text := gauges.text(values):
                samples.append(text)
        chunks = [_Chunk(family, brief, "".join(a), "".join(b)) for family, (brief, a, b) in self._samples.items() if a]
        for _, samples, created in self._samples.values():
            samples.clear()
            created.clear()
        return chunks


class _RankSeries:
    """The labelled series of one rank."""

    def __init__(self, rank: Rank, names: Names, limits: Limits) -> None:
        self.identity = dict(zip(labels.IDENTITY, (rank.job_name, rank.run_id, rank.rank), strict=True))
        self._names, self._limits = names, limits
        self._entries: dict[int, Labelled | None] = {}
        self._taken: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        self._texts: dict[tuple[Style, int], _BlockText] = {}
        self._kept: dict[int, Series] = {}
        self._prefixes: dict[tuple[object, ...], str] = {}
        self.weight = 0
        """bytes that the lines take"""

    @property
    def size(self) -> int:
        """How many series are on the page."""
        return len(self._taken)

    def entries(self) -> Iterator[Labelled]:
        """Yield what is on the page."""
        return (entry for entry in self._entries.values() if entry is not None)

    def prefix(self, style: Style, said: Said) -> str:
        """Return the line of what the exporter says of the rank, up to its value; it is the same at every scrape."""
        key = style, said.metric.name, *said.attributes.values()
        found = self._prefixes.get(key)
        if found is None:
            name = sample_name(family_of(said.metric.name, said.metric.kind, said.metric.unit))
            found = self._prefixes[key] = prefix(style, name, {**said.attributes, **self.identity})
        return found

    def add_to(self, page: _Page, rank: Rank, *, created: bool) -> None:
        """Add the lines of every series that the rank's state lets it show."""
        born_s = rank.view.header.wall_ns / 1e9 if created else None
        for index, block in enumerate(rank.view.blocks):
            text = self._texts.get((page.style, index))
            if text is None or text.series is not block.series or text.up != rank.up:
                entries = [self._entries[id(one)] if id(one) in self._entries else self._enter(one) for one in block.series]
                text = self._texts[page.style, index] = _BlockText(block.series, entries, page.style, up=rank.up)
            for chunk in text.chunks(block, NONE if index else rank.exemplars, born_s):
                family = page.of(chunk.family, chunk.brief)
                family.lines.append(chunk.lines)
                if chunk.created:
                    family.created.append(chunk.created)

    def _enter(self, series: Series) -> Labelled | None:
        self._kept[id(series)] = series  # or another could get its id
        entry = self._place(series)
        self._entries[id(series)] = entry
        return entry

    def _place(self, series: Series) -> Labelled | None:
        if not self._limits.admits(series, self.size):
            return None
        family = self._names.claim(series)
        if family is not None:
            entry = label(series, family, self.identity)
            key = family.name, tuple(sorted(entry.labels.items()))
            if key not in self._taken:
                if not (size := self._limits.fits(entry)):
                    return None
                self.weight += size
                self._taken.add(key)
                self._limits.taken += 1
                return entry
        self._limits.dropped["conflict"] += 1
        return None
