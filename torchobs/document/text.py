"""A document as lines that fit a terminal: its width, colours, tables and paragraphs."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TextIO

from torchobs.config import settings
from torchobs.document.blocks import Block, Code, Document, Figures, Items, LineChart, Shares, Table, Text
from torchobs.support import text as text_format

NARROWEST, WIDEST, UNKNOWN = 40, 200, 120
MANY = 40
"""Most rows of a table that are printed"""
SEVERITY_COLOURS = {"error": "red", "warning": "yellow", "info": ""}
_COLOURS = SEVERITY_COLOURS | {
    "alive": "", "finished": "", "hung": "red", "failed": "red", "lost": "red", "unresponsive": "yellow",
}  # fmt: skip
"""Colours by severity, and by a rank's state"""
_CODES = {"bold": "1", "dim": "2", "red": "31", "yellow": "33", "cyan": "36"}
_GAP = "  "
_NARROWEST_TEXT = 20
_LEAST_WORDS = 12
_WIDEST_CURVE = 60


@dataclass(frozen=True, slots=True)
class TerminalStyle:
    """Style of output on a terminal. ``width`` in columns."""

    width: int
    colour: bool = False
    unicode: bool = True

    def __call__(self, colour: str, text: str) -> str:
        """Return the text in that colour or style, if colours are on. The text must be clean."""
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self.colour and colour and text else text


def style_for(out: TextIO) -> TerminalStyle:
    """Return the style for ``out``. Colours need a terminal that is not dumb, and no NO_COLOR (no-color.org)."""
    environ, terminal = settings.environment(), out.isatty()
    width = size_of(out).columns
    colour = terminal and not environ.get("NO_COLOR") and environ.get("TERM") not in {"dumb", None, ""}
    encoding = (getattr(out, "encoding", None) or "ascii").lower().replace("-", "")
    return TerminalStyle(max(NARROWEST, min(WIDEST, width)), colour, encoding.startswith("utf"))


def size_of(out: TextIO) -> os.terminal_size:
    """Return the present size of the terminal; else that in COLUMNS and LINES, or 120 columns."""
    if out.isatty():
        with contextlib.suppress(OSError, ValueError):
            size = os.get_terminal_size(out.fileno())
            if size.columns and size.lines:
                return size
    return shutil.get_terminal_size((UNKNOWN, 24))


def render(document: Document, style: TerminalStyle) -> list[str]:
    """Return a document's findings, tables and curves. Other charts are left out."""
    severity, verdict = document.badge
    lines = [style("bold", text_format.cut(document.title, style.width)), *flow(document.subtitle.split(" · "), style.width)]
    headline = bullets([f"{verdict}. {document.headline}"], style.width, "")
    lines += [style(SEVERITY_COLOURS[severity], line) for line in headline]
    for section in document.sections:
        body = [line for block in section.blocks for line in block_lines(block, style)]
        if body:
            lines += ["", style("bold", text_format.cut(section.title, style.width)), *body]
    footer = [text_format.cut(words, style.width) for words in document.footer]
    return [*lines, *(["", *footer] if footer else [])]


def block_lines(block: Block, style: TerminalStyle) -> Iterator[str]:
    """Yield a block's lines."""
    if isinstance(block, Items):
        for item in block.items:
            yield from (style(SEVERITY_COLOURS[item.severity], line) for line in bullets([item.words], style.width))
    elif isinstance(block, Text) and block.tone != "note":
        colour = "yellow" if block.tone == "warning" else ""
        yield from (style(colour, line) for line in bullets([block.words], style.width, ""))
    elif isinstance(block, Code):
        yield from (text_format.cut(line, style.width) for line in block.words.splitlines())
    elif isinstance(block, Figures):
        figures = ((f"{figure.name} {figure.value}", figure.more) for figure in block.figures)
        yield from flow([f"{words} ({more})" if more else words for words, more in figures], style.width)
    elif isinstance(block, Shares):
        parts = (f"{name} {share}" for name, _, share in block.largest_first())
        yield from flow([f"{block.caption}:", *parts], style.width)
    elif isinstance(block, Table):
        yield from _table(block, style)
    elif isinstance(block, LineChart):
        yield from _curves(block, style)


