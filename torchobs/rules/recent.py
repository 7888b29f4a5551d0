"""Recording rules for a counter's increase in the last ten minutes, including its first sample.

`increase()` counts from the second sample on, so the value at a series' first scrape is lost: a rank's first seconds, or a
recompile storm between two scrapes. But a rank's counters begin at 0 with it, so that a young rank's whole count is recent;
likewise that of a series that did not exist ten minutes ago although its rank did. (The usual `x unless x offset 10m` alone
takes series for new after an outage of Prometheus.)
"""

from __future__ import annotations

from torchobs import catalog
from torchobs.catalog import Metric
from torchobs.rules.promql import ONE_RANK, select
from torchobs.rules.rule_file import SEEN, WINDOW, WINDOW_S, Recording

RECENT = ":recent"


def name(metric: Metric) -> str:
    """Return the name of the recorded series of the metric's recent increase."""
    level = "_".join(["rank", *(attribute.name.replace(".", "_") for attribute in metric.attributes)])
    return f"{level}:{metric.prometheus.removesuffix('_total')}{RECENT}"


def recent(metric: Metric, *matchers: str, born_later: bool = False) -> Recording:
    """Return the rule; nothing is recorded where nothing was counted.

    ``born_later``: the series may be much younger than their rank; otherwise they begin with it. The last sample of series that
    have ended since the evaluation before counts, too.
    """
    counter, started = select(metric, *matchers), select(catalog.RANK_START_TIME)
    now, before = f"last_over_time({counter}[{SEEN}])", f"offset {WINDOW}"
    new = f"""
          or
            {now} unless {counter} {before} and on ({ONE_RANK}) {started} {before}"""
    expr = f"""
        (
            {now} and on ({ONE_RANK}) time() - last_over_time({started}[{SEEN}]) < {WINDOW_S}{new if born_later else ""}
          or
            increase({counter}[{WINDOW}])
        ) > 0
    """
    return Recording(name(metric), expr)
