"""Panels about gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import panels
from dashboards.layout import Section
from dashboards.panels import Query
from dashboards.promql import BY_RUN, ONE_RANK, increase, select
from dashboards.template import RANKS, RUN
from torchobs import catalog

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Panel


def section() -> Section:
    """Return the section."""
    return Section("Gradients", (norm(), distribution(), anomalies(), nonfinite()))


def norm() -> Panel:
    """Gradient norm of the run: if N ranks hold a shard each, its square is N times the mean of their squares."""
    norms, ranks = select(catalog.GRAD_NORM, *RANKS), select(catalog.GRAD_NORM_RANKS, *RANKS)
    return panels.lines(
        "Gradient norm",
        "L2 norm of all gradients before clipping by norm, put together from the ranks where parameters are sharded. "
        "Finite values only.",
        "short",
        Query(f"sqrt(avg {BY_RUN} ({norms} ^ 2 * on ({ONE_RANK}) {ranks}))", RUN),
        log_base=10,
    )


def distribution() -> Panel:
    """Distribution of the norms of all measured steps, not only of the last before each scrape."""
    buckets = increase(catalog.GRAD_NORM_DISTRIBUTION, *RANKS, suffix="_bucket")
    native = increase(catalog.GRAD_NORM_DISTRIBUTION, *RANKS)
    return panels.distribution(
        "Gradient norms",
        "How many measured steps had which gradient norm. Buckets are powers of four. A dot is one step: its span is a "
        "click away where exemplars are stored.",
        # Falls back to native histograms if there are no classic ones: a heatmap accepts both.
        Query(f"sum by (le) ({buckets}) or (sum({native}) unless on () sum({buckets}))", "{{le}}", exemplars=True),
    )


def anomalies() -> Panel:
    """Anomalies found by the detectors."""
    return panels.lines(
        "Anomalies",
        "Anomalous steps by kind, on the rank that has most: ranks that share their gradients see the same.",
        "short",
        Query(f"max by (job_name, run_id, kind) ({increase(catalog.ANOMALIES, *RANKS)})", f"{RUN} {{{{kind}}}}"),
    )


def nonfinite() -> Panel:
    """Steps with non-finite gradients, and steps skipped."""
    return panels.lines(
        "Non-finite and skipped steps",
        "Measured steps with a NaN or infinite gradient, and steps that a loss scaler skipped, on the rank that has most. "
        "Where none are skipped, a non-finite gradient ruins the weights.",
        "short",
        Query(f"max {BY_RUN} ({increase(catalog.GRAD_NONFINITE_STEPS, *RANKS)})", f"{RUN} non-finite"),
        Query(f"max {BY_RUN} ({increase(catalog.AMP_STEPS_SKIPPED, *RANKS)})", f"{RUN} skipped"),
    )
