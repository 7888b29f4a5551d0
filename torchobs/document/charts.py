"""Charts as SVG with text alternatives, from the curves of a quantity over many steps that every form of a document shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, isfinite, log, log10
from typing import NamedTuple

from torchobs.catalog import PHASES
from torchobs.document import blocks
from torchobs.document.markup import EMPTY, Html, joined, tag
from torchobs.support import text as text_format

SMALL_BUCKETS, BUCKETS = 120, 240
"""Most points of a curve: one for two pixels or so"""

LOG_FROM = 30.0
"""Ratio of the largest to the typical value for a logarithmic scale; a linear one would show only a spike."""

WIDTH, HEIGHT = 600.0, 180.0
SHADES = 9
_SMALL_WIDTH, _SMALL_HEIGHT, _SMALL_MARGIN = 240.0, 56.0, 4.0
_ROW = 18.0
_MOST_TICKS = 5
_DECADE = 10.0
_COLOURED = 8

Points = list[tuple[float, float, float, float]]
"""x, and the y (downwards) of the mean, minimum and maximum of each bucket"""


class Bucket(NamedTuple):
    """Mean, minimum and maximum of the finite values of neighbouring steps; ``None`` if there are none."""

    mean: float | None
    least: float
    greatest: float
    nonfinite: int
    at: float = 0.0
    """mean of their steps, or seconds"""


class Curve(NamedTuple):
    """The data of a chart; ``first`` and ``end``: where it begins and ends."""

    first: float
    end: float
    buckets: tuple[Bucket, ...]
    last: float
    least: float
    greatest: float
    nonfinite: int
    logarithmic: bool


def curve(values: Iterable[blocks.Point], most: int) -> Curve | None:
    """Return the chart's data in at most so many buckets; ``None`` if no value is finite.

    Values delivered late by a device are sorted to their step.
    """
    ordered = sorted(values)
    finite = [value for _, value in ordered if isfinite(value)]
    if not finite:
        return None
    count, number = len(ordered), min(len(ordered), most)
    groups = (ordered[index * count // number : (index + 1) * count // number] for index in range(number))
    return Curve(
        first=ordered[0][0],
        end=ordered[-1][0],
        buckets=tuple(_bucket(group) for group in groups),
        last=finite[-1],
        least=min(finite),
        greatest=max(finite),
        nonfinite=len(ordered) - len(finite),
        logarithmic=spreads(finite),
    )


def _bucket(group: Sequence[blocks.Point]) -> Bucket:
    finite = [value for _, value in group if isfinite(value)]
    missing, at = len(group) - len(finite), sum(step for step, _ in group) / len(group)
    if not finite:
        return Bucket(None, 0.0, 0.0, missing, at)
    # divided first: the sum of very large floats is infinite
    return Bucket(sum(value / len(finite) for value in finite), min(finite), max(finite), missing, at)


def spreads(finite: Sequence[float]) -> bool:
    """Return whether the largest value is so far above the typical one that a linear scale would hide all others."""
    ordered = sorted(finite)
    return ordered[0] > 0 and ordered[-1] / LOG_FROM > ordered[len(ordered) // 2]


def described(curve: Curve, rounded: Callable[[float], str]) -> str:
    """Return a curve in words: first and last value, and extremes."""
    first = next(bucket.mean for bucket in curve.buckets if bucket.mean is not None)
    odd = f", {curve.nonfinite:,} values not finite" if curve.nonfinite else ""
    ends = f"from {rounded(first)} to {rounded(curve.last)}"
    return f"{ends}, least {rounded(curve.least)}, greatest {rounded(curve.greatest)}{odd}"


def described_in(chart: blocks.LineChart, series: blocks.Series, curve: Curve) -> str:
    """Return a chart's curve in words, with its name if there are several."""
    name = f"{series.name}: " if len(chart.series) > 1 else ""
    return f"{name}{described(curve, chart.rounded)}"


