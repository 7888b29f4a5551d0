"""Poll the exporter and Prometheus: the newest page, the alerts, and when each of them was first seen."""

from __future__ import annotations

import contextlib
import time
from collections import deque

from examples._demo import page
from examples._demo.page import Page, Row
from examples._demo.prometheus import Alert, Prometheus

RATE_PAGES = 5  # rates are taken over so many pages, some seconds: long enough to be steady


class Watcher:
    """Polls an exporter, and a Prometheus if there is one."""

    def __init__(self, address: str, prometheus: Prometheus | None) -> None:
        self._url, self._prometheus = f"http://{address}/metrics", prometheus
        self._pages: deque[Page] = deque(maxlen=RATE_PAGES)
        self._started = time.monotonic()
        self.alerts: list[Alert] = []
        self.first_seen: dict[tuple[str, str], float] = {}
        """Seconds from the start of polling, by (alert, state)."""

    def poll(self) -> None:
        """Poll both once; one that does not answer just now is left out until the next time."""
        with contextlib.suppress(OSError, ValueError):
            self._pages.append(page.parse(page.fetch(self._url), time.monotonic()))
        if self._prometheus:
            with contextlib.suppress(OSError, ValueError):
                self.alerts = self._prometheus.alerts()
        for alert in self.alerts:
            self.first_seen.setdefault((alert.name, alert.state), time.monotonic() - self._started)

    @property
    def rows(self) -> list[Row]:
        """The newest page's ranks; none before the first page."""
        return page.rows(self._pages[-1], self._pages[0]) if self._pages else []
