"""What the benchmarks of the exporter stand on: ranks of as many series as they say, scrapers that get whole pages."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.bench.fleet import Fleet, Node
from tests.bench.processes import cpu_s, footprint
from tests.bench.scraping import Scraper
from tests.exporters import Service
from tests.support import wait_until
from torchobs.exporter.config import ExporterConfig

RANKS, LINES = 2, 200


def values(page: str, rank: str) -> dict[tuple[str, ...], float]:
    """The values of the layers of a rank."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels.get("rank") == rank and "layer" in sample.labels
    }


def test_a_fleet_is_the_load_that_it_is_taken_for(flight_dir: Path) -> None:
    """Living ranks of so many lines each, all of which change when they are told to; scraped by another process."""
    node = Node(flight_dir, RANKS, LINES, world=RANKS, quiet=30)
    with Service(ExporterConfig(flight_dir=str(flight_dir))) as exporter, Fleet(node, processes=2, step_s=60.0) as fleet:
        wait_until(lambda: exporter.state("0") == exporter.state("1") == "alive")
        with Scraper(exporter.address) as scraper:
            found = scraper.burst(["openmetrics", "text", "openmetrics"])
        page = exporter.page()
        fleet.change()
        assert len(found.seconds) == len(found.sizes) == 3
        assert min(found.sizes) > 1000
        lines = sum('rank="1"' in line for line in page.splitlines())
        assert LINES <= lines < LINES + 10, "a little more is said of ranks that have peers; the quiet series are not there"
        before = values(page, "1")
        assert len(before) > 50

        def all_changed() -> bool:
            now = values(exporter.page(), "1")
            assert before.keys() == now.keys()
            return all(before[key] != now[key] for key in before)

        wait_until(all_changed)  # a page that is young, or whose scan had begun meanwhile, is served again


def test_a_process_is_measured_from_outside() -> None:
    """Its clock is that of all its threads, and its descriptors and memory are what /proc says."""
    before = cpu_s(os.getpid())
    while cpu_s(os.getpid()) - before < 0.01:
        pass
    assert abs(cpu_s(os.getpid()) - time.process_time()) < 0.05
    seen = footprint(os.getpid())
    assert seen.rss > 1024**2
    assert seen.fds > 0
    assert seen.threads > 0
