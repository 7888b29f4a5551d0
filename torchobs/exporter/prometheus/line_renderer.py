"""Render lines of the page. A line's text up to its number is cached; the numbers are formatted in bulk for each page."""

from __future__ import annotations

from itertools import accumulate, chain, groupby
from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.catalog import Kind, cumulative
from torchobs.exporter.prometheus.name_registry import family_of, sample_name
from torchobs.exporter.prometheus.text_format import exemplar, heading, number, numbers, prefix
from torchobs.flight.format.series import ValueType
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks import exemplars as exemplars_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torchobs.catalog import Metric
    from torchobs.exporter.exporter_metrics import Sample
    from torchobs.exporter.prometheus.rank_series import LabelledSeries, QuietSeries
    from torchobs.exporter.prometheus.text_format import Heading, Style
    from torchobs.flight.format.series import Series
    from torchobs.flight.reader.decode import DecodedBlock, Value
    from torchobs.ranks.exemplars import Shown


class FamilyLines(NamedTuple):
    """Some of a family's lines, each preceded by its line break."""

    heading: Heading
    lines: str
    created: str = ""
    """lines of the ``_created`` family that the classic format has"""


class LineTemplate:
    """Lines without their numbers, given each line's family and its text up to the number."""

    def __init__(self, headings: Iterable[Heading], prefixes: Sequence[str]) -> None:
        self._prefixes = prefixes
        self.ranges: list[tuple[Heading, int, int]] = []
        """consecutive lines of one family: the first, and the one after the last"""
        end = 0
        for family, lines in groupby(headings):
            begin, end = end, end + sum(1 for _ in lines)
            self.ranges.append((family, begin, end))

    def fill(self, texts: Sequence[str]) -> list[FamilyLines]:
        """Return the lines, given the number of each."""
        parts = [""] * (2 * len(texts))
        parts[::2], parts[1::2] = self._prefixes, texts
        return [FamilyLines(family, "".join(parts[2 * begin : 2 * end])) for family, begin, end in self.ranges]


class SampleRenderer:
    """Renders samples that the exporter itself produces, in one style."""

    def __init__(self, style: Style, labels_of: Callable[[Mapping[str, str]], Mapping[str, str]]) -> None:
        """``labels_of`` returns the labels for a sample's attributes."""
        self._style, self._labels_of = style, labels_of
        self._series: list[tuple[Metric, Mapping[str, str]]] = []
        self._order: list[int] = []
        self._template = LineTemplate((), ())

    def lines(self, samples: Sequence[Sample]) -> list[FamilyLines]:
        """Return the lines by family, in the order of the families' first samples."""
        series = [(one.metric, one.attributes) for one in samples]
        if series != self._series:
            self._series, self._template = series, self._plan(series)
        return self._template.fill(numbers([float(samples[index].value) for index in self._order]))

    def _plan(self, series: Sequence[tuple[Metric, Mapping[str, str]]]) -> LineTemplate:
        first: dict[str, int] = {}
        for index, (metric, _) in enumerate(series):
            first.setdefault(metric.name, index)
        self._order = sorted(range(len(series)), key=lambda index: first[series[index][0].name])
        headings: list[Heading] = []
        prefixes: list[str] = []
        for metric, attributes in (series[index] for index in self._order):
            family = family_of(metric.name, metric.kind, metric.unit)
            headings.append(heading(self._style, family, metric.brief))
            prefixes.append(prefix(self._style, sample_name(family), self._labels_of(attributes)))
        return LineTemplate(headings, prefixes)


def is_gauge(series: Series) -> bool:
    """Return True if a series is a gauge whose values are floats, or absent."""
    return series.kind is Kind.GAUGE and series.value_type == ValueType.FLOAT


