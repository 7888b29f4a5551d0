"""Lines that stay the same up to their numbers: woven together with new ones at every scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchobs.exporter.prometheus.name_registry import Family


class Chunk(NamedTuple):
    """The lines that somebody has of a family, each with its line break in front of it."""

    family: Family
    brief: str
    lines: str
    created: str = ""
    """those of the classic format's family of ``_created`` samples"""


class LineRange(NamedTuple):
    """Where the lines of a family are: from ``begin`` to before ``end``."""

    family: Family
    brief: str
    begin: int
    end: int
    created: str = ""


def weave(prefixes: Sequence[str], texts: Sequence[str], spans: Iterable[LineRange]) -> list[Chunk]:
    """Return the lines by family. A prefix is a line up to its number; there are as many ``texts``."""
    parts = [""] * (2 * len(texts))
    parts[::2], parts[1::2] = prefixes, texts
    return [Chunk(family, brief, "".join(parts[2 * begin : 2 * end]), created) for family, brief, begin, end, created in spans]
