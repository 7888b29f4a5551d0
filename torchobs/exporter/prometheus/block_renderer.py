"""Render the series of one value block of a rank. Each line's prefix is cached; numbers are formatted in bulk per page."""

from __future__ import annotations

from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import Kind
from torchobs.exporter.prometheus.float_format import numbers
from torchobs.exporter.prometheus.line_template import LineRange, weave
from torchobs.exporter.prometheus.series_lines import Lines
from torchobs.flight.format.series import ValueType
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks import exemplars

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torchobs.exporter.prometheus.line_template import Chunk
    from torchobs.exporter.prometheus.name_registry import Family
    from torchobs.exporter.prometheus.quiet_series import QuietSeries
    from torchobs.exporter.prometheus.series_lines import Labelled
    from torchobs.exporter.prometheus.text_format import Style
    from torchobs.flight.format.series import Series
    from torchobs.flight.reader.decode import DecodedBlock, Value
    from torchobs.ranks.exemplars import Shown


def is_gauge(series: Series) -> bool:
    """Return True if a series is a gauge whose values are floats, or absent."""
    return series.kind is Kind.GAUGE and series.value_type == ValueType.FLOAT


class _Row(NamedTuple):
    """A series that is no gauge. ``at``: its index in the block."""

    at: int
    family: Family
    lines: Lines
    quiet: Labelled | None
    """the series, if it is quiet"""


class _Plan(NamedTuple):
    """The line layout while the same series have a value. ``starts``: the first line of each row."""

    pick: Callable[[Sequence[Value | None]], tuple[float, ...]]
    prefixes: list[str]
    starts: list[int]
    spans: list[LineRange]
    tails: list[tuple[int, str]]
    """text after a line's number, by line"""


class BlockRenderer:
    """Renders a value block in one style and one state of the rank; again only when the block has changed.

    Nearly every series is a gauge of floats; their values are picked from the block without a check of each. The other series
    are rows, with a line for each number of the value; the row of a quiet series may be empty.
    """

    def __init__(
        self,
        series: tuple[Series, ...],
        entries: Iterable[Labelled | None],
        style: Style,
        quiet: QuietSeries,
        *,
        up: bool,
        shared: bool = True,
        born_s: float | None = None,
    ) -> None:
        """``shared``: include the metrics that ranks share; ``born_s``: start of the counters, if ``_created`` is wanted."""
        self.series, self.up, self.shared, self._quiet, self._held = series, up, shared, quiet, False
        self._openmetrics, self._born_s = style.openmetrics, born_s
        self._written: tuple[DecodedBlock, Shown, list[Chunk]] | None = None
        self._shape: tuple[Collection[int], Sequence[int]] | None = None
        self._noted: tuple[Shown, list[tuple[int, int, str]]] = (exemplars.NONE, [])
        served = [
            (index, entry)
            for index, entry in enumerate(entries)
            if entry is not None and (up or entry.survives) and (shared or not entry.shared)
        ]
        self._families: dict[str, tuple[int, str]] = {}
        """position on the page, and brief, of each family by its name"""
        for index, entry in served:
            self._families.setdefault(entry.family.name, (index, entry.brief))
        served.sort(key=lambda one: self._families[one[1].family.name][0])
        mixed = {entry.family.name for index, entry in served if entry.quiet is not None or not is_gauge(series[index])}
        self._rows = [
            _Row(index, entry.family, Lines(entry, style), entry if entry.quiet is not None else None)
            for index, entry in served
            if entry.family.name in mixed
        ]
        gauges = [(index, entry) for index, entry in served if entry.family.name not in mixed]
        self._indices, self._of = [index for index, _ in gauges], [entry.family for _, entry in gauges]
        self._prefixes = [Lines(entry, style).prefixes[0] for _, entry in gauges]

    def chunks(self, block: DecodedBlock, shown: Shown) -> list[Chunk]:
        """Return the lines by family."""
        if self._held or self._written is None or self._written[0] is not block or self._written[1] is not shown:
            self._written = block, shown, self._write(block, shown)
        return self._written[2]

    def _write(self, block: DecodedBlock, shown: Shown) -> list[Chunk]:
        values = block.values
        held, quiet = self._quiet.holding, self._quiet
        quiet.holding = False
        found = [
            row.lines.numbers(values[row.at])
            if row.quiet is None
            else quiet.numbers(row.quiet, row.lines.numbers(values[row.at]))
            for row in self._rows
        ]
        self._held, quiet.holding = quiet.holding, held or quiet.holding
        shape = () if block.whole else [index for index in self._indices if values[index] is None], [*map(len, found)]
        if shape != self._shape:
            self._plan, self._shape = self._planned(*shape), shape
        plan = self._plan
        texts = numbers([*plan.pick(values), *chain.from_iterable(found)])
        if shown and self._openmetrics:
            for row, bucket, text in self._exemplars(shown):
                value = values[self._rows[row].at]
                if isinstance(value, Distribution) and value.counts[bucket]:  # a span can precede the fold of its step
                    texts[plan.starts[row] + bucket] += text
        for line, text in plan.tails:
            texts[line] += text
        return weave(plan.prefixes, texts, plan.spans)

    def _planned(self, absent: Collection[int], lengths: Sequence[int]) -> _Plan:
        """Return the plan for a block in which the gauges ``absent`` have no value and the rows have ``lengths`` numbers."""
        hidden = frozenset(absent)
        there = [place for place, index in enumerate(self._indices) if index not in hidden]
        prefixes, of = [self._prefixes[place] for place in there], [self._of[place] for place in there]
        starts, created = list[int](), dict[int, str]()
        for row, length in zip(self._rows, lengths, strict=True):
            starts.append(len(prefixes))
            prefixes += row.lines.prefixes[:length]
            of += [row.family] * length
            if self._born_s is not None and length:
                created[len(prefixes) - 1] = row.lines.created(self._born_s)
        spans = sorted(
            self._spans(of, {} if self._openmetrics else created), key=lambda span: self._families[span.family.name][0]
        )
        pick = _picking([self._indices[place] for place in there])
        return _Plan(pick, prefixes, starts, spans, [*created.items()] if self._openmetrics else [])

    def _spans(self, of: Sequence[Family], created: dict[int, str]) -> Iterable[LineRange]:
        """Yield the range of each family's lines, given the family of each line."""
        begin = 0
        for family, lines in groupby(of):
            end = begin + sum(1 for _ in lines)
            apart = "".join(text for line, text in created.items() if begin <= line < end)
            yield LineRange(family, self._families[family.name][1], begin, end, apart)
            begin = end

    def _exemplars(self, shown: Shown) -> list[tuple[int, int, str]]:
        """Return the row, the bucket and the text of each exemplar."""
        if shown is not self._noted[0]:
            by_row = ((number, row.lines.exemplars(shown)) for number, row in enumerate(self._rows))
            self._noted = shown, [(number, bucket, text) for number, found in by_row for bucket, text in found]
        return self._noted[1]


def _picking(indices: Sequence[int]) -> Callable[[Sequence[Value | None]], tuple[float, ...]]:
    """Return a function that picks the values at ``indices``."""
    if len(indices) < 2:  # noqa: PLR2004  # an itemgetter of one index returns no tuple
        return lambda values: tuple(values[index] for index in indices)  # type: ignore[misc]  # all are gauges with a value
    return itemgetter(*indices)
