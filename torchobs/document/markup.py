"""HTML safe from injection: every string that this module did not create is escaped; and style sheets."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_VOID = frozenset({"meta", "link", "rect", "path"})
_MOST_NAME = 160


class Html(str):
    """HTML that needs no escaping."""

    __slots__ = ()


EMPTY = Html("")


def text(value: str) -> Html:
    """Return text as escaped HTML; what UTF-8 cannot encode becomes a question mark."""
    return value if isinstance(value, Html) else Html(escape(value.encode("utf-8", "replace").decode()))


def joined(parts: Iterable[str], between: str = "") -> Html:
    """Return the parts joined; plain strings among them are escaped."""
    return Html(text(between).join(map(text, parts)))


def tag(name: str, /, *children: str, **attributes: str | bool | None) -> Html:
    """Return an element. ``class_`` means ``class``, ``aria_label`` ``aria-label``; ``None`` and ``False`` are left out."""
    head = name
    for attribute, value in attributes.items():
        if value is not None and value is not False:
            written = attribute.removesuffix("_").replace("_", "-")
            head += f" {written}" if value is True else f' {written}="{text(value)}"'
    return Html(f"<{head}/>") if name in _VOID and not children else Html(f"<{head}>{joined(children)}</{name}>")


def exact(rounded: str, value: float | None) -> Html:
    """Return a rounded number with the exact value attached."""
    return text(rounded) if value is None else tag("data", rounded, value=repr(value))


def named(name: str) -> Html:
    """Return a name given by users: with its own direction of writing, and shortened if long."""
    if len(name) <= _MOST_NAME:
        return tag("bdi", name)
    return tag("bdi", f"{name[:_MOST_NAME]}…", title=name[:1000])


def unseen(words: str) -> Html:
    """Return text for screen readers only."""
    return tag("span", words, class_="unseen")


def definitions(lines: Iterable[tuple[str, str]], class_: str | None = None) -> Html:
    """Return a list of terms, each with its value; nothing if there are none."""
    items = [tag("div", tag("dt", term), tag("dd", value)) for term, value in lines]
    return tag("dl", *items, class_=class_) if items else EMPTY


def heading_cell(words: str, class_: str = "", order: str | None = None) -> Html:
    """Return the heading of a column; ``order``: how the table is sorted, if by this column."""
    return tag("th", words, scope="col", class_=class_ or None, aria_sort=order)


def number_cell(*content: str) -> Html:
    """Return a cell of a column of numbers."""
    return tag("td", *content, class_="n")


def table(name: str, caption: str, head: Sequence[Html], body: Sequence[Html], foot: Sequence[Html] = ()) -> Html:
    """Return a table in a container that scrolls sideways, also by keyboard."""
    parts = [tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", *body)]
    parts += [tag("tfoot", *foot)] if foot else []
    return tag("div", tag("table", *parts), class_="wide", role="region", aria_label=name, tabindex="0")


@cache
def style_sheet(package: str, *path: str) -> str:
    """Return what the live page and reports have in common, and a file in a package: one text, for it is one request."""
    own = files(package)
    for name in path:
        own = own.joinpath(name)
    return "\n".join(sheet.read_text(encoding="utf-8") for sheet in (files(__package__).joinpath("shared.css"), own))
