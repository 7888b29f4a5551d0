"""Queries made of the catalog's constants, so that one about an unknown metric is an AttributeError."""

from __future__ import annotations

from torchobs.catalog import Metric

ONE_RANK = "run_id, rank, instance"
"""What tells one rank's series from another's: a rank is unique within its target only."""


def select(metric: Metric | str, *matchers: str, suffix: str = "") -> str:
    """Return a selector of the metric's series, or of a recorded series, e.g. ``torchobs_rank_up{rank="0"}``."""
    name = metric if isinstance(metric, str) else metric.prometheus
    return f"{name}{suffix}{{{', '.join(matchers)}}}" if matchers else f"{name}{suffix}"
