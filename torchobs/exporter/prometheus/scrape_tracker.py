"""Track the scrapers and the snapshot each has received, so that a stopping exporter can wait for them."""

from __future__ import annotations

from typing import NamedTuple

_REMEMBERED_S = 300.0
_MISSED = 2.5
"""Scrape intervals without a scrape after which a scraper is taken for gone."""

_LIMIT = 64


class _Scraper(NamedTuple):
    last_s: float
    interval_s: float | None
    declared: bool
    number: int
    """newest snapshot of which it has received a page"""
    final: int
    """newest snapshot of which it has received a page with all values"""


class ScrapeTracker:
    """The recent scrapers, by address and user agent. Times are CLOCK_MONOTONIC in seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, _Scraper] = {}
        self.last_s: float | None = None

    def note(self, who: str, number: int, now_s: float, *, declared: bool, final: bool = True) -> None:
        """Note that a client has received the page of a snapshot.

        ``declared``: it sent a scrape timeout, as scrapers do; ``final``: the page showed every value.
        """
        before = self._seen.pop(who, None)
        interval_s = now_s - before.last_s if before else None
        whole = number if final else before.final if before else 0
        self._seen[who] = _Scraper(now_s, interval_s, declared, number, whole)
        self.last_s = now_s
        while len(self._seen) > _LIMIT:
            del self._seen[next(iter(self._seen))]

    def waiting(self, number: int, now_s: float) -> list[str]:
        """Return the expected scrapers that have not received a final page as new as ``number``."""
        return [who for who, scraper in self._seen.items() if _expected(scraper, now_s) and scraper.final < number]

    def got(self, number: int) -> bool:
        """Return True if any scraper has received a final page as new as ``number``."""
        return any(scraper.final >= number for scraper in self._seen.values())

    def acknowledged(self, now_s: float) -> int:
        """Return the newest snapshot number such that all expected scrapers have its page or a newer one."""
        expected = [scraper.number for scraper in self._seen.values() if _expected(scraper, now_s)]
        return min(expected or [scraper.number for scraper in self._seen.values()], default=0)


def _expected(scraper: _Scraper, now_s: float) -> bool:
    if not scraper.declared and scraper.interval_s is None:
        return False  # a person with curl
    patience_s = _REMEMBERED_S if scraper.interval_s is None else min(_MISSED * scraper.interval_s + 5.0, _REMEMBERED_S)
    return now_s - scraper.last_s <= patience_s
