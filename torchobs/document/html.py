"""A document as HTML: a report as one file without script or request, the sections of the live page, a notebook's output.

The same offline, printed, on a phone and to a screen reader.
"""

from __future__ import annotations

from torchobs.catalog.findings import BADGES
from torchobs.catalog.model import Severity
from torchobs.document import blocks, charts
from torchobs.document.blocks import Cell
from torchobs.document.charts import colour_of, drawn, stacked
from torchobs.document.markup import EMPTY, Html, asset, exact, joined, moment, named, tag, text, unseen
from torchobs.support import text as text_format

SYMBOLS = {"info": ("good", "✓"), "warning": ("notice", "▲"), "error": ("bad", "✕"), "wait": ("quiet", "…")}
"""Severity to CSS class and symbol"""
STATE_SYMBOLS = {"alive": "●", "finished": "✓", "unresponsive": "▲", "hung": "▲", "failed": "✕", "lost": "✕"}
"""Symbols beside the state's name, so that its meaning does not depend on colour"""
_WORDS = {"info": "Note", "warning": "Warning", "error": "Error"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_LEAST_NAMED = 0.005
_MOST_TITLE = 80
_PAIR = 2


def page(document: blocks.Document) -> str:
    """Return a report as the text of a file."""
    head = [
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("style", Html(asset("shared.css", "report.css"))),
    ]
    links = [tag("li", tag("a", part.title, href=f"#{part.name}")) for part in document.sections]
    parts = [tag("section", content(part), id=part.name, aria_labelledby=f"{part.name}-title") for part in document.sections]
    body = tag(
        "body",
        tag("a", "Skip to the findings", href=f"#{document.sections[0].name}" if document.sections else "#main", class_="skip"),
        tag("header", tag("h1", named(document.title)), tag("p", document.subtitle, class_="subtitle")),
        tag("main", verdict(document), tag("nav", tag("ul", *links), aria_label="Sections"), *parts, id="main"),
        footer(document),
    )
    return whole(title(document), head, body)


def whole(title: str, head: list[Html], body: Html) -> str:
    """Return the text of a page; ``head`` is added to the head that every page has."""
    every = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', *every, *head), body, lang='en')}\n"


def fragment(document: blocks.Document) -> str:
    """Return the report for a notebook's output cell: in a frame, so that its style stays its own."""
    return tag(
        "iframe",
        srcdoc=page(document),
        class_="torchobs",
        style="width:100%;height:44rem;border:1px solid #8888",
        title=document.title,
    )


def title(document: blocks.Document) -> str:
    """Return the document's title, which a background tab shows."""
    _, symbol = SYMBOLS[document.badge[0]]
    return f"{symbol} {document.title[:_MOST_TITLE]} – torchobs"


def verdict(document: blocks.Document) -> Html:
    """Return the verdict: its badge, the sentence, and the gist for screen readers."""
    class_, symbol = SYMBOLS[document.badge[0]]
    badge = tag("span", f"{symbol} {document.badge[1]}", class_="badge")
    gist = tag("p", document.gist, class_="unseen", role="status", aria_live="polite") if document.gist else EMPTY
    return joined([tag("p", badge, " ", document.headline, class_=f"sentence {class_}"), gist])


def footer(document: blocks.Document) -> Html:
    """Return the last lines."""
    return tag("footer", *(tag("p", words) for words in document.footer))


def content(part: blocks.Section) -> Html:
    """Return a section's title and blocks; nothing if it has none."""
    if not part.blocks:
        return EMPTY
    heading = tag("h2", part.title, id=f"{part.name}-title") if part.title else EMPTY
    if part.cards:
        cards = (tag("div", _card(block), class_="card") for block in part.blocks)
        return joined([heading, tag("div", *cards, class_="cards")])
    class_ = "blocks wide-charts" if part.wide else "blocks"
    return joined([heading, tag("div", *map(_block, part.blocks), class_=class_)])


def _card(block: blocks.Block) -> Html:
    """Return a block in small: a curve without axes, a table of pairs as a list, another table as it is."""
    if isinstance(block, blocks.LineChart):
        value = exact(block.rounded(block.last) if block.last is not None else text_format.NONE, block.last)
        return joined([tag("h3", block.name), tag("p", value, class_="value"), charts.small(block)])
    if isinstance(block, blocks.Table) and len(block.head) == _PAIR:
        return joined([tag("h3", block.name), _terms([(text(name), text(value)) for name, value in block.rows])])
    return joined([tag("h3", block.caption), _shares(block)]) if isinstance(block, blocks.Shares) else _block(block)


def _block(block: blocks.Block) -> Html:  # one return for each kind
    if isinstance(block, blocks.Text):
        return tag("p", block.words, class_=f"text {block.tone}".rstrip())
    if isinstance(block, blocks.Code):
        return tag("pre", tag("code", block.words), tabindex="0")
    if isinstance(block, blocks.Items):
        return tag("ul", *map(_item, block.items), class_="findings")
    if isinstance(block, blocks.Figures):
        return _figures(block)
    if isinstance(block, blocks.Shares):
        return tag("figure", tag("figcaption", block.caption), _shares(block))
    return _table(block) if isinstance(block, blocks.Table) else drawn(block)


def _figures(block: blocks.Figures) -> Html:
    """Return key figures side by side."""
    parts = (
        [tag("dt", name), tag("dd", exact(value, number)), tag("dd", more, class_="more") if more else EMPTY]
        for name, value, more, number in block.figures
    )
    return tag("dl", *(tag("div", *part) for part in parts), class_="figures")


def _item(item: blocks.Item) -> Html:
    class_, symbol = SYMBOLS[item.severity]
    label = _WORDS[item.severity] if item.run is None else BADGES[Severity[item.severity.upper()]]
    mark = tag("span", symbol, role="img", aria_label=f"{label}:", class_="symbol")
    link = joined([" ", tag("a", "See the data", href=f"#{item.section}")]) if item.section else EMPTY
    run = EMPTY if item.run is None else joined([_cell(item.run), " "])
    return tag("li", mark, " ", tag("span", run, item.words, link), class_=class_)


def _table(block: blocks.Table) -> Html:
    """Return a table in a container that scrolls sideways, also by keyboard, with what belongs to it below."""
    head = [
        tag("th", _cell(name), scope="col", class_=None if index in block.words else "n", aria_sort=_tone(name))
        for index, name in enumerate(block.head)
    ]
    parts = [
        tag("caption", block.caption),
        tag("thead", tag("tr", *head)),
        tag("tbody", *(_row(row, block.words) for row in block.rows)),
        tag("tfoot", _row(block.foot, block.words)) if block.foot else EMPTY,
    ]
    label = block.name or block.caption
    listed = tag("div", tag("table", *parts), class_="wide", role="region", aria_label=label, tabindex="0")
    keys = [joined([tag("span", _key(name), name, class_="entry"), " "]) for name in block.keys]
    links = [joined([_cell(page), " "]) for page in block.pages]
    below = [tag("p", *keys, class_="legend")] if keys else []
    below += [tag("nav", *links, aria_label=f"Pages of {block.name.lower()}", class_="pager")] if links else []
    return tag("div", listed, *below) if below else listed


def _row(row: tuple[str, ...], words: frozenset[int]) -> Html:
    """Return a row, which has the first cell's tone."""
    name, *cells = row
    heading = _cell(name) if isinstance(name, Cell) else named(name)
    shown = [
        tag("td", _cell(cell), class_=" ".join(filter(None, ("words" if index in words else "n", _class(cell)))))
        for index, cell in enumerate(cells, 1)
    ]
    return tag("tr", tag("th", heading, scope="row", class_=None if 0 in words else "n"), *shown, class_=_tone(name))


def _tone(cell: str) -> str | None:
    return (cell.tone or None) if isinstance(cell, Cell) else None


def _class(cell: str) -> str | None:
    tone = _tone(cell)
    return None if tone in STATE_SYMBOLS else SYMBOLS[tone][0] if tone in SYMBOLS else tone


def _cell(cell: str) -> Html:
    if not isinstance(cell, Cell):
        return text(cell)
    words = exact(cell.words, cell.exact)
    if cell.at_s is not None:
        words = moment(cell.words, cell.at_s)
    if cell.link is not None:
        current = "true" if cell.link.current else None
        words = tag("a", words, href=cell.link.href, aria_label=cell.link.label or None, aria_current=current)
    if cell.shares:
        parts = ", ".join(f"{name} {text_format.percent(part)}" for name, part in cell.shares if part >= _LEAST_NAMED)
        words = joined([stacked(cell.shares), tag("span", words, aria_hidden="true"), unseen(parts)])
    if cell.tone in STATE_SYMBOLS:
        symbol = tag("span", STATE_SYMBOLS[cell.tone], aria_hidden="true")
        words = tag("span", symbol, " ", words, class_=f"state {cell.tone}")
    elif cell.tone in _WORDS:
        symbol = tag("span", SYMBOLS[cell.tone][1], role="img", aria_label=f"{_WORDS[cell.tone]}:")
        words = joined([symbol, " ", words])
    return joined([words, " ", tag("span", cell.more, class_="why")]) if cell.more else words


def _key(name: str) -> Html:
    """Return the colour of a part, for the words beside it."""
    return tag("i", class_=f"key {colour_of(name)}")


def _shares(block: blocks.Shares) -> Html:
    """Return parts of a whole as a bar, with a list of them, the largest first."""
    parts, whole = block.largest_first(), sum(block.parts.values())
    lines = [
        (joined([_key(f"{block.colours}{name}"), name]), joined([exact(text_format.duration(seconds), seconds), f" ({share})"]))
        for name, seconds, share in parts
    ]
    return joined([stacked([(f"{block.colours}{name}", seconds / whole) for name, seconds, _ in parts]), _terms(lines)])


def _terms(lines: list[tuple[Html, Html]]) -> Html:
    """Return a list of terms, each with its value."""
    return tag("dl", *(tag("div", tag("dt", term), tag("dd", value)) for term, value in lines), class_="terms")
