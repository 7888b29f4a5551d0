"""What a counter has counted in the last ten minutes, its first scrape included.

`increase()` begins to count at the second sample, so what a series is born with is lost to it: a rank's first seconds, and a
compiler's storm between two scrapes. But a rank's counters begin at 0 with it, so that all of a young rank's is recent; and so
is all of a series that was not there ten minutes ago, if its rank was (`x unless x offset 10m` alone, the usual way, takes
for new what an outage of Prometheus has hidden).
"""

from __future__ import annotations

from dashboards.promql import ONE_RANK, select
from dashboards.rules import WINDOW, WINDOW_S, Recording
from torchobs import catalog
from torchobs.catalog import Metric

RECENT = ":recent"


def name(metric: Metric) -> str:
    """Return what the metric's recent count is recorded as."""
    level = "_".join(["rank", *(attribute.name.replace(".", "_") for attribute in metric.attributes)])
    return f"{level}:{metric.prometheus.removesuffix('_total')}{RECENT}"


def recent(metric: Metric, *matchers: str, born_later: bool = False) -> Recording:
    """Return the rule; it records nothing where nothing was counted.

    ``born_later``: the series may be much younger than their rank; else they begin with it.
    """
    counter, started = select(metric, *matchers), select(catalog.RANK_START_TIME)
    new = f"""
          or
            {counter} unless {counter} offset {WINDOW} and on ({ONE_RANK}) {started} offset {WINDOW}"""
    expr = f"""
        (
            {counter} and on ({ONE_RANK}) time() - {started} < {WINDOW_S}{new if born_later else ""}
          or
            increase({counter}[{WINDOW}])
        ) > 0
    """
    return Recording(name(metric), expr)
