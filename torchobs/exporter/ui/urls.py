"""URLs and links of the page's views, and the markup of tables."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from torchobs.exporter.ui.html import EMPTY, Html, tag
from torchobs.exporter.ui.view_model import Choice

if TYPE_CHECKING:
    from collections.abc import Sequence

STREAM_PATH = "/live/stream"

_MOST_QUERY = 16_000
"""Enough for the longest name of a run: it is from a header of 4 KiB, and each byte may take three in a query"""

_MOST_PAGE = 1000


def choice_of(query: str) -> Choice:
    """Return the choice in a query string. Invalid parts are ignored, never an error."""
    try:
        found = parse_qs(query[:_MOST_QUERY], max_num_fields=16)
    except ValueError:
        return Choice()
    given = {name: found[name][0] for name in ("run", "rank", "sort", "layers") if name in found}
    page = found.get("page", ["1"])[0]
    return Choice(**given, page=min(int(page), _MOST_PAGE) if page.isdecimal() and page.isascii() else 1)


def query_of(choice: Choice) -> str:
    """Return the query string for a choice; empty for the default one."""
    chosen = {name: str(value) for name, value in choice._asdict().items() if value != Choice._field_defaults[name]}
    return f"?{urlencode(chosen, errors='replace')}" if chosen else ""


def stream_of(choice: Choice) -> str:
    """Return the URL of the event stream for a choice."""
    return f".{STREAM_PATH}{query_of(choice)}"


def link(choice: Choice, words: str, section: str, *, label: str | None = None, current: bool = False) -> Html:
    """Return a link to the page with another choice."""
    target = f"./{query_of(choice)}#{section}"
    return tag("a", words, href=target, aria_label=label, aria_current="true" if current else None)


def table(name: str, caption: str, head: Sequence[Html], body: Sequence[Html], foot: Sequence[Html] = ()) -> Html:
    """Return a table in a container that scrolls sideways, also by keyboard."""
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", *head)),
            tag("tbody", *body),
            tag("tfoot", *foot) if foot else EMPTY,
        ),
        class_="wide",
        role="region",
        aria_label=name,
        tabindex="0",
    )
