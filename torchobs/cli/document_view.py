"""A report's document as lines of text for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from torchobs.cli.table import Column, bullets, table
from torchobs.cli.terminal_style import TerminalStyle
from torchobs.diagnosis import text_format
from torchobs.report.content import Block, Document, Items, LineChart, Table, Text

_COLOURS = {"error": "red", "warning": "yellow", "info": ""}
_WIDEST_WORDS = 48
_NAMES = 14


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
            yield from (style(_COLOURS[item.severity], line) for line in bullets([item.words], style.width))
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
