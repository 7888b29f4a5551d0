"""A report as Markdown, and writing of reports to files in the format that the file's name asks for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from torchobs.document import blocks
from torchobs.document.charts import curve, described_in
from torchobs.document.html import page
from torchobs.document.kept import Kept, report_on
from torchobs.document.run import Options, document
from torchobs.ranks.runs import Chosen
from torchobs.support import text as text_format

_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~!>])")
_WORDS = {"info": "", "warning": "Warning: ", "error": "**Error:** "}
_BARS = 60
FORMATS = (".html", ".htm", ".md", ".json")
_ALL = 1_000_000


def markdown(document: blocks.Document) -> str:
    """Return the file's text."""
    lines = [
        f"# {_plain(document.title)}",
        "",
        _plain(document.subtitle),
        "",
        f"**{document.badge[1]}.** {_plain(document.headline)}",
    ]
    for section in document.sections:
        lines += ["", *_section(section)]
    return "\n".join([*lines, "", *(_plain(words) for words in document.footer), ""])


def _section(section: blocks.Section) -> Iterator[str]:
    yield f"## {_plain(section.title)}"
    for block in section.blocks:
        lines = list(_block(block))
        if lines:
            yield ""
            yield from lines


def _block(block: blocks.Block) -> Iterator[str]:  # one case for each kind
    if isinstance(block, blocks.Text):
        yield _plain(block.words)
    elif isinstance(block, blocks.Code):
        # indented, so that no fence within it can end it
        yield from (f"    {line}" for line in block.words.splitlines())
    elif isinstance(block, blocks.Items):
        yield from (f"- {_WORDS[item.severity]}{_plain(item.words)}" for item in block.items)
    elif isinstance(block, blocks.Figures):
        rows = tuple((figure.name, figure.value, figure.more) for figure in block.figures)
        yield from _table(blocks.Table("", ("Figure", "Value", ""), rows, frozenset({0, 1, 2})))
    elif isinstance(block, blocks.Table):
        yield from _table(block)
    elif isinstance(block, blocks.Shares):
        rows = tuple((name, text_format.duration(seconds), share) for name, seconds, share in block.largest_first())
        yield from _table(blocks.Table(block.caption, ("Part", "Time", "Share"), rows))
    elif isinstance(block, blocks.LineChart):
        yield from _lines(block)
    elif isinstance(block, blocks.StripChart):
        yield from (f"- {_plain(name)}: {_steps(steps)}" for name, _, steps in block.rows)
    else:
        yield from _heat(block)


def _lines(chart: blocks.LineChart) -> Iterator[str]:
    yield f"**{_plain(chart.name)}**"
    for series in chart.series:
        line = curve(series.points, _BARS)
        if line is not None:
            bars = text_format.sparkline([bucket.mean for bucket in line.buckets], _BARS)
            yield ""
            yield f"`{bars}` {_plain(described_in(chart, series, line))}"
    if chart.note:
        yield ""
        yield _plain(chart.note)


def _heat(chart: blocks.HeatMap) -> Iterator[str]:
    if chart.steps:
        yield f"**{_plain(chart.name)}** (steps {chart.steps[0]:,} to {chart.steps[-1]:,})"
        for name, row in zip(chart.names, chart.values, strict=True):
            yield f"- `{text_format.sparkline(row, _BARS)}` {_plain(name)}"


def _steps(steps: tuple[float, ...]) -> str:
    shown = [f"{step:,.0f}" for step in steps]
    return f"{'step' if len(shown) == 1 else 'steps'} {text_format.joined(shown, 12)}"


def _table(block: blocks.Table) -> Iterator[str]:
    if block.caption:
        yield f"**{_plain(block.caption)}**"
        yield ""
    yield _row(block.head)
    yield _row(tuple("---" if index in block.words else "---:" for index in range(len(block.head))), plain=False)
    yield from map(_row, block.rows)


def _row(cells: tuple[str, ...], *, plain: bool = True) -> str:
    return f"| {' | '.join(_plain(cell) if plain else cell for cell in cells)} |"


def _plain(words: str) -> str:
    """Return words of others so that they are neither markup nor HTML."""
    return _SPECIAL.sub(r"\\\1", escape(words, quote=False).replace("\n", " "))


def check_format(path: Path) -> None:
    """Raise ``ValueError`` when a file's name asks for no known format."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} names no format: end it in .html, .md or .json")


def report_text(chosen: Chosen | Kept, suffix: str) -> str:
    """Return the report on a run in the format of a file name's suffix.

    As JSON it is plain data as of ``torchobs inspect --json``, with every step and event, and the history.
    """
    if suffix.lower() != ".json":
        return document_text(report_on(chosen), suffix)
    if isinstance(chosen, Kept):
        return json_text(chosen.data)
    options = Options(_ALL, _ALL, history=True)
    return json_text(document(chosen.ranks, chosen.launchers, chosen.bad, options, chosen.before))


def document_text(document: blocks.Document, suffix: str) -> str:
    """Return a document as Markdown or HTML."""
    return markdown(document) if suffix.lower() == ".md" else page(document)


def json_text(data: dict[str, Any]) -> str:
    """Return plain data as a JSON file."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def write(path: Path, words: str) -> None:
    """Write a file at once: no reader sees a part of it. Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(words, encoding="utf-8", errors="replace")
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()
