"""Style sheets: what the live page and reports have in common, before what is a page's own. One text, for it is one request."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def style_sheet(package: str, *path: str) -> str:
    """Return the shared rules, followed by those of a file in a package."""
    own = files(package)
    for name in path:
        own = own.joinpath(name)
    return "\n".join(sheet.read_text(encoding="utf-8") for sheet in (files(__package__).joinpath("shared.css"), own))
