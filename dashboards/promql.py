"""Queries made of the catalog's constants, so that one about an unknown metric is an AttributeError."""

from __future__ import annotations

from torchobs.catalog import Metric

ONE_RANK = "run_id, rank, instance"
"""What tells one rank's series from another's: a rank is unique within its target only."""
ONE_RUN = "namespace, job_name, run_id"
"""What tells one run's series from another's, on whatever machines it is."""
BY_RUN = "by (job_name, run_id)"
BY_RUN_EVERYWHERE = f"by ({ONE_RUN})"
"""For alerts, which come from all of a Prometheus' namespaces."""
BY_RANK = "by (job_name, run_id, rank, instance)"
BY_RANK_EVERYWHERE = "by (namespace, job_name, run_id, rank, instance)"


def select(metric: Metric | str, *matchers: str, suffix: str = "") -> str:
    """Return a selector of the metric's series, or of a recorded series, e.g. ``torchobs_rank_up{rank="0"}``."""
    name = metric if isinstance(metric, str) else metric.prometheus
    return f"{name}{suffix}{{{', '.join(matchers)}}}" if matchers else f"{name}{suffix}"


def rate(metric: Metric, *matchers: str) -> str:
    """Return the metric's growth per second, over the interval that suits both the graph and the scrapes."""
    return f"rate({select(metric, *matchers)}[$__rate_interval])"


def increase(metric: Metric, *matchers: str, suffix: str = "") -> str:
    """Return the metric's growth in about the time between two points of the graph."""
    return f"increase({select(metric, *matchers, suffix=suffix)}[$__rate_interval])"


def exemplars(metric: Metric, *matchers: str) -> str:
    """Return a query of no samples, for the exemplars of a histogram, be it classic or native: recorded series have none.

    Prometheus' API of exemplars looks at the selectors alone. At the Unix time 0 there is nothing to be read, so that the query
    costs nothing, however many buckets there are.
    """
    both = (select(metric, *matchers, suffix=suffix) for suffix in ("_bucket", ""))
    return " or ".join(f"rate({series}[$__rate_interval] @ 0)" for series in both)


def share(metric: Metric, by: str, *matchers: str) -> str:
    """Return the share of each value of the label ``by`` in the metric's growth."""
    grown = rate(metric, *matchers)
    return f"sum by ({by}) ({grown}) / on () group_left () sum({grown})"
