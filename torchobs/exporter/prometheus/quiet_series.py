"""Series that are left off the page while they say nothing; a counter that begins to count is scraped at zero first.

Most counters of a closed set never count anything in a run: no loss scaler, no compilation, no probe that failed. They are in
the flight file from the start, but on the page from their first event on. A counter whose first sample is 1 has an
``increase()`` of 0, so the page shows it at 0 until every scraper that is expected has got such a page, and its value then.
A series that counts already when the exporter sees its rank for the first time is shown as it is: that exporter cannot know
what was scraped before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.catalog import cumulative

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.exporter.prometheus.series_lines import Labelled

_KNOWN = -1
"""In the place of a snapshot's number: every scraper may see the value"""


class QuietSeries:
    """The quiet series of one rank that have said something. Numbers are those of snapshots."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}
        self._seen = False
        self._now, self._acknowledged = 0, 0
        self.holding = False
        """whether a counter was written as 0 that has counted"""

    def begin(self, now: int, acknowledged: int) -> None:
        """A page of snapshot ``now`` is written; every expected scraper has got one of ``acknowledged`` or newer."""
        self._now, self._acknowledged, self.holding = now, acknowledged, False

    def end(self) -> None:
        """It is written: what is zero in it was seen to be."""
        self._seen = True

    def numbers(self, entry: Labelled, values: Sequence[float]) -> Sequence[float]:
        """Return what is to be shown of a series whose numbers are ``values``; nothing while it is absent."""
        key = id(entry.series)
        since = self._since.get(key)
        if since is None:
            if all(value == entry.quiet for value in values):
                return ()
            since = self._since[key] = self._now if self._seen and cumulative(entry.series.kind) else _KNOWN
        if since <= self._acknowledged or since == _KNOWN:
            return values
        self.holding = True
        return (0.0,) * len(values)
