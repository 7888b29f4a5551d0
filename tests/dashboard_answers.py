"""What a real Prometheus answers to the queries of the shipped dashboards."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from tests.dashboards import shipped, targets
from tests.promql import filled

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tests.prometheus_server import PrometheusServer, Series


class Answers:
    """What a Prometheus has since it began, for the dashboards of one run."""

    def __init__(self, prometheus: PrometheusServer, began_s: float, **chosen: str) -> None:
        """Besides the run, what is chosen of a dashboard's variables: `job_name="train"`."""
        self._prometheus, self._began_s, self._chosen = prometheus, began_s, chosen
        self._dashboards = shipped()

    def panel(self, run: str, uid: str, title: str, number: int = 0) -> list[Series]:
        """The series of one query of a panel."""
        found = [target["expr"] for panel, target in targets(self._dashboards[uid]) if panel["title"] == title]
        return self._ask(found[number], run)

    def unexplained(self, run: str, uids: Collection[str] = ()) -> Iterator[str]:
        """Dashboard, panel and legend of the queries without data whose panel does not say when it is empty.

        Of all dashboards, or of those with these uids.
        """
        for uid, dashboard in self._dashboards.items():
            for panel, target in targets(dashboard) if not uids or uid in uids else ():
                if "Empty: " not in panel["description"] and "@ 0" not in target["expr"] and not self._ask(target["expr"], run):
                    yield f"{uid} {panel['title']}: {target['legendFormat']}"

    def _ask(self, expr: str, run: str) -> list[Series]:
        query = filled(expr, rate_interval="10s", range="2m", interval="1s")
        for label, value in {**self._chosen, "run_id": run}.items():
            query = query.replace(f'{label}=~".*"', f'{label}=~"{value}"')
        now_s = (
            time.time()
        )  # the last point: counted from the beginning it would be up to a second ago, before the newest scrape
        return self._prometheus.query_range(query, now_s - math.ceil(now_s - self._began_s), now_s, "1s")
