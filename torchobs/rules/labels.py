"""The labels by which rules, alerts and dashboards tell runs and ranks apart. A label that no series has costs nothing."""

from __future__ import annotations

RUN = ("cluster", "namespace", "job_name", "run_id")
"""A run. Two clusters, or two namespaces, may have a job of the same name and number; the scrape adds these two labels."""

RANK = (*RUN, "rank", "instance")
"""A rank. After a restart on another machine a rank has the same number and another instance."""
