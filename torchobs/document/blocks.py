"""What a report says, without its form: sections of blocks, which HTML, Markdown and matplotlib each render in their way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torchobs.support import text as text_format

Rounded = Callable[[float], str]
"""How a value of a chart is written"""
Point = tuple[float, float]
"""x: a step number, or seconds since the start; and the value"""


class Text(NamedTuple):
    """A paragraph. ``tone``: empty, ``note``, ``warning`` or ``error``."""

    words: str
    tone: str = ""


class Item(NamedTuple):
    """A finding. ``severity``: as of ``diagnosis.health``; ``section``: id of the section with the data behind it, or empty."""

    severity: str
    words: str
    section: str = ""


class Items(NamedTuple):
    """Findings, the most important first."""

    items: tuple[Item, ...]


class Figure(NamedTuple):
    """A key figure."""

    name: str
    value: str
    more: str = ""
    exact: float | None = None
    """the number that was rounded for the eye"""


class Figures(NamedTuple):
    """Key figures side by side."""

    figures: tuple[Figure, ...]


class Table(NamedTuple):
    """A table; the first column holds the rows' names. ``words``: indexes of columns that hold words, not numbers."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int] = frozenset({0})


class Shares(NamedTuple):
    """Parts of a whole, in seconds. ``colours``: prefix of the parts' colour classes."""

    caption: str
    parts: Mapping[str, float]
    colours: str = ""


class Code(NamedTuple):
    """Text to be copied, such as a command line."""

    words: str


class Series(NamedTuple):
    """One line of a chart; the first eight lines of a chart get colours of their own."""

    name: str
    points: Sequence[Point]


class Mark(NamedTuple):
    """A vertical mark in a chart, at a step."""

    at: float
    severity: str
    name: str


class LineChart(NamedTuple):
    """Lines over steps or, with ``timed``, over seconds since the start."""

    name: str
    """what it shows; also the name of the file that matplotlib writes"""
    series: tuple[Series, ...]
    rounded: Rounded = text_format.number
    marks: tuple[Mark, ...] = ()
    levels: tuple[tuple[str, float], ...] = ()
    """horizontal lines with their names, such as a clipping threshold"""
    note: str = ""
    timed: bool = False
    from_zero: bool = False


class StripChart(NamedTuple):
    """Kinds of events, one below the other, on one axis of steps."""

    name: str
    rows: tuple[tuple[str, str, tuple[float, ...]], ...]
    """name, severity, steps"""
    span: tuple[float, float]
    note: str = ""


class HeatMap(NamedTuple):
    """A value for each name and time, as colours on a logarithmic scale; ``None`` where unknown."""

    name: str
    names: tuple[str, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]
    """a row for each name"""
    rounded: Rounded = text_format.number
    note: str = ""


Chart = LineChart | StripChart | HeatMap
Block = Text | Items | Figures | Table | Shares | Code | Chart


class Section(NamedTuple):
    """A section; ``name`` is its id in the page. ``wide``: its charts take the whole width each."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    wide: bool = False


class Document(NamedTuple):
    """A whole report. ``badge``: severity and words of the verdict."""

    title: str
    subtitle: str
    badge: tuple[str, str]
    headline: str
    sections: tuple[Section, ...]
    footer: tuple[str, ...] = ()

    def charts(self) -> tuple[Chart, ...]:
        """Return all charts, in their order."""
        blocks = (block for section in self.sections for block in section.blocks)
        return tuple(block for block in blocks if isinstance(block, (LineChart, StripChart, HeatMap)))


def section(name: str, title: str, *blocks: Block | None, wide: bool = False) -> Section:
    """Return a section of the blocks that there are."""
    return Section(name, title, tuple(block for block in blocks if block is not None), wide)
