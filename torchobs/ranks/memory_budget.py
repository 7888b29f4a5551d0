"""How much memory the exporter may take, and what of it is taken: a sidecar that the kernel ends tells nobody anything.

The limit is that of its memory cgroup, which is the container's, or ``--memory-limit``. What a flight file and a line of the
page take is reckoned from what they hold, by factors that were measured (Python 3.11, x86-64: resident memory after two scrapes
in two formats, less that of an exporter without ranks) and are rather too high than too low.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

RESERVED = 48 << 20
"""Bytes for everything else: 26 MiB at rest, a file of 16 MiB being read, the API, the live page, a crowd of connections."""

PUSH = 16 << 20
"""Bytes that the push takes beside that: its queue, the libraries. Each series takes nearly as much again as with its file."""

RANK = 120 << 10
"""Bytes for a rank without series: 27 KiB for its file, 92 KiB for what the exporter says of it, in two formats."""

SERIES = 600
"""Bytes for a series on the page, beside its lines"""

LINE = 560
"""Bytes for a line, beside its text: 400, and its suffix and bucket"""

CHARACTER = 8
"""Bytes for each character of a line: made up once for each format, then in a page, which is joined and compressed."""


class Memory:
    """What is planned with. The thread that scans sets ``files``, the one that renders sets ``page``."""

    __slots__ = ("files", "most_files", "most_page", "page")

    def __init__(self, limit: float = inf, *, pushes: bool = False) -> None:
        """``limit``: bytes, for everything. However little it is, a sixth of it is given out. ``pushes``: over OTLP."""
        room = max(limit - RESERVED - PUSH * pushes, limit / 6)
        self.most_files, self.most_page = (0.22 if pushes else 0.4) * room, 0.6 * room
        """bytes that flight files and lines may take: of what a series takes a third is its file's"""
        self.files = 0
        """bytes that the flight files in use take"""
        self.page = 0
        """bytes that the lines of the page take"""

    def spend(self, size: int, *, own: bool = True) -> bool:
        """Take so much for lines of the page, if there is as much. The last quarter is for torchobs' ``own`` series."""
        if self.page + size > (self.most_page if own else 0.75 * self.most_page):
            return False
        self.page += size
        return True


def of_lines(name: str, labels: Iterable[tuple[str, str]], lines: int) -> int:
    """Return the bytes that a series takes on the page: so many lines, with these labels."""
    length = len(name) + sum(len(key) + len(value) + 4 for key, value in labels)
    return SERIES + lines * (LINE + CHARACTER * length)
