"""PromQL queries from the catalog's constants, so that an unknown metric is an AttributeError."""

from __future__ import annotations

from torchobs.catalog import Metric

RUN = ("cluster", "namespace", "job_name", "run_id")
"""Labels of a run. Two clusters, or two namespaces, may have a job of the same name and number; the scrape adds these two
labels, and one that no series has costs nothing."""
ONE_RUN = ", ".join(RUN)
ONE_RANK = f"{ONE_RUN}, rank, instance"
"""Labels of a rank: its number is unique within one target only."""
BY_RUN = f"by ({ONE_RUN})"
"""Grouping for alerts, which cover all namespaces of a Prometheus server."""
BY_RANK = f"by ({ONE_RANK})"
REPLICA_GROUP = "replica_group"
"""Label of :func:`grouped` series"""
ONE_GROUP = f"{ONE_RUN}, {REPLICA_GROUP}"
"""Labels of the ranks of a run that train one model in step, and so can be compared with each other."""
BY_GROUP = f"by ({ONE_GROUP})"
ON_RUN, ON_RANK, ON_GROUP = f"on ({ONE_RUN})", f"on ({ONE_RANK})", f"on ({ONE_GROUP})"


def grouped(ranks: str) -> str:
    """Return a query's series with a label for the replica group of their rank, ``1`` for rank ``0-g1``.

    A second process that claims a rank, ``0-3f9a12bc``, trains for itself, and gets a group of its own. A rank without
    anything behind its number gets no label.
    """
    return f'label_replace({ranks}, "{REPLICA_GROUP}", "$1", "rank", ".*?-g?(.*)")'


def lasting(selector: str, comparison: str, range_: str, on: str) -> str:
    """Return the condition that a comparison has held for the whole time; ``on``: labels that identify the series.

    ``min_over_time`` alone is also true of a series that is younger than its range, after a single scrape.
    """
    return f"min_over_time({selector}[{range_}]) {comparison} and on ({on}) {selector} offset {range_} {comparison}"


def select(metric: Metric | str, *matchers: str, suffix: str = "") -> str:
    """Return a selector of the series of a metric or a recording rule, e.g. ``torchobs_rank_up{rank="0"}``."""
    name = metric if isinstance(metric, str) else metric.prometheus
    return f"{name}{suffix}{{{', '.join(matchers)}}}" if matchers else f"{name}{suffix}"
