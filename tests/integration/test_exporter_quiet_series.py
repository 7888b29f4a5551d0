"""Counters that begin to count, as real scrapers of a served page see them: `increase()` must not miss the first event."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.exporters import Service
from tests.support import wait_until
from torchobs import catalog
from torchobs.exporter.config import ExporterConfig

if TYPE_CHECKING:
    from pathlib import Path

    from torchobs.flight.writer.writer import FlightWriter


def scrape(exporter: Service, writer: FlightWriter, who: str) -> float | None:
    """The counter on the page that a scraper of this name gets after the rank's next heartbeat; None while it is absent."""
    writer.heartbeat()
    page = exporter.page(user_agent=who, x_prometheus_scrape_timeout_seconds="10")
    lines = [line for line in page.splitlines() if line.startswith(f"{catalog.PROBE_ERRORS.prometheus}{{")]
    return float(lines[0].rpartition(" ")[2]) if lines else None


def fail(writer: FlightWriter, times: int) -> None:
    """What the sampler writes of a probe that has failed."""
    cell = writer.table.cell(catalog.PROBE_ERRORS, {"probe": "loss"})
    assert cell is not None
    cell.add(times)
    writer.publish()


def test_every_scraper_gets_a_zero_before_the_first_event(writer: FlightWriter, flight_dir: Path) -> None:
    """Two Prometheus servers, one of which is slow to come back: neither sees a series that is born above zero."""
    with Service(ExporterConfig(flight_dir=str(flight_dir), mode="node")) as exporter:
        assert [scrape(exporter, writer, who) for who in ("a", "b")] == [None, None]
        fail(writer, 3)
        seen = list[float | None]()

        def seen_by_a(value: float) -> bool:
            seen.append(scrape(exporter, writer, "a"))
            return seen[-1] == value

        wait_until(lambda: seen_by_a(0.0))
        time.sleep(1.5)  # a new snapshot; `b` has no page with the zero yet
        assert seen_by_a(0.0)
        assert scrape(exporter, writer, "b") == 0.0
        wait_until(lambda: seen_by_a(3.0))
        assert scrape(exporter, writer, "b") == 3.0
        assert set(seen) <= {None, 0.0, 3.0}
        fail(writer, 1)
        wait_until(lambda: seen_by_a(4.0))
        assert 0.0 not in seen[seen.index(3.0) :]


def test_an_exporter_that_starts_again_takes_nothing_back(writer: FlightWriter, flight_dir: Path) -> None:
    """A counter that steps back to zero would be counted twice."""
    fail(writer, 3)
    for _ in range(2):
        with Service(ExporterConfig(flight_dir=str(flight_dir), mode="node")) as exporter:
            assert scrape(exporter, writer, "a") == 3.0
