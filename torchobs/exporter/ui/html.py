"""HTML that cannot be forged: whatever is not made by this module becomes text."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_VOID = frozenset({"meta", "link", "rect", "path"})
_MOST_NAME = 160


class Html(str):
    """A piece of HTML, escaped already."""

    __slots__ = ()


EMPTY = Html("")


def text(value: str) -> Html:
    """Return text as HTML; what UTF-8 cannot hold becomes a question mark."""
    return value if isinstance(value, Html) else Html(escape(value.encode("utf-8", "replace").decode()))


def joined(parts: Iterable[str], between: str = "") -> Html:
    """Return pieces, one after the other; plain strings among them are text."""
    return Html(text(between).join(map(text, parts)))


def tag(name: str, /, *children: str, **attributes: str | bool | None) -> Html:
    """Return an element. ``class_`` is ``class``, ``aria_label`` is ``aria-label``; ``None`` and ``False`` are left out."""
    head = name
    for attribute, value in attributes.items():
        if value is not None and value is not False:
            called = attribute.removesuffix("_").replace("_", "-")
            head += f" {called}" if value is True else f' {called}="{text(value)}"'
    return Html(f"<{head}/>") if name in _VOID else Html(f"<{head}>{joined(children)}</{name}>")


def exact(shown: str, value: float | None) -> Html:
    """Return a number as it is shown, with the exact one beside it."""
    return text(shown) if value is None else tag("data", shown, value=repr(value))


def named(name: str) -> Html:
    """Return a name that somebody else chose: in its own direction of writing, and not for ever long."""
    if len(name) <= _MOST_NAME:
        return tag("bdi", name)
    return tag("bdi", f"{name[:_MOST_NAME]}…", title=name[:1000])


def unseen(words: str) -> Html:
    """Return words for those who hear the page."""
    return tag("span", words, class_="unseen")
