"""A run as it is shown, without its form: sections of blocks.

The live page and the report's page (``html``), ``top`` and ``inspect`` (``text``), Markdown (``files``) and matplotlib
(``plots``) each render them in their way.
"""

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


class Link(NamedTuple):
    """The target of a link. ``label``: for screen readers; ``current``: it is the page that is shown."""

    href: str
    label: str = ""
    current: bool = False


class Cell(str):
    """A cell of a table: words, and additions for a page. Every other form has the words, followed by ``more``."""

    __slots__ = ("at_s", "exact", "link", "more", "shares", "tone", "words")

    words: str
    more: str
    exact: float | None
    """the number that was rounded for the eye"""
    tone: str
    """a rank's state, a severity, or a class of the style sheet; a row has its first cell's, a heading the order"""
    link: Link | None
    at_s: float | None
    """the moment in the words, in Unix time"""
    shares: tuple[tuple[str, float], ...]
    """parts of a whole, drawn as a bar"""

    def __new__(  # noqa: PYI034  # typing.Self needs Python 3.11
        cls, words: str, more: str = "", *, exact: float | None = None, tone: str = "", link: Link | None = None,
        at_s: float | None = None, shares: tuple[tuple[str, float], ...] = (),
    ) -> Cell:  # fmt: skip
        """Return a cell; ``more``: quieter words behind it."""
        cell = str.__new__(cls, f"{words} {more}" if more else words)
        cell.words, cell.more, cell.exact, cell.tone = words, more, exact, tone
        cell.link, cell.at_s, cell.shares = link, at_s, shares
        return cell


class Item(NamedTuple):
    """A finding. ``severity``: as of ``diagnosis.health``; ``section``: id of the section with the data behind it, or empty."""

    severity: str
    words: str
    section: str = ""
    run: Cell | None = None
    """its run, if there are several"""


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
    name: str = ""
    """a name that stays while the caption changes"""
    foot: tuple[str, ...] = ()
    """a row on all of them"""
    keys: tuple[str, ...] = ()
    """names of the parts of its bars"""
    pages: tuple[Cell, ...] = ()
    """links to its pages, if these rows are one of several"""

    def filled(self) -> Table:
        """Return it without empty columns."""
        kept = [at for at, cells in enumerate(zip(*self.rows, strict=True)) if any(cells)]
        head, *rows = (tuple(cells[at] for at in kept) for cells in (self.head, *self.rows))
        return self._replace(head=head, rows=tuple(rows), words=frozenset(map(kept.index, self.words.intersection(kept))))


class Shares(NamedTuple):
    """Parts of a whole, in seconds. ``colours``: prefix of the parts' colour classes."""

    caption: str
    parts: Mapping[str, float]
    colours: str = ""

    def largest_first(self) -> list[tuple[str, float, str]]:
        """Return each part that is not zero: its name, its seconds, and its share in words."""
        whole = sum(self.parts.values())
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return [(name, seconds, text_format.percent(seconds / whole)) for name, seconds in parts if seconds > 0]


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
    """its title; also the name of matplotlib's file"""
    series: tuple[Series, ...]
    rounded: Rounded = text_format.number
    marks: tuple[Mark, ...] = ()
    levels: tuple[tuple[str, float], ...] = ()
    """horizontal lines with their names, such as a clipping threshold"""
    note: str = ""
    timed: bool = False
    from_zero: bool = False
    last: float | None = None
    """the last value, finite or not, if it differs from the curve's"""
    empty: str = "No finite value."
    """text if there is no curve"""


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
    """A section; ``name`` is its id in the page.

    ``wide``: its charts take the whole width each; ``cards``: each block is a small card.
    """

    name: str
    title: str
    blocks: tuple[Block, ...]
    wide: bool = False
    cards: bool = False


class Document(NamedTuple):
    """A whole page, screen or report. ``badge``: severity and words of the verdict; severity ``wait``: there is no run yet."""

    title: str
    subtitle: str
    badge: tuple[str, str]
    headline: str
    sections: tuple[Section, ...]
    footer: tuple[str, ...] = ()
    gist: str = ""
    """the headline without figures that change all the time, for screen readers to announce"""

    def charts(self) -> tuple[Chart, ...]:
        """Return all charts, in their order."""
        blocks = (block for section in self.sections for block in section.blocks)
        return tuple(block for block in blocks if isinstance(block, (LineChart, StripChart, HeatMap)))


def section(name: str, title: str, *blocks: Block | None, wide: bool = False, cards: bool = False) -> Section:
    """Return a section of the given blocks; tables of a report lose empty columns."""
    there = (block.filled() if isinstance(block, Table) and not block.foot else block for block in blocks if block is not None)
    return Section(name, title, tuple(there), wide, cards)
