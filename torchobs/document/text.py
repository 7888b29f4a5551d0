"""Text that fits a terminal: its width and colours, tables and paragraphs, and a report's document as lines."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import NamedTuple, TextIO

from torchobs.config import settings
from torchobs.diagnosis import text_format
from torchobs.document.blocks import Block, Document, Items, LineChart, Table, Text

NARROWEST, WIDEST, UNKNOWN = 40, 200, 120
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

STATE_COLOURS = {
    "alive": "green", "finished": "green", "hung": "red", "failed": "red", "lost": "red", "unresponsive": "yellow",
}  # fmt: skip
GAP = "  "
_NARROWEST_TEXT = 20
_SEVERITY_COLOURS = {"error": "red", "warning": "yellow", "info": ""}
_WIDEST_WORDS = 48
_NAMES = 14


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
            found = os.get_terminal_size(out.fileno())
            if found.columns and found.lines:
                return found
    return shutil.get_terminal_size((UNKNOWN, 24))


class Column(NamedTuple):
    """A column: heading, whether right-aligned, and the order in which it is dropped (0 never, 9 before 8)."""

    heading: str
    right: bool = True
    dispensable: int = 0


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return a heading and one line per row, at most ``width`` columns wide. Cells must be clean texts."""
    kept = list(range(len(columns)))
    widths = [max([text_format.columns(row[index]) for row in rows] + [len(columns[index].heading)]) for index in kept]
    while sum(widths[index] + len(GAP) for index in kept) - len(GAP) > width:
        at = max(kept, key=lambda index: columns[index].dispensable)
        if not columns[at].dispensable:
            break
        kept.remove(at)
    heading = [column.heading for column in columns]
    cells = ([text_format.pad(row[i], widths[i], right=columns[i].right) for i in kept] for row in (heading, *rows))
    return [text_format.cut(GAP.join(row).rstrip(), width) for row in cells]


def bullets(texts: Sequence[str], width: int, mark: str = "- ") -> list[str]:
    """Return each text as a paragraph with a bullet."""
    lines: list[str] = []
    for text in texts:
        first, *rest = wrap(text, max(_NARROWEST_TEXT, width - len(mark)), break_on_hyphens=False) or [""]
        lines += [mark + first, *(" " * len(mark) + line for line in rest)]
    return lines


def shares(parts: Mapping[str, float], width: int, total: float | None = None) -> list[str]:
    """Return ``productive 84 %  data 3 %`` in as many lines as needed; zero shares are left out."""
    whole = sum(parts.values()) if total is None else total
    if whole <= 0:
        return []
    shown = [f"{name} {text_format.percent(value / whole)}" for name, value in parts.items() if value > 0]
    return flow(shown, width)


def flow(items: Sequence[str], width: int) -> list[str]:
    """Return items side by side, in as many lines as needed, without breaking any."""
    lines: list[str] = []
    for item in items:
        if lines and text_format.columns(lines[-1]) + len(GAP) + text_format.columns(item) <= width:
            lines[-1] += GAP + item
        else:
            lines.append(text_format.cut(item, width))
    return lines


def document_lines(document: Document, style: TerminalStyle) -> list[str]:
    """Return the document's findings, tables and curves."""
    lines = [style("bold", text_format.cut(document.title, style.width)), text_format.cut(document.subtitle, style.width)]
    for section in document.sections:
        body = [line for block in section.blocks for line in _block(block, style)]
        if body:
            lines += ["", style("bold", section.title), *body]
    return lines


def _block(block: Block, style: TerminalStyle) -> Iterator[str]:
    if isinstance(block, Items):
        for item in block.items:
            yield from (style(_SEVERITY_COLOURS[item.severity], line) for line in bullets([item.words], style.width))
    elif isinstance(block, Text) and block.tone != "note":
        yield from bullets([block.words], style.width, "")
    elif isinstance(block, Table):
        columns = [Column(name, right=index not in block.words) for index, name in enumerate(block.head)]
        rows = [[text_format.cut(cell, _WIDEST_WORDS) for cell in row] for row in block.rows]
        yield from table(columns, rows, style.width)
    elif isinstance(block, LineChart):
        yield from _curves(block, style)


def _curves(chart: LineChart, style: TerminalStyle) -> Iterator[str]:
    names = len(max((one.name for one in chart.series), key=len, default=""))
    for index, one in enumerate(chart.series):
        values = [value for _, value in one.points]
        bars = text_format.sparkline(values, min(60, style.width - _NAMES - names - 16), ascii_only=not style.unicode)
        name = text_format.pad(chart.name if not index else "", _NAMES)
        yield text_format.cut(f"{name} {text_format.pad(one.name, names)} {bars} last {chart.rounded(values[-1])}", style.width)
