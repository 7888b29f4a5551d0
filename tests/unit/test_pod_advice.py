"""What the exporter of a pod advises: no rank has appeared, or the grace does not last for a scrape."""

from dataclasses import replace
from typing import cast

import pytest

from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.metrics_page import ScrapeTracker
from torchobs.exporter.pod_advice import NO_RANK, NO_RANK_S, PodAdvice
from torchobs.ranks.snapshot import EMPTY, Rank

WITH_RANK = replace(EMPTY, ranks=(cast("Rank", object()),))


def test_a_pod_without_a_rank_says_so_after_two_minutes_or_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Once in the log; a rank that came and went is one."""
    pod, scrapers = PodAdvice(ExporterConfig()), ScrapeTracker()
    pod.look(EMPTY, scrapers, 100.0)
    assert not pod.advice
    for _ in range(2):
        pod.look(EMPTY, scrapers, 100.0 + NO_RANK_S)
    assert list(pod.advice) == [NO_RANK]
    assert caplog.text.count(NO_RANK) == 1
    pod.look(WITH_RANK, scrapers, 300.0)
    pod.look(EMPTY, scrapers, 600.0, ends=True)
    assert not pod.advice
    early = PodAdvice(ExporterConfig())
    early.look(EMPTY, scrapers, 1.0, ends=True)
    assert list(early.advice) == [NO_RANK]


@pytest.mark.parametrize(("interval_s", "is_short"), [(15.0, False), (30.0, False), (31.0, True), (60.0, True)])
def test_a_grace_that_does_not_last_for_a_scrape_is_named(interval_s: float, is_short: bool) -> None:  # noqa: FBT001  # the table's column
    """The interval, the timeout and 5 s; a gap while Prometheus was restarted is no interval."""
    pod, scrapers = PodAdvice(ExporterConfig(drain_timeout_s=40.0)), ScrapeTracker(lambda _: True)
    for at_s in (0.0, interval_s, 2 * interval_s, 2 * interval_s + 200.0):
        scrapers.note(("10.0.0.1", 4000), "Prometheus/3", 1, at_s, timeout_s=10.0)
    pod.look(WITH_RANK, scrapers, 2 * interval_s + 201.0)
    assert ["the pod's grace of 45 s is too short" in words for words in pod.advice] == [True] * is_short
