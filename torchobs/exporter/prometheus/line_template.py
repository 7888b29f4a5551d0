"""Combine cached line prefixes with the numbers of a scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchobs.exporter.prometheus.name_registry import Family


class Chunk(NamedTuple):
    """Some of a family's lines, each preceded by its line break."""

    family: Family
    brief: str
    lines: str
    created: str = ""
    """lines of the ``_created`` family that the classic format has"""


class LineRange(NamedTuple):
    """Range of a family's lines: from ``begin`` to before ``end``."""

    family: Family
    brief: str
    begin: int
    end: int
    created: str = ""


def weave(prefixes: Sequence[str], texts: Sequence[str], spans: Iterable[LineRange]) -> list[Chunk]:
    """Return the lines by family. A prefix is a line up to its number; ``texts`` has one number for each."""
    parts = [""] * (2 * len(texts))
    parts[::2], parts[1::2] = prefixes, texts
    return [Chunk(family, brief, "".join(parts[2 * begin : 2 * end]), created) for family, brief, begin, end, created in spans]