# -- axes --------------------------------------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """A vertical scale, from the bottom to the top."""

    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Return the place of a value, 0 at the bottom and 1 at the top."""
        value = max(value, self.low) if self.logarithmic else value
        low, high, at = (log10(number) if self.logarithmic else number for number in (self.low, self.high, value))
        return min(1.0, max(0.0, (at - low) / (high - low))) if 0 < high - low < float("inf") else 0.5

    def y(self, value: float) -> float:
        """Return the place of a value, downwards."""
        return HEIGHT * (1 - self.share(value))

    def ticks(self, *, binary: bool = False) -> list[float]:
        """Return round values within the scale; ``binary``: round in KiB, MiB and so on."""
        if not self.logarithmic:
            unit = 1024.0 ** max(0, floor(log(max(self.high, 1.0), 1024))) if binary else 1.0
            return [value * unit for value in round_values(self.low / unit, self.high / unit)]
        first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
        every = max(1, ceil((last - first + 1) / _MOST_TICKS))
        decades = [_DECADE**power for power in range(first, last + 1, every)]
        return decades if len(decades) > 1 else [self.low, self.high]


def scale_of(values: Iterable[float], *, from_zero: bool = False) -> Scale | None:
    """Return a scale with room for all finite values; ``None`` if there are none."""
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if spreads(finite) and not from_zero:
        return Scale(low, high, logarithmic=True)
    low = min(low, 0.0) if from_zero else low
    if not isfinite(high - low):
        return Scale(-1e308, 1e308)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low if from_zero else low - margin, high + margin)


def round_values(low: float, high: float) -> list[float]:
    """Return some five multiples of 1, 2 or 5 times a power of ten between the two."""
    room = (high - low) / (_MOST_TICKS - 1)
    if not room > 0 or not isfinite(room):
        return [low]
    power = _DECADE ** floor(log10(room))
    unit = next(power * part for part in (1, 2, 5, 10) if power * part >= room * 0.8)
    return [number * unit for number in range(ceil(low / unit - 1e-9), floor(high / unit + 1e-9) + 1)]


def drawn(chart: blocks.Chart) -> Html:
    """Return a chart as a figure; nothing if it has no value."""
    if isinstance(chart, blocks.LineChart):
        return _lines(chart)
    return _strip(chart) if isinstance(chart, blocks.StripChart) else _heat(chart)


def _figure(chart: blocks.Chart, plot: Html, *more: Html) -> Html:
    note = tag("p", chart.note, class_="note") if chart.note else EMPTY
    return tag("figure", tag("figcaption", chart.name), plot, *more, note, class_="chart")


def _frame(  # the parts of a drawing
    shapes: Sequence[Html], alternative: str, ys: Sequence[tuple[float, str]], xs: Sequence[tuple[float, str]],
    height: float = HEIGHT, *, grid: bool = True, class_: str = "plot",
) -> Html:  # fmt: skip
    """Return the drawing with the labels of its axes; places in ``ys`` and ``xs`` are shares from the top and the left."""
    lines = [tag("path", d=f"M0 {at * height:.1f}H{WIDTH:g}", class_="grid") for at, _ in ys] if grid else []
    svg = tag(
        "svg", *lines, *shapes, viewBox=f"0 0 {WIDTH:g} {height:g}", preserveAspectRatio="none", role="img",
        aria_label=alternative,
    )  # fmt: skip
    left = tag("div", *(tag("span", words, style=f"top:{at:.2%}") for at, words in ys), class_="ys", aria_hidden="true")
    # a label is shifted by its own width times its place, so that the outer ones stay inside
    below = tag(
        "div", *(tag("span", words, style=f"left:{at:.2%};transform:translateX(-{at:.0%})") for at, words in xs),
        class_="xs", aria_hidden="true",
    )  # fmt: skip
    return tag("div", left, svg, below, class_=class_)


class _Axis(NamedTuple):
    """The horizontal axis."""

    first: float
    last: float
    timed: bool = False

    def share(self, at: float) -> float:
        return (at - self.first) / (self.last - self.first) if self.last > self.first else 0.5

    def x(self, at: float) -> float:
        return WIDTH * self.share(at)

    def ticks(self) -> list[tuple[float, str]]:
        inner = [at for at in round_values(self.first, self.last) if 0.1 < self.share(at) < 0.88]  # noqa: PLR2004  # clear of the ends
        places = [self.first, *inner, self.last] if self.last > self.first else [self.first]
        return [(self.share(at), self.word(at, first=index == 0)) for index, at in enumerate(places)]

    def word(self, at: float, *, first: bool = False) -> str:
        if self.timed:
            return text_format.span(at)
        return f"step {at:,.0f}" if first else f"{at:,.0f}"


def _lines(chart: blocks.LineChart) -> Html:
    curves = [curve(series.points, BUCKETS) for series in chart.series]
    values = [value for series in chart.series for _, value in series.points] + [value for _, value in chart.levels]
    scale = scale_of(values, from_zero=chart.from_zero)
    if scale is None:
        return _figure(chart, tag("p", chart.empty, class_="note")) if values else EMPTY
    places = [at for series in chart.series for at, _ in series.points]
    axis = _Axis(min(places, default=0.0), max(places, default=1.0), chart.timed)
    shapes = [
        tag(
            "path",
            tag("title", f"{mark.name}, step {mark.at:,.0f}"),
            d=f"M{axis.x(mark.at):.1f} 0V{HEIGHT:g}",
            class_=f"mark {mark.severity}",
        )
        for mark in chart.marks
    ]
    shapes += [tag("path", d=f"M0 {scale.y(value):.1f}H{WIDTH:g}", class_="level") for _, value in chart.levels]
    for index, line in enumerate(curves):
        if line is not None:
            places = [axis.x(bucket.at) for bucket in line.buckets]
            class_ = f"line {_colour(chart, index)}"
            shapes += _shapes(line, places.__getitem__, scale.y, class_, banded=len(chart.series) == 1)
    ys = [(scale.y(value) / HEIGHT, chart.rounded(value)) for value in scale.ticks(binary=chart.rounded is text_format.size)]
    pairs = zip(chart.series, curves, strict=True)
    said = [described_in(chart, series, line) for series, line in pairs if line]
    said += [text_format.plural(len(chart.marks), "mark")] if chart.marks else []
    plot = _frame(shapes, f"{chart.name}: {'; '.join(said)}", ys, axis.ticks())
    return _figure(chart, plot, _legend(chart, curves, logarithmic=scale.logarithmic))


def _colour(chart: blocks.LineChart, index: int) -> str:
    """Return the CSS class for a line's colour: a phase has the colour of its part of a bar."""
    name = chart.series[index].name
    return colour_of(name) if name in PHASES else f"s{index % _COLOURED}"


