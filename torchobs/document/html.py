"""A report as one HTML file: no script, no request, the same offline, printed, on a phone and to a screen reader.

Every drawing stretches to its place, has a text alternative, and is drawn from the same curves as the live page's
(:mod:`torchobs.document.charts`). Colours are set in the style sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, floor, isfinite, log, log10
from typing import NamedTuple

from torchobs.document import blocks, charts
from torchobs.document.charts import Curve, curve_of, described, spreads, stacked
from torchobs.document.markup import EMPTY, Html, exact, heading_cell, joined, named, number_cell, style_sheet, table, tag
from torchobs.support import text as text_format

WIDTH, HEIGHT = 600.0, 180.0
BUCKETS = 240
SHADES = 9
_ROW = 18.0
_MOST_TICKS = 5
_DECADE = 10.0
_COLOURED = 8
SYMBOLS = {"info": ("good", "✓"), "warning": ("notice", "▲"), "error": ("bad", "✕")}
"""Severity to CSS class and symbol"""
_WORDS = {"info": "Note", "warning": "Warning", "error": "Error"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


class Scale(NamedTuple):
    """A vertical scale, from the bottom to the top."""

    low: float
    high: float
    logarithmic: bool = False

    def y(self, value: float) -> float:
        """Return the place of a value, downwards."""
        low, high, at = (log10(one) if self.logarithmic else one for one in (self.low, self.high, max(value, self._least)))
        return HEIGHT * (1 - min(1.0, max(0.0, (at - low) / (high - low))))

    @property
    def _least(self) -> float:
        return self.low if self.logarithmic else -float("inf")

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
    curves = [curve_of(one.points, BUCKETS) for one in chart.series]
    values = [value for one in chart.series for _, value in one.points] + [value for _, value in chart.levels]
    scale = scale_of(values, from_zero=chart.from_zero)
    if scale is None:
        return _figure(chart, tag("p", "No finite value.", class_="note")) if values else EMPTY
    places = [at for one in chart.series for at, _ in one.points]
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
    for index, found in enumerate(curves):
        if found is not None:
            places = [axis.x(bucket.at / 1000) for bucket in found.buckets]
            line = f"line s{index % _COLOURED}"
            shapes += charts.drawn(found, places.__getitem__, scale.y, line, banded=len(chart.series) == 1)
    ys = [(scale.y(value) / HEIGHT, chart.rounded(value)) for value in scale.ticks(binary=chart.rounded is text_format.size)]
    pairs = zip(chart.series, curves, strict=True)
    said = [f"{one.name}: {described(found, chart.rounded)}" for one, found in pairs if found]
    said += [text_format.plural(len(chart.marks), "mark")] if chart.marks else []
    plot = _frame(shapes, f"{chart.name}. {'; '.join(said)}", ys, axis.ticks())
    return _figure(chart, plot, _legend(chart, curves, logarithmic=scale.logarithmic))


def _legend(chart: blocks.LineChart, curves: Sequence[Curve | None], *, logarithmic: bool) -> Html:
    keys = [
        tag("span", tag("i", class_=f"key s{index % _COLOURED}"), one.name, class_="entry")
        for index, one in enumerate(chart.series)
        if len(chart.series) > 1
    ]
    keys += [
        tag("span", tag("i", class_="key level"), f"{name} {chart.rounded(value)}", class_="entry")
        for name, value in chart.levels
    ]
    finite = [found for found in curves if found is not None]
    notes = (
        [f"{chart.rounded(min(f.least for f in finite))} to {chart.rounded(max(f.greatest for f in finite))}"] if finite else []
    )
    notes += [f"last {chart.rounded(finite[0].last)}"] if len(finite) == 1 else []
    notes += ["log scale"] * logarithmic
    lost = sum(found.nonfinite for found in finite)
    notes += [f"{lost:,} not finite (dots at the top)"] * bool(lost)
    return tag("p", *keys, tag("span", " · ".join(notes)), class_="legend")


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


def page(document: blocks.Document) -> str:
    """Return the file's text."""
    return f"<!doctype html>\n{tag('html', _head(document), _body(document), lang='en')}\n"


