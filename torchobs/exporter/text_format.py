"""Lines and numbers of the metrics page, in OpenMetrics and in the classic text format 0.0.4.

prometheus-client is the tests' reference, and renders its own process metrics; it is five times as slow. Names and labels
consist of legacy characters only, so that they need no escaping scheme. Labels are escaped once, and many numbers are formatted
at a time, for they take most of a page's time: ``repr`` takes 0.8 µs for a float of 17 digits, msgspec 0.08 µs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, groupby
from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from prometheus_client import exposition
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString

from torchobs.catalog import BY_NAME, Kind, cumulative, prometheus_name
from torchobs.flight.reader import Distribution
from torchobs.flight.series import ValueType
from torchobs.ranks import labels as rank_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.registry import Collector

    from torchobs.catalog import Metric
    from torchobs.exporter.exporter_metrics import Sample
    from torchobs.flight.reader import DecodedBlock, Value
    from torchobs.flight.series import Series
    from torchobs.ranks.labels import Shown


END = "# EOF\n"
"""The last line of a page in OpenMetrics."""
_PIECE = 64 * 1024
"""Characters encoded at a time: they stay in the processor's cache until they are compressed."""
_SECOND = 1_000_000_000
_TYPES = {Kind.COUNTER: "counter", Kind.GAUGE: "gauge", Kind.UPDOWN: "gauge", Kind.HISTOGRAM: "histogram"}
_UNITS = {"s": "seconds", "By": "bytes"}


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


@dataclass(slots=True, eq=False)
class LabelledSeries:
    """A series with its family, its labels and its lines. Keeps ``series`` alive, because its ``id`` is a cache key."""

    series: Series
    family: Family
    labels: Mapping[str, str]
    brief: str
    survives: bool
    """whether a dead rank keeps it"""
    quiet: float | None
    shared: bool
    """as in :class:`~torchobs.catalog.Metric`"""
    _prefixes: Sequence[str] = ()

    @property
    def lines(self) -> int:
        """Most lines on the page."""
        return len(self.series.bounds) + 3 if self.series.kind is Kind.HISTOGRAM else 1

    @property
    def prefixes(self) -> Sequence[str]:
        """The lines up to their numbers, made when needed: most quiet series never need them."""
        if not self._prefixes and self.series.kind is Kind.HISTOGRAM:
            name, edges = self.family.name, [*map(_go, self.series.bounds), "+Inf"]
            buckets = [prefix(f"{name}_bucket", {**self.labels, "le": edge}) for edge in edges]
            self._prefixes = (*buckets, *(prefix(f"{name}{suffix}", self.labels) for suffix in ("_count", "_sum")))
        elif not self._prefixes:
            self._prefixes = (prefix(sample_name(self.family), self.labels),)
        return self._prefixes

    def numbers(self, value: Value | None) -> Sequence[float]:
        """Return the numbers of the first lines; none for values that a page cannot show (not finite, a negative counter)."""
        if isinstance(value, Distribution):
            return self._of_histogram(value) if self.series.kind is Kind.HISTOGRAM else ()
        if value is None or self.series.kind is Kind.HISTOGRAM or not isfinite(value):
            return ()
        if value < 0 and self.series.kind is Kind.COUNTER:
            return ()
        return (float(value),)

    def _of_histogram(self, value: Distribution) -> Sequence[float]:
        totals, bounds = [*map(float, accumulate(value.counts))], self.series.bounds
        # with negative values the sum is not monotonic, and OpenMetrics then forbids both sum and count
        return totals if value.sum < 0 or (bounds and bounds[0] < 0) else [*totals, totals[-1], value.sum]

    def exemplars(self, shown: Shown) -> list[tuple[int, str]]:
        """Return the exemplars to append to bucket lines, with their line's index."""
        by_line = rank_labels.exemplars_of(self.series, shown) if self.series.kind is Kind.HISTOGRAM else {}
        return [(index, exemplar(example.labels, example.value, example.at_ns)) for index, example in by_line.items()]