def _legend(chart: blocks.LineChart, curves: Sequence[Curve | None], *, logarithmic: bool) -> Html:
    keys = [
        tag("span", tag("i", class_=f"key {_colour(chart, index)}"), series.name, class_="entry")
        for index, series in enumerate(chart.series)
        if len(chart.series) > 1
    ]
    keys += [
        tag("span", tag("i", class_="key level"), f"{name} {chart.rounded(value)}", class_="entry")
        for name, value in chart.levels
    ]
    finite = [curve for curve in curves if curve is not None]
    more = [*[f"last {chart.rounded(finite[-1].last)}"] * (len(finite) == 1), *["log scale"] * logarithmic] if finite else []
    return tag("p", *keys, tag("span", _notes(finite, chart.rounded, *more) if finite else ""), class_="legend")


def _strip(chart: blocks.StripChart) -> Html:
    axis, height = _Axis(*chart.span), max(_ROW * len(chart.rows), _ROW)
    shapes, ys, said = list[Html](), [], []
    for index, (name, severity, steps) in enumerate(chart.rows):
        y = _ROW * (index + 0.5)
        shapes.append(tag("path", d=f"M0 {y:g}H{WIDTH:g}", class_="grid"))
        shapes += [
            tag("path", tag("title", f"{name}, step {at:,.0f}"), d=f"M{axis.x(at):.1f} {y:g}h.1", class_=f"dot {severity}")
            for at in steps
        ]
        ys.append((y / height, name))
        said.append(f"{name} {text_format.plural(len(steps), 'time')}, first at step {min(steps):,.0f}")
    plot = _frame(shapes, f"{chart.name}. {'; '.join(said)}", ys, axis.ticks(), height, grid=False, class_="plot named")
    return _figure(chart, tag("div", plot, style=f"--rows:{len(chart.rows)}"))