class SeriesLines:
    """The lines of one series in one style."""

    __slots__ = ("_entry", "_prefixes", "_style")

    def __init__(self, entry: LabelledSeries, style: Style) -> None:
        self._entry, self._style = entry, style
        self._prefixes: list[str] = []

    @property
    def prefixes(self) -> Sequence[str]:
        """The lines up to their numbers; made when they are needed, for most quiet series never are."""
        entry, style, name = self._entry, self._style, self._entry.family.name
        if not self._prefixes and entry.buckets:
            self._prefixes = [prefix(style, f"{name}_bucket", own) for own in entry.buckets]
            self._prefixes += [prefix(style, f"{name}{suffix}", entry.labels) for suffix in ("_count", "_sum")]
        elif not self._prefixes:
            self._prefixes = [prefix(style, sample_name(entry.family), entry.labels)]
        return self._prefixes

    def numbers(self, value: Value | None) -> Sequence[float]:
        """Return the numbers of the first lines; none for values that a page cannot show (not finite, a negative counter)."""
        entry = self._entry
        if isinstance(value, Distribution):
            return self._of_histogram(value) if entry.buckets else ()
        if value is None or entry.buckets or not isfinite(value) or (value < 0 and entry.series.kind is Kind.COUNTER):
            return ()
        return (float(value),)

    def _of_histogram(self, value: Distribution) -> Sequence[float]:
        totals, bounds = [*map(float, accumulate(value.counts))], self._entry.series.bounds
        # with negative values the sum is not monotonic, and OpenMetrics then forbids both sum and count
        return totals if value.sum < 0 or (bounds and bounds[0] < 0) else [*totals, totals[-1], value.sum]

    def created(self, born_s: float) -> str:
        """Return the ``_created`` line of a counter or histogram, empty for others."""
        name, entry = f"{self._entry.family.name}_created", self._entry
        return f"{prefix(self._style, name, entry.labels)}{number(born_s)}" if cumulative(entry.series.kind) else ""

    def exemplars(self, found: Shown) -> list[tuple[int, str]]:
        """Return the exemplars to append to bucket lines, with their line's index."""
        own = exemplars_of.of(self._entry.series, found) if self._entry.buckets else {}
        return [(index, exemplar(one.labels, one.value, one.at_ns)) for index, one in own.items()]


class _Row(NamedTuple):
    """A series that is no gauge. ``in_block``: its index in the block."""

    in_block: int
    heading: Heading
    lines: SeriesLines
    quiet: LabelledSeries | None
    """the series, if it is quiet"""


class _Plan(NamedTuple):
    """The lines while the same series have a value. ``starts``: the first line of each row."""

    pick: Callable[[Sequence[Value | None]], tuple[Any, ...]]
    template: LineTemplate
    starts: list[int]
    created: dict[int, str]
    """``_created`` line of a series, by its last line"""


