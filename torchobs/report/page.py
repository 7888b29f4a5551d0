"""A report as one HTML file: no script, no request, the same offline, printed, on a phone and to a screen reader."""

from __future__ import annotations

from torchobs.diagnosis import text_format
from torchobs.report.axes import drawn
from torchobs.report.charts import stacked
from torchobs.report.content import (
    Block,
    Code,
    Document,
    Figures,
    Item,
    Items,
    Section,
    Shares,
    Table,
    Text,
)
from torchobs.report.html import EMPTY, Html, heading_cell, joined, named, number_cell, table, tag
from torchobs.report.style import style_sheet

SYMBOLS = {"info": ("good", "✓"), "warning": ("notice", "▲"), "error": ("bad", "✕")}
"""Severity to CSS class and symbol"""
_WORDS = {"info": "Note", "warning": "Warning", "error": "Error"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page(document: Document) -> str:
    """Return the file's text."""
    return f"<!doctype html>\n{tag('html', _head(document), _body(document), lang='en')}\n"


def fragment(document: Document) -> str:
    """Return the report for a notebook's output cell: in a frame, so that its style stays its own."""
    return tag(
        "iframe",
        srcdoc=page(document),
        class_="torchobs",
        style="width:100%;height:44rem;border:1px solid #8888",
        title=document.title,
    )


def _head(document: Document) -> Html:
    _, symbol = SYMBOLS[document.badge[0]]
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{symbol} {document.title} – torchobs"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(style_sheet("torchobs.report", "report.css"))),
    )


def _body(document: Document) -> Html:
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


def _section(one: Section) -> Html:
    blocks = [_block(block) for block in one.blocks]
    class_ = "wide-charts" if one.wide else None
    return tag("section", tag("h2", one.title, id=f"{one.name}-title"), tag("div", *blocks, class_="blocks"), id=one.name,
               aria_labelledby=f"{one.name}-title", class_=class_)  # fmt: skip


def _block(block: Block) -> Html:  # one return for each kind
    if isinstance(block, Text):
        return tag("p", block.words, class_=f"text {block.tone}".rstrip())
    if isinstance(block, Code):
        return tag("pre", tag("code", block.words), tabindex="0")
    if isinstance(block, Items):
        return tag("ul", *map(_item, block.items), class_="findings")
    if isinstance(block, Figures):
        parts = [
            tag("div", tag("dt", one.name), tag("dd", one.value), tag("dd", one.more, class_="more") if one.more else EMPTY)
            for one in block.figures
        ]
        return tag("dl", *parts, class_="figures")
    if isinstance(block, Table):
        return _table(block)
    return _shares(block) if isinstance(block, Shares) else drawn(block)


def _item(one: Item) -> Html:
    class_, symbol = SYMBOLS[one.severity]
    mark = tag("span", symbol, role="img", aria_label=_WORDS[one.severity], class_="symbol")
    link = joined([" ", tag("a", "See the data", href=f"#{one.section}")]) if one.section else EMPTY
    return tag("li", mark, tag("span", one.words, link), class_=class_)


def _table(block: Table) -> Html:
    head = [heading_cell(name, "" if index in block.words else "n") for index, name in enumerate(block.head)]
    body = [
        tag("tr", *(_cell(cell, index, words=index in block.words) for index, cell in enumerate(row))) for row in block.rows
    ]
    return table(block.caption, block.caption, head, body)


def _cell(content: str, index: int, *, words: bool) -> Html:
    if not index:
        return tag("th", content, scope="row")
    return tag("td", content, class_="words") if words else number_cell(content)


def _shares(block: Shares) -> Html:
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
