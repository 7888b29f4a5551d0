"""The HTML document: complete without JavaScript, with one script and one style sheet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs._version import __version__
from torchobs.exporter.ui import sections
from torchobs.exporter.ui.html import EMPTY, Html, tag
from torchobs.exporter.ui.urls import stream_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.exporter.ui.view_model import Model

STYLE_PATH, SCRIPT_PATH = "/live/live.css", "/live/live.js"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Response headers: forbid inline script and style, and framing."""


def page(model: Model, problems: Sequence[str], links: Sequence[tuple[str, str]]) -> Html:
    """Return the document. ``links``: the exporter's other pages, as (path, name)."""
    body = tag(
        "body",
        tag("a", "Skip to the ranks", href="#ranks", class_="skip"),
        _header(model, links),
        tag(
            "main", *(tag("p", tag("strong", problem), role="alert", class_="problem") for problem in problems), *_parts(model)
        ),
        tag("footer", tag("p", f"torchobs {__version__}")),
        data_stream=stream_of(model.choice),
    )
    return Html(f"<!doctype html>\n{tag('html', _head(model), body, lang='en')}\n")


def _head(model: Model) -> Html:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", sections.title(model)),
        tag("link", rel="icon", href="data:,"),
        tag("link", rel="stylesheet", href=f".{STYLE_PATH}"),
        tag("script", src=f".{SCRIPT_PATH}", defer=True),
    )


def _header(model: Model, links: Sequence[tuple[str, str]]) -> Html:
    status = tag("p", "As of when it was loaded", id="link", class_="link", data_state="still")
    pause = tag("button", "Pause", type="button", id="pause", hidden=True)
    others = tag("nav", *(tag("a", words, href=f".{path}") for path, words in links), aria_label="Elsewhere")
    return tag("header", tag("h1", sections.heading(model), id="heading"), tag("div", status, pause, class_="controls"), others)


def _parts(model: Model) -> list[Html]:
    found = sections.rendered(model)
    return [
        tag("section", content, id=name, aria_label=sections.PARTS[name][0], tabindex="-1" if name == "ranks" else None)
        for name, content in found.items()
    ] or [EMPTY]