def label(series: Series, family: Family, identity: Mapping[str, str]) -> LabelledSeries:
    """Return a series with its labels; ``identity``: those of its rank."""
    metric = BY_NAME.get(series.name)
    shared = metric is not None and metric.shared
    described = {name: value for name, value in identity.items() if name != "rank"} if shared else identity
    return LabelledSeries(
        series=series,
        family=family,
        labels={**rank_labels.of_attributes(series.attributes), **described},
        brief=metric.brief if metric else series.brief or f"OpenTelemetry instrument {series.name}.",
        survives=cumulative(series.kind) or (metric is not None and metric.survives),
        quiet=metric.quiet if metric is not None else None,
        shared=shared,
    )


class Format(NamedTuple):
    """Format of a page. ``foreign``: prometheus-client's encoder for it."""

    openmetrics: bool
    content_type: str
    foreign: Callable[[Collector], bytes]


TEXT = Format(openmetrics=False, content_type="text/plain; version=0.0.4; charset=utf-8", foreign=exposition.generate_latest)
OPENMETRICS = Format(openmetrics=True, content_type=openmetrics.CONTENT_TYPE_LATEST, foreign=openmetrics.generate_latest)


@lru_cache(64)  # a scraper sends the same header every time
def negotiate(accept: str) -> Format:
    """Return OpenMetrics where an ``Accept`` header has it, as prometheus-client decides, else the classic text format."""
    try:
        _, content_type = exposition.choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is none
        return TEXT
    return OPENMETRICS if content_type.startswith("application/openmetrics-text") else TEXT


class Heading(NamedTuple):
    """A family's header lines, each but the first preceded by its line break."""

    family: str
    text: str


@lru_cache(8192)  # ranks have the same families
def heading(form: Format, family: Family, brief: str) -> Heading:
    """Return a family's header."""
    name, kind, brief = family.name, _TYPES[family.kind], rank_labels.text(brief)
    if not form.openmetrics:
        documentation, sample = brief.replace("\\", r"\\").replace("\n", r"\n"), sample_name(family)
        return Heading(name, f"# HELP {sample} {documentation}\n# TYPE {sample} {kind}")
    unit = _UNITS.get(family.unit)
    lines = f"# HELP {name} {_text(brief)}\n# TYPE {name} {kind}"
    return Heading(name, f"{lines}\n# UNIT {name} {unit}" if unit and name.endswith(f"_{unit}") else lines)


def prefix(name: str, labels: Mapping[str, str]) -> str:
    """Return a sample's line up to its number, preceded by its line break."""
    pairs = ",".join([_pair(label, value) for label, value in sorted(labels.items())])
    return f"\n{name}{{{pairs}}} " if pairs else f"\n{name} "


@lru_cache(2048)  # all series of a rank share three labels, and each layer has several metrics
def _pair(label: str, value: str) -> str:
    return f'{label}="{_text(value)}"'


def exemplar(labels: Mapping[str, str], value: float, at_ns: int) -> str:
    """Return an OpenMetrics exemplar, the text after a bucket's or a counter's value.

    ``at_ns``: time of the observation, Unix ns; a float would lose the last two digits.
    """
    pairs = ",".join(f'{label}="{_text(text)}"' for label, text in sorted(labels.items()))
    return f" # {{{pairs}}} {value!r} {at_ns // _SECOND}.{at_ns % _SECOND:09d}"