def fragment(document: blocks.Document) -> str:
    """Return the report for a notebook's output cell: in a frame, so that its style stays its own."""
    return tag(
        "iframe",
        srcdoc=page(document),
        class_="torchobs",
        style="width:100%;height:44rem;border:1px solid #8888",
        title=document.title,
    )


def _head(document: blocks.Document) -> Html:
    _, symbol = SYMBOLS[document.badge[0]]
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{symbol} {document.title} – torchobs"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(style_sheet("torchobs.document", "report.css"))),
    )


def _body(document: blocks.Document) -> Html:
    class_, symbol = SYMBOLS[document.badge[0]]
    badge = tag("span", f"{symbol} {document.badge[1]}", class_="badge")
    links = [tag("li", tag("a", one.title, href=f"#{one.name}")) for one in document.sections]
    return tag(
        "body",
        tag("a", "Skip to the findings", href=f"#{document.sections[0].name}" if document.sections else "#main", class_="skip"),
        tag("header", tag("h1", named(document.title)), tag("p", document.subtitle, class_="subtitle")),
        tag("main", tag("p", badge, " ", document.headline, class_=f"sentence {class_}"),
            tag("nav", tag("ul", *links), aria_label="Sections"), *map(_section, document.sections), id="main"),
        tag("footer", *(tag("p", words) for words in document.footer)),
    )  # fmt: skip


def _section(one: blocks.Section) -> Html:
    parts = [_block(block) for block in one.blocks]
    class_ = "wide-charts" if one.wide else None
    return tag("section", tag("h2", one.title, id=f"{one.name}-title"), tag("div", *parts, class_="blocks"), id=one.name,
               aria_labelledby=f"{one.name}-title", class_=class_)  # fmt: skip


def _block(block: blocks.Block) -> Html:  # one return for each kind
    if isinstance(block, blocks.Text):
        return tag("p", block.words, class_=f"text {block.tone}".rstrip())
    if isinstance(block, blocks.Code):
        return tag("pre", tag("code", block.words), tabindex="0")
    if isinstance(block, blocks.Items):
        return tag("ul", *map(_item, block.items), class_="findings")
    if isinstance(block, blocks.Figures):
        return figures(block)
    if isinstance(block, blocks.Table):
        return _table(block)
    return _shares(block) if isinstance(block, blocks.Shares) else drawn(block)


def figures(block: blocks.Figures) -> Html:
    """Return key figures side by side."""
    parts = (
        [tag("dt", one.name), tag("dd", exact(one.value, one.exact)), tag("dd", one.more, class_="more") if one.more else EMPTY]
        for one in block.figures
    )
    return tag("dl", *(tag("div", *part) for part in parts), class_="figures")


def _item(one: blocks.Item) -> Html:
    class_, symbol = SYMBOLS[one.severity]
    mark = tag("span", symbol, role="img", aria_label=_WORDS[one.severity], class_="symbol")
    link = joined([" ", tag("a", "See the data", href=f"#{one.section}")]) if one.section else EMPTY
    return tag("li", mark, tag("span", one.words, link), class_=class_)


def _table(block: blocks.Table) -> Html:
    head = [heading_cell(name, "" if index in block.words else "n") for index, name in enumerate(block.head)]
    body = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            *(tag("td", cell, class_="words" if index in block.words else "n") for index, cell in enumerate(cells, 1)),
        )
        for name, *cells in block.rows
    ]
    return table(block.caption, block.caption, head, body)


def _shares(block: blocks.Shares) -> Html:
    whole = sum(block.parts.values())
    parts = sorted(((name, seconds) for name, seconds in block.parts.items() if seconds > 0), key=lambda part: -part[1])
    if not whole or not parts:
        return EMPTY
    bar = stacked([(f"{block.colours}{name}", seconds / whole) for name, seconds in parts])
    rows = [
        tag("tr", tag("th", tag("i", class_=f"key is-{block.colours}{name}"), name, scope="row"),
            number_cell(text_format.duration(seconds)), number_cell(text_format.percent(seconds / whole)))
        for name, seconds in parts
    ]  # fmt: skip
    head = [heading_cell("Part"), heading_cell("Time", "n"), heading_cell("Share", "n")]
    return tag("div", bar, table(block.caption, block.caption, head, rows), class_="shares")
