"""Leave series off the page while they have their default value, and have a new counter scraped at zero first.

Most counters of a closed set never count anything in a run: no loss scaler, no compilation, no failed probe. They are in the
flight file from the start, but on the page only from their first event on. A counter whose first sample is 1 has an
``increase()`` of 0; so the page shows it at 0 until every expected scraper has received such a page, and its value then.
A series that has counted before the exporter first sees its rank is shown as it is, because an earlier exporter may have
served it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.catalog import cumulative

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.exporter.prometheus.series_lines import Labelled

_KNOWN = -1
"""In place of a snapshot's number: the value may be shown to every scraper"""


class QuietSeries:
    """The quiet series of one rank that are on the page, with the snapshot in which each first appeared."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}
        self._seen = False
        self._now, self._acknowledged = 0, 0
        self.holding = False
        """whether a counter was shown at 0 that has counted"""

    def begin(self, now: int, acknowledged: int) -> None:
        """Begin the page of snapshot ``now``; every expected scraper has received that of ``acknowledged`` or a newer one."""
        self._now, self._acknowledged, self.holding = now, acknowledged, False

    def end(self) -> None:
        """End the page: counters that begin to count from now on are shown at 0 first."""
        self._seen = True

    def numbers(self, entry: Labelled, values: Sequence[float]) -> Sequence[float]:
        """Return the numbers to show for a series with ``values``; none while the series is off the page."""
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
