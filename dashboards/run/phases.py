"""Panels about the use of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import panels
from dashboards.layout import Section
from dashboards.panels import Query
from dashboards.promql import rate, share
from dashboards.template import RANKS
from torchobs import catalog

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Panel


def section() -> Section:
    """Return the section."""
    return Section("Phases", (by_phase(), by_rank(), by_use()))


def by_phase() -> Panel:
    """Shares of the phases over time."""
    return panels.lines(
        "Step time by phase",
        "Share of the steps' time in each phase, over all ranks. Much data: the input pipeline is too slow.",
        "percentunit",
        Query(share(catalog.STEP_PHASE_TIME, "phase", *RANKS), "{{phase}}"),
        stacked=True,
        width=8,
    )


def by_rank() -> Panel:
    """Present shares of the phases, a bar for each rank."""
    return panels.shares(
        "Step time by phase and rank",
        "The same for each rank, now. In synchronous training the slow rank is the one that waits least: "
        "the others wait for it in their backward pass.",
        Query(f"sum by (rank, phase) ({rate(catalog.STEP_PHASE_TIME, *RANKS)})", instant=True),
        row="rank",
        column="phase",
    )


def by_use() -> Panel:
    """Wall time by goodput state."""
    return panels.lines(
        "Wall time by use",
        "Share of the wall time that was productive, spent waiting for data, in steps that a loss scaler skipped, "
        "in evaluation or in checkpoints.",
        "percentunit",
        Query(share(catalog.GOODPUT_TIME, "state", *RANKS), "{{state}}"),
        stacked=True,
        width=8,
    )
