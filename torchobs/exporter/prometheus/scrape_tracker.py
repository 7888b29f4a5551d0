"""Who scrapes, and what each of them has got: an exporter that leaves waits for those it has seen."""

from __future__ import annotations

from typing import NamedTuple

_REMEMBERED_S = 300.0
_MISSED = 2.5
"""Intervals without a scrape after which a scraper is gone."""

_LIMIT = 64


class _Scraper(NamedTuple):
    last_s: float
    interval_s: float | None
    declared: bool
    number: int
    """of the newest snapshot that it has got a page of"""
    final: int
    """of the newest one that it has got all of"""


class ScrapeTracker:
    """The scrapers seen lately, by address and user agent. Times are the exporter's CLOCK_MONOTONIC in seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, _Scraper] = {}
        self.last_s: float | None = None

    def note(self, who: str, number: int, now_s: float, *, declared: bool, final: bool = True) -> None:
        """Note that somebody has got the page of a snapshot.

        ``declared``: it sent a scrape timeout, as scrapers do; ``final``: the page showed all that there was.
        """
        before = self._seen.pop(who, None)
        interval_s = now_s - before.last_s if before else None
        whole = number if final else before.final if before else 0
        self._seen[who] = _Scraper(now_s, interval_s, declared, number, whole)
        self.last_s = now_s
        while len(self._seen) > _LIMIT:
            del self._seen[next(iter(self._seen))]

    def waiting(self, number: int, now_s: float) -> list[str]:
        """Return who is still expected and has not all of a snapshot as new as ``number``."""
        return [who for who, scraper in self._seen.items() if _expected(scraper, now_s) and scraper.final < number]

    def got(self, number: int) -> bool:
        """Return True if anyone has got all of a snapshot as new as ``number``."""
        return any(scraper.final >= number for scraper in self._seen.values())

    def acknowledged(self, now_s: float) -> int:
        """Return the number of the newest snapshot of which, or of a newer one, all that are expected have got a page."""
        expected = [scraper.number for scraper in self._seen.values() if _expected(scraper, now_s)]
        return min(expected or [scraper.number for scraper in self._seen.values()], default=0)


def _expected(scraper: _Scraper, now_s: float) -> bool:
    if not scraper.declared and scraper.interval_s is None:
        return False  # a person with curl
    patience_s = _REMEMBERED_S if scraper.interval_s is None else min(_MISSED * scraper.interval_s + 5.0, _REMEMBERED_S)
    return now_s - scraper.last_s <= patience_s
