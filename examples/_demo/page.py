"""Read the exporter's page of metrics: a row per rank, with rates since an earlier page."""

from __future__ import annotations

import math
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from torchobs import catalog

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
OWN_LABELS = {label.name for label in (catalog.PHASE, catalog.RANK_STATE, catalog.ANOMALY_KIND)}

Numbers = Mapping[tuple[str, str], float]
"""One rank's values by (sample name, value of the metric's own label, else '')."""


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of all ranks at a time of the monotonic clock."""

    at: float
    ranks: Mapping[int, Numbers]


@dataclass(frozen=True, slots=True)
class Row:
    """One rank as the table shows it; NaN stands for what is not known (yet).

    `step_time` is the mean in seconds, `phases` the shares of the steps' time, `tokens_rate` in tokens per second; all
    three over the time between two pages.
    """

    rank: int
    state: str
    steps: int
    loss: float
    grad_norm: float
    step_time: float
    phases: Mapping[str, float]
    tokens_rate: float
    anomalies: Mapping[str, int]


def fetch(url: str, timeout_s: float = 2.0) -> str:
    """Return the page as OpenMetrics text.

    Raises:
        OSError: Nobody answers, or the answer is no page.
    """
    request = urllib.request.Request(url, headers={"Accept": OPENMETRICS})  # noqa: S310 - an http address on loopback
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy could not reach this machine
    with opener.open(request, timeout=timeout_s) as answer:
        text: str = answer.read().decode()
    return text


def parse(text: str, at: float) -> Page:
    """Sort a page's samples by rank; what belongs to no rank is left out.

    Raises:
        ValueError: It is not OpenMetrics.
    """
    ranks: defaultdict[int, dict[tuple[str, str], float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            if "rank" in sample.labels:
                own = next((value for name, value in sample.labels.items() if name in OWN_LABELS), "")
                ranks[int(sample.labels["rank"])][sample.name, own] = sample.value
    return Page(at, dict(ranks))


def rows(now: Page, earlier: Page) -> list[Row]:
    """Return a row for every rank of the page `now`, by rank."""
    elapsed = now.at - earlier.at
    return [_row(rank, now.ranks[rank], earlier.ranks.get(rank, {}), elapsed) for rank in sorted(now.ranks)]


def _row(rank: int, now: Numbers, earlier: Numbers, elapsed: float) -> Row:
    def gained(name: str, own: str = "") -> float:
        return now.get((name, own), 0.0) - earlier.get((name, own), 0.0)

    duration = catalog.STEP_DURATION.prometheus
    phases = {phase: gained(catalog.STEP_PHASE_TIME.prometheus, phase) for phase in catalog.PHASES}
    states = [state for state in catalog.RANK_STATES if now.get((catalog.RANK_STATE_SET.prometheus, state))]
    anomalies = {kind: int(now.get((catalog.ANOMALIES.prometheus, kind), 0)) for kind in catalog.ANOMALY_KINDS}
    return Row(
        rank=rank,
        state=states[0] if states else "unknown",
        steps=int(now.get((catalog.STEPS.prometheus, ""), 0)),
        loss=now.get((catalog.LOSS.prometheus, ""), math.nan),
        grad_norm=now.get((catalog.GRAD_NORM.prometheus, ""), math.nan),
        step_time=_ratio(gained(f"{duration}_sum"), gained(f"{duration}_count")),
        phases={phase: _ratio(seconds, sum(phases.values())) for phase, seconds in phases.items()},
        tokens_rate=_ratio(gained(catalog.TOKENS.prometheus), elapsed),
        anomalies={kind: number for kind, number in anomalies.items() if number},
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