def _table(block: Table, style: TerminalStyle) -> Iterator[str]:
    """Yield the first rows of a table; pairs of a name and a value are put side by side."""
    if len(block.head) == 2:  # noqa: PLR2004
        yield from flow([f"{block.caption}:", *(f"{name} {value}" for name, value in block.rows)], style.width)
        return
    if block.caption:
        yield style("dim", text_format.cut(block.caption, style.width))
    yield from table(block, style, MANY)
    if len(block.rows) > MANY:
        yield f"… and {len(block.rows) - MANY:,} more"


def table(block: Table, style: TerminalStyle, most: int | None = None) -> list[str]:
    """Return a heading and a line for each row, in the colour of the state in it.

    Columns without any text are left out; where room lacks, the last ones go.
    """
    block = block.filled()
    rows = block.rows[:most]
    columns: list[list[str]] = []
    needed: list[int] = []
    for at, (head, *cells) in enumerate(zip(block.head, *rows, strict=True)):
        room = max(map(text_format.columns, (head, *cells)))
        needed.append(min(room, _LEAST_WORDS) if at in block.words else room)
        columns.append([text_format.pad(cell, room, right=at not in block.words) for cell in (head, *cells)])
    while sum(text_format.columns(first) + len(_GAP) for first, *_ in columns[:-1]) + needed[len(columns) - 1] > style.width:
        columns.pop()
    lines = [text_format.cut(_GAP.join(cells).rstrip(), style.width) for cells in zip(*columns, strict=True)]
    tones = ([getattr(cell, "tone", "") or cell for cell in row] for row in rows)
    colours = [next((_COLOURS[tone] for tone in row if tone in _COLOURS), "") for row in tones]
    return [style(colour, line) for colour, line in zip(("dim", *colours), lines, strict=True)]


def _curves(chart: LineChart, style: TerminalStyle) -> Iterator[str]:
    """Yield each series as bars in a line that ends with their range and the last one."""
    name_room = max(len(chart.name), 14)
    series_room = max(map(len, (series.name for series in chart.series)), default=0) if len(chart.series) > 1 else 0
    for index, series in enumerate(chart.series):
        name = text_format.pad(chart.name if not index else "", name_room)
        before = f"{name} {text_format.pad(series.name, series_room)} " if series_room else f"{name} "
        values = [value for _, value in series.points]
        finite = sorted(value for value in values if abs(value) < float("inf"))
        ends = f"{chart.rounded(finite[0])} to {chart.rounded(finite[-1])}, " if finite else ""
        after = f" {ends}last {chart.rounded(values[-1])}"
        room = min(_WIDEST_CURVE, style.width - text_format.columns(before) - len(after))
        bars = text_format.sparkline(values, room, ascii_only=not style.unicode)
        yield style("cyan", text_format.cut(f"{before}{bars}{after}", style.width))
    if chart.note:
        yield from bullets([chart.note], style.width, "  ")


def bullets(texts: Sequence[str], width: int, mark: str = "- ") -> list[str]:
    """Return each text as a paragraph with a bullet."""
    lines: list[str] = []
    for text in texts:
        first, *rest = wrap(text, max(_NARROWEST_TEXT, width - len(mark)), break_on_hyphens=False) or [""]
        lines += [mark + first, *(" " * len(mark) + line for line in rest)]
    return lines


def flow(items: Sequence[str], width: int) -> list[str]:
    """Return items side by side, in as many lines as needed, without breaking any."""
    lines: list[str] = []
    for item in items:
        if lines and text_format.columns(lines[-1]) + len(_GAP) + text_format.columns(item) <= width:
            lines[-1] += _GAP + item
        else:
            lines.append(text_format.cut(item, width))
    return lines