def _heat(chart: blocks.HeatMap) -> Html:
    positive = [value for row in chart.values for value in row if value is not None and value > 0 and isfinite(value)]
    if not positive or not chart.steps:
        return EMPTY
    low, high = log10(min(positive)), log10(max(positive))
    width, height = WIDTH / len(chart.steps), _ROW * len(chart.names)
    shapes = [
        tag(
            "rect", x=f"{column * width:.2f}", y=f"{index * _ROW:g}", width=f"{width + 0.05:.2f}", height=f"{_ROW - 1:g}",
            class_=f"h{_shade(value, low, high)}",
        )
        for index, row in enumerate(chart.values)
        for column, value in enumerate(row)
        if value is not None
    ]  # fmt: skip
    ys = [((index + 0.5) / len(chart.names), name) for index, name in enumerate(chart.names)]
    axis = _Axis(0, len(chart.steps) - 1)
    places = sorted({0, (len(chart.steps) - 1) // 2, len(chart.steps) - 1})
    xs = [(axis.share(at), f"{'step ' if not at else ''}{chart.steps[at]:,}") for at in places]
    over = f"{len(chart.names)} rows over steps {chart.steps[0]:,} to {chart.steps[-1]:,}"
    said = f"{chart.name}: {over}; the table below has the figures"
    plot = _frame(shapes, said, ys, xs, height, grid=False, class_="plot named")
    shades = [tag("i", class_=f"key h{shade}") for shade in range(SHADES)]
    words = (chart.rounded(min(positive)), chart.rounded(max(positive)))
    legend = tag(
        "p", tag("span", words[0], " ", *shades, " ", words[1], " (log scale)", class_="entry"), class_="legend shades"
    )
    return _figure(chart, tag("div", plot, style=f"--rows:{len(chart.names)}"), legend)


def _shade(value: float, low: float, high: float) -> str:
    if value <= 0:
        return "zero"
    return str(min(SHADES - 1, int((log10(value) - low) / (high - low) * SHADES))) if high > low else str(SHADES // 2)


def small(chart: blocks.LineChart) -> Html:
    """Return a chart of one line without axes: its means within a band from minimum to maximum."""
    line = curve((point for series in chart.series for point in series.points), SMALL_BUCKETS)
    if line is None:
        return tag("p", chart.empty, class_="note")
    scale, count = Scale(line.least, line.greatest, line.logarithmic), len(line.buckets)
    room = _SMALL_HEIGHT - 2 * _SMALL_MARGIN
    steps = f"{line.first:,.0f} to {line.end:,.0f}"
    svg = tag(
        "svg",
        *_shapes(
            line,
            lambda index: _SMALL_WIDTH * (index + 0.5) / count,
            lambda value: _SMALL_MARGIN + (1 - scale.share(value)) * room,
        ),
        viewBox=f"0 0 {_SMALL_WIDTH:g} {_SMALL_HEIGHT:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{chart.name} from step {steps}: {described(line, chart.rounded)}",
    )
    more = [f"steps {steps.replace(' to ', '–')}", *["log scale"] * scale.logarithmic]
    return joined([svg, tag("p", _notes([line], chart.rounded, *more), class_="note")])


def _notes(curves: Sequence[Curve], rounded: Callable[[float], str], *more: str) -> str:
    """Return the range of curves in words, and ``more``."""
    ends = f"{rounded(min(curve.least for curve in curves))} to {rounded(max(curve.greatest for curve in curves))}"
    lost = sum(curve.nonfinite for curve in curves)
    return " · ".join([ends, *more, *[f"{lost:,} not finite (dots at the top)"] * bool(lost)])


def _shapes(
    curve: Curve, x: Callable[[int], float], y: Callable[[float], float], line: str = "line", *, banded: bool = True
) -> list[Html]:
    """Return a curve's means in a band from minimum to maximum, with gaps and marks where nothing is finite.

    ``x``: the place of a bucket by its index; ``y``: that of a value, downwards.
    """
    rows: list[Points] = [[]]
    for index, bucket in enumerate(curve.buckets):
        if bucket.mean is None:
            rows.append([])
        else:
            rows[-1].append((x(index), y(bucket.mean), y(bucket.least), y(bucket.greatest)))
    bands = [tag("path", d=band_path(row), class_="band") for row in rows if row and banded]
    lines = [tag("path", d=line_path(row), class_=line) for row in rows if row]
    odd = [index for index, bucket in enumerate(curve.buckets) if bucket.nonfinite]
    return [*bands, *lines, *(tag("path", d=f"M{x(index):.1f} 4h.1", class_="odd") for index in odd)]


def colour_of(part: str) -> str:
    """Return the CSS class for a part's colour; without a class of its name it has the colour of others."""
    return f"is-{part}" if (part := part.replace(" ", "-")).replace("-", "").isalnum() else "is-other"


def stacked(parts: Iterable[tuple[str, float]]) -> Html:
    """Return a stacked bar of shares. It has no text alternative: the surrounding text gives the numbers."""
    drawn, at = [], 0.0
    for name, part in parts:
        width = min(max(part, 0.0), 1.0) * 100
        if width > 0:
            drawn.append(
                tag("rect", x=f"{at:.2f}", y="0", width=f"{max(width - 0.6, 0.2):.2f}", height="8", class_=colour_of(name))
            )
        at += width
    return tag("svg", *drawn, viewBox="0 0 100 8", preserveAspectRatio="none", aria_hidden="true", class_="bar")


def line_path(row: Points) -> str:
    """Return the path of the means."""
    if len(row) == 1:
        return f"M{row[0][0] - 1:.1f} {row[0][1]:.1f}h2"
    return "M" + "L".join(f"{x:.1f} {mean:.1f}" for x, mean, _, _ in row)


def band_path(row: Points) -> str:
    """Return the path around the minima and maxima."""
    above = [f"{x:.1f} {top:.1f}" for x, _, _, top in row]
    below = [f"{x:.1f} {bottom:.1f}" for x, _, bottom, _ in reversed(row)]
    return f"M{'L'.join(above + below)}Z"
