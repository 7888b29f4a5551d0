"""Limits of the number of series on the page, and counts of what was dropped."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.exporter.prometheus.name_registry import Family, family_of, sample_name
from torchobs.ranks.memory_budget import MOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchobs.exporter.prometheus.series_lines import Labelled
    from torchobs.flight.format.series import Series

REASONS = catalog.EXPORTER_SERIES_DROPPED.attributes[0].values
_NAMES = 4096


class SeriesLimits:
    """Limits of one page: series of a rank (a histogram is one), and lines of all ranks."""

    def __init__(self, per_rank: int = 20_000, total: int = MOST, drop: Sequence[str] = ()) -> None:
        """``total``: lines of all ranks; the last quarter is reserved for torchobs' own series.

        ``drop``: names of samples on the page, or prefixes of them followed by ``*``.
        """
        self.dropped = Counter(dict.fromkeys(REASONS, 0))
        """series not served, by reason"""
        self.taken = 0
        """lines on the page"""
        self._per_rank, self._total = per_rank, total
        self._listed = _listed(drop) if drop else None
        self._was_full = False

    def refusal(self, series: Series, in_rank: int) -> str | None:
        """Return the reason not to admit another series of a rank that has ``in_rank``; ``None`` to admit it."""
        if self._listed is not None and self._listed(family_of(series.name, series.kind, series.unit)):
            return "drop_list"
        if in_rank >= self._per_rank:
            return "limit"
        if self.taken >= self._total:
            self._was_full = True
            return "total_limit"
        return None

    def take(self, entry: Labelled) -> int:
        """Reserve room for a series; return its number of lines, 0 if there is no room."""
        lines = len(entry.buckets) + 2 if entry.buckets else 1
        if self.taken + lines > (self._total if entry.series.scope is None else 0.75 * self._total):
            self._was_full = True
            return 0
        self.taken += lines
        return lines

    def give_back(self, lines: int) -> bool:
        """Free the room of ranks that are gone; return True if series were dropped for lack of room."""
        self.taken -= lines
        waiting, self._was_full = self._was_full and lines > 0, False
        return waiting


def _listed(drop: Sequence[str]) -> Callable[[Family], bool]:
    names = frozenset(text for text in drop if not text.endswith("*"))
    prefixes = tuple(text.removesuffix("*") for text in drop if text.endswith("*"))

    @lru_cache(_NAMES)
    def listed(family: Family) -> bool:
        name = sample_name(family)
        return name in names or name.startswith(prefixes)

    return listed
