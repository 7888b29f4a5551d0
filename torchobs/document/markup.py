"""HTML safe from injection: every string that this module did not create is escaped; and style sheets."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from torchobs.support import text as text_format

if TYPE_CHECKING:
    from collections.abc import Iterable

_VOID = frozenset({"meta", "link", "rect", "path", "input"})
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


def moment(words: str, at_s: float) -> Html:
    """Return words for a moment, with the moment attached; ``at_s``: Unix time."""
    return tag("time", words, datetime=text_format.moment(at_s, "%Y-%m-%dT%H:%M:%S%z"))


@cache
def asset(*names: str) -> str:
    """Return files of this package, such as style sheets, as one text: it is one request."""
    return "\n".join(files(__package__).joinpath(name).read_text(encoding="utf-8") for name in names)