def _text(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _go(value: float) -> str:
    """Return a number as Go writes it: a bucket's bound is the same label as other exporters have."""
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # it has no types
    return text


_encode = msgspec.json.Encoder().encode


def numbers(values: Sequence[float]) -> list[str]:
    """Return the texts of floats. No integers: they would have no decimal point."""
    encoded = _encode(values)
    if b"null" in encoded:  # one that is not finite, which JSON lacks
        return [*map(_go, values)]
    return encoded[1:-1].decode().split(",") if values else []


def pieces(form: Format, foreign: bytes, families: Iterable[str]) -> Iterator[bytes]:
    """Yield the page in pieces: prometheus-client's output, followed by the texts of our families."""
    yield foreign.removesuffix(END.encode()) if form.openmetrics else foreign
    waiting, size = list[str](), 0
    for text in families:
        waiting.append(text)
        size += len(text)
        if size >= _PIECE:
            yield "".join(waiting).encode()
            waiting, size = [], 0
    yield "".join([*waiting, END if form.openmetrics else ""]).encode()


class FamilyLines(NamedTuple):
    """Lines of a family, each preceded by its line break."""

    heading: Heading
    lines: str


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
    """Renders samples that the exporter itself produces, in one format."""

    def __init__(self, form: Format, labels_of: Callable[[Mapping[str, str]], Mapping[str, str]]) -> None:
        """``labels_of`` returns the labels for a sample's attributes."""
        self._form, self._labels_of = form, labels_of
        self._series: list[tuple[Metric, Mapping[str, str]]] = []
        self._template = LineTemplate((), ())

    def lines(self, samples: Sequence[Sample]) -> list[FamilyLines]:
        """Return the lines in the order of the samples."""
        series = [(sample.metric, sample.attributes) for sample in samples]
        if series != self._series:
            self._series, self._template = series, LineTemplate(*zip(*map(self._line, samples), strict=True))
        return self._template.fill(numbers([float(sample.value) for sample in samples]))

    def _line(self, sample: Sample) -> tuple[Heading, str]:
        """Return a sample's heading, and its line up to the number."""
        metric = sample.metric
        family = family_of(metric.name, metric.kind, metric.unit)
        return heading(self._form, family, metric.brief), prefix(sample_name(family), self._labels_of(sample.attributes))


_SHOWN = -1
"""Stands for a snapshot's number: every scraper may see the series"""


class QuietSeries:
    """Keeps series of one rank off the page while they have their default value, and has new counts scraped at zero first.

    Most counters of a closed set never count anything in a run: no loss scaler, no compilation, no failed probe. They are in
    the flight file from the start, but on the page only from their first event on. A counter whose first sample is 1 has an
    ``increase()`` of 0; so the page shows it at 0 until every expected scraper has received such a page, and its value then.
    That is for counts of events, which alerts compare with 0; times are shown at once, or a rank's end would take two scrapes.
    A series that has counted before the exporter first sees its rank is shown as it is, because an earlier exporter may have
    served it.
    """

    def __init__(self, first: int) -> None:
        """``first``: number of the first snapshot with the rank."""
        self._first = self._number = first
        self._acknowledged = 0
        self._since: dict[int, int] = {}
        """snapshot in which each series on the page first changed its value, by the series' id"""

    def begin(self, number: int, acknowledged: int) -> None:
        """Begin the page of a snapshot; every expected scraper has received that of ``acknowledged`` or a newer one."""
        self._number, self._acknowledged = number, acknowledged

    def shown(self, entry: LabelledSeries, values: Sequence[float]) -> Sequence[float]:
        """Return the numbers to show for a series with ``values``: none, zeros, or ``values`` itself."""
        key = id(entry.series)
        since = self._since.get(key)
        if since is None:
            if all(value == entry.quiet for value in values):
                return ()
            begins = cumulative(entry.series.kind) and entry.series.unit != "s" and self._number != self._first
            since = self._since[key] = self._number if begins else _SHOWN
        if since > self._acknowledged:
            return (0.0,) * len(values)
        self._since[key] = _SHOWN  # for good: a scraper that is seen for the first time must not reset it
        return values


class BlockRenderer:
    """Renders a value block in one format and one state of the rank; again only when the block has changed.

    Nearly every series is a gauge of floats; their values are picked from the block without a check of each. The other series
    are rows, which are looked at one by one, with a line for each number of the value that is shown.
    """

    def __init__(self, entries: Sequence[tuple[int, LabelledSeries]], form: Format, quiet: QuietSeries) -> None:
        """``entries``: the series to show, with their index."""
        self.is_holding = False
        """whether a counter is shown at 0 that has counted"""
        self._quiet, self._openmetrics = quiet, form.openmetrics
        self._rendered: tuple[DecodedBlock, Shown, list[FamilyLines]] | None = None
        self._shape: tuple[Collection[int], Sequence[int]] | None = None
        self._positions: dict[str, int] = {}
        """of the families on the page"""
        headings: dict[str, Heading] = {}
        for index, entry in entries:
            if entry.family.name not in headings:
                headings[entry.family.name] = heading(form, entry.family, entry.brief)
                self._positions[entry.family.name] = index
        in_order = sorted(entries, key=lambda row: self._positions[row[1].family.name])
        gauges = (Kind.GAUGE, ValueType.FLOAT)
        mixed = {
            entry.family.name
            for _, entry in entries
            if entry.quiet is not None or (entry.series.kind, entry.series.value_type) != gauges
        }
        self._rows, self._gauges = (
            [(index, entry, headings[name]) for index, entry in in_order if ((name := entry.family.name) in mixed) is wanted]
            for wanted in (True, False)
        )

    def lines(self, block: DecodedBlock, exemplars: Shown) -> list[FamilyLines]:
        """Return the lines by family, in the order of the families' first series."""
        rendered = self._rendered
        if self.is_holding or rendered is None or rendered[0] is not block or rendered[1] is not exemplars:
            rendered = self._rendered = block, exemplars, self._render(block, exemplars)
        return rendered[2]

    def _render(self, block: DecodedBlock, exemplars: Shown) -> list[FamilyLines]:
        values, self.is_holding = block.values, False
        groups = [self._numbers(entry, values[index]) for index, entry, _ in self._rows]
        shape = () if block.whole else [index for index, _, _ in self._gauges if values[index] is None], [*map(len, groups)]
        if shape != self._shape:
            self._lay_out(*shape)
            self._shape = shape
        texts = numbers([*self._pick(values), *chain.from_iterable(groups)])
        if exemplars and self._openmetrics:
            for start, (index, entry, _) in zip(self._starts, self._rows, strict=True):
                value = values[index]
                for bucket, text in entry.exemplars(exemplars):
                    if isinstance(value, Distribution) and value.counts[bucket]:  # a span can precede the fold of its step
                        texts[start + bucket] += text
        return self._template.fill(texts)

    def _numbers(self, entry: LabelledSeries, value: Value | None) -> Sequence[float]:
        numbers = entry.numbers(value)
        if entry.quiet is None:
            return numbers
        shown = self._quiet.shown(entry, numbers)
        self.is_holding |= bool(shown) and shown is not numbers
        return shown

    def _lay_out(self, absent: Collection[int], lengths: Sequence[int]) -> None:
        """Lay out the lines of a block in which the gauges ``absent`` have no value and the rows have ``lengths`` numbers."""
        hidden = frozenset(absent)
        gauges = [row for row in self._gauges if row[0] not in hidden]
        headings, prefixes = [family for _, _, family in gauges], [entry.prefixes[0] for _, entry, _ in gauges]
        self._starts = list[int]()
        """the first line of each row"""
        for (_, entry, family), length in zip(self._rows, lengths, strict=True):
            self._starts.append(len(prefixes))
            prefixes += entry.prefixes[:length] if length else ()  # most quiet series never need them
            headings += [family] * length
        self._template = LineTemplate(headings, prefixes)
        self._template.ranges.sort(key=lambda lines: self._positions[lines[0].family])
        self._pick = _picking([index for index, _, _ in gauges])


def _picking(indices: Sequence[int]) -> Callable[[Sequence[Value | None]], tuple[Any, ...]]:
    """Return a function that picks the values at ``indices``."""
    if len(indices) < 2:  # noqa: PLR2004  # an itemgetter of one index returns no tuple
        return lambda values: tuple(values[index] for index in indices)
    return itemgetter(*indices)
