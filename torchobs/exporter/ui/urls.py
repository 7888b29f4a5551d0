"""URLs of the page's views, and links to them."""

from __future__ import annotations

from urllib.parse import parse_qs, urlencode

from torchobs.exporter.ui.view_model import Choice
from torchobs.report.html import Html, tag

STREAM_PATH = "/live/stream"

_MOST_QUERY = 16_000
"""Enough for the longest name of a run: it is from a header of 4 KiB, and each byte may take three in a query"""

_MOST_PAGE = 1000


def choice_of(query: str) -> Choice:
    """Return the choice in a query string. Invalid parts are ignored, never an error."""
    try:
        fields = parse_qs(query[:_MOST_QUERY], max_num_fields=16)
    except ValueError:
        return Choice()
    given = {name: fields[name][0] for name in ("run", "rank", "sort", "layers") if name in fields}
    page = fields.get("page", ["1"])[0]
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