class BlockRenderer:
    """Renders a value block in one style and one state of the rank; again only when the block has changed.

    Nearly every series is a gauge of floats; their values are picked from the block without a check of each. The other series
    are rows, with a line for each number of the value. The rows of quiet series are hidden at first, two of three in a plain
    training; they are not looked at one by one while all of their values stay the same.
    """

    def __init__(
        self, entries: Sequence[tuple[int, LabelledSeries]], style: Style, quiet: QuietSeries, *, born_s: float | None = None
    ) -> None:
        """``entries``: the series to show, with their index; ``born_s``: start of the counters, if ``_created`` is wanted."""
        self.is_holding = False
        """whether a counter is shown at 0 that has counted"""
        self._quiet, self._openmetrics, self._born_s = quiet, style.openmetrics, born_s
        self._rendered: tuple[DecodedBlock, Shown, list[FamilyLines]] | None = None
        self._shape: tuple[Collection[int], Sequence[int]] | None = None
        self._exemplars: tuple[Shown, list[tuple[int, int, str]]] = (exemplars_of.NONE, [])
        self._positions: dict[str, int] = {}
        """of the families on the page"""
        headings: dict[str, Heading] = {}
        for index, entry in entries:
            if entry.family.name not in headings:
                headings[entry.family.name] = heading(style, entry.family, entry.brief)
                self._positions[entry.family.name] = index
        in_order = sorted(entries, key=lambda one: self._positions[one[1].family.name])
        mixed = {entry.family.name for _, entry in entries if entry.quiet is not None or not is_gauge(entry.series)}
        self._rows = [
            _Row(index, headings[entry.family.name], SeriesLines(entry, style), entry if entry.quiet is not None else None)
            for index, entry in in_order
            if entry.family.name in mixed
        ]
        self._hidden, self._shown = [row for row in self._rows if row.quiet is not None], self._rows
        self._pick_hidden = _picking(())
        self._hidden_values: tuple[Value | None, ...] = ()
        self._revealed = -1
        self._gauges = [
            (index, headings[entry.family.name], prefix(style, entry.family.name, entry.labels))
            for index, entry in in_order
            if entry.family.name not in mixed
        ]

    def lines(self, block: DecodedBlock, exemplars: Shown) -> list[FamilyLines]:
        """Return the lines by family, in the order of the families' first series."""
        known = self._rendered
        if self.is_holding or known is None or known[0] is not block or known[1] is not exemplars:
            known = self._rendered = block, exemplars, self._render(block, exemplars)
        return known[2]

    def _render(self, block: DecodedBlock, exemplars: Shown) -> list[FamilyLines]:
        values, self.is_holding = block.values, False
        if self._pick_hidden(values) != self._hidden_values or self._revealed != self._quiet.revealed:
            self._reveal(values)
        found = [self._numbers(row, values[row.in_block]) for row in self._shown]
        shape = () if block.whole else [index for index, _, _ in self._gauges if values[index] is None], [*map(len, found)]
        if shape != self._shape:
            self._plan, self._shape = self._planned(*shape), shape
        plan = self._plan
        texts = numbers([*plan.pick(values), *chain.from_iterable(found)])
        if exemplars and self._openmetrics:
            for row, bucket, text in self._exemplar_texts(exemplars):
                value = values[self._shown[row].in_block]
                if isinstance(value, Distribution) and value.counts[bucket]:  # a span can precede the fold of its step
                    texts[plan.starts[row] + bucket] += text
        if not plan.created:
            return plan.template.fill(texts)
        return self._with_created(plan, texts)

    def _reveal(self, values: Sequence[Value | None]) -> None:
        """Show the hidden rows that have, or in another style's page have had, another value than the default."""
        self._hidden = [row for row in self._hidden if not self._numbers(row, values[row.in_block])]
        indices = [row.in_block for row in self._hidden]
        hidden = frozenset(indices)
        self._shown = [row for row in self._rows if row.in_block not in hidden]
        self._pick_hidden = _picking(indices)
        self._hidden_values, self._revealed = self._pick_hidden(values), self._quiet.revealed
        self._shape, self._exemplars = None, (exemplars_of.NONE, [])

    def _numbers(self, row: _Row, value: Value | None) -> Sequence[float]:
        found = row.lines.numbers(value)
        if row.quiet is None:
            return found
        shown = self._quiet.shown(row.quiet, found)
        self.is_holding |= bool(shown) and shown is not found
        return shown

    def _with_created(self, plan: _Plan, texts: list[str]) -> list[FamilyLines]:
        """Fill in the numbers and the ``_created`` lines: in OpenMetrics within the family, in the classic format apart."""
        if self._openmetrics:
            for line, text in plan.created.items():
                texts[line] += text
            return plan.template.fill(texts)
        apart = ("".join(plan.created.get(line, "") for line in range(begin, end)) for _, begin, end in plan.template.ranges)
        return [one._replace(created=text) for one, text in zip(plan.template.fill(texts), apart, strict=True)]

    def _planned(self, absent: Collection[int], lengths: Sequence[int]) -> _Plan:
        """Return the plan for a block in which the gauges ``absent`` have no value and the rows have ``lengths`` numbers."""
        hidden = frozenset(absent)
        gauges = [one for one in self._gauges if one[0] not in hidden]
        headings, prefixes = [family for _, family, _ in gauges], [text for _, _, text in gauges]
        starts, created = list[int](), dict[int, str]()
        for row, length in zip(self._shown, lengths, strict=True):
            starts.append(len(prefixes))
            prefixes += row.lines.prefixes[:length]
            headings += [row.heading] * length
            if self._born_s is not None and length:
                created[len(prefixes) - 1] = row.lines.created(self._born_s)
        template = LineTemplate(headings, prefixes)
        template.ranges.sort(key=lambda one: self._positions[one[0].family])
        return _Plan(_picking([index for index, _, _ in gauges]), template, starts, created)

    def _exemplar_texts(self, exemplars: Shown) -> list[tuple[int, int, str]]:
        """Return the row, the bucket and the text of each exemplar."""
        if exemplars is not self._exemplars[0]:
            by_row = ((number, row.lines.exemplars(exemplars)) for number, row in enumerate(self._shown))
            self._exemplars = exemplars, [(number, bucket, text) for number, found in by_row for bucket, text in found]
        return self._exemplars[1]


def _picking(indices: Sequence[int]) -> Callable[[Sequence[Value | None]], tuple[Any, ...]]:
    """Return a function that picks the values at ``indices``."""
    if len(indices) < 2:  # noqa: PLR2004  # an itemgetter of one index returns no tuple
        return lambda values: tuple(values[index] for index in indices)
    return itemgetter(*indices)
