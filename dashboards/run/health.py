"""Panels about the state and the progress of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import panels
from dashboards.layout import Section
from dashboards.panels import BAD, FAIR, GOOD, Query, Step
from dashboards.promql import BY_RANK, BY_RUN, rate, select
from dashboards.template import RANKS, RUN, RUNS
from torchobs import catalog

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Panel

NCCL_TIMEOUT_S = 600.0
"""torch.distributed's default: NCCL's watchdog ends a collective that waits longer than this for another rank."""
STATE_COLORS = {"alive": GOOD, "finished": "blue", "unresponsive": FAIR, "hung": BAD, "failed": "dark-red", "lost": "purple"}


def section() -> Section:
    """Return the section."""
    numbers = (ranks_up(), ranks_well(), steps(), progress_age(), goodput(), anomalous())
    return Section("Health", (*numbers, states(), ranks()))


def ranks_up() -> Panel:
    """Number of living processes."""
    return panels.number("Ranks up", "Ranks whose process lives.", "short", Query(f"sum({select(catalog.RANK_UP, *RANKS)})"))


def ranks_well() -> Panel:
    """Share of healthy ranks among those expected."""
    well = select(catalog.RANK_STATE_SET, *RUNS, 'state=~"alive|finished"')
    expected = f"max {BY_RUN} ({select(catalog.WORLD_SIZE, *RUNS)})"
    return panels.number(
        "Ranks well",
        "Share of the ranks that are alive or have finished, of as many as the launcher says there are. "
        "Below 100 % some are hung, failed, lost, or have not started yet.",
        "percentunit",
        Query(f"sum({well}) / sum({expected})"),
        steps=(Step(None, BAD), Step(1.0, GOOD)),
    )


def steps() -> Panel:
    """Number of steps done."""
    return panels.number(
        "Steps",
        "Training steps done since the run was last started.",
        "short",
        Query(f"max {BY_RUN} ({select(catalog.STEPS, *RANKS)})", RUN),
    )


def progress_age() -> Panel:
    """Time since the last step."""
    return panels.number(
        "Progress age",
        "Time since the last step of the rank that has waited longest. Red from 10 minutes on, after which NCCL's watchdog "
        "ends a collective by default.",
        "s",
        Query(f"max({select(catalog.RANK_PROGRESS_AGE, *RANKS)})"),
        steps=(Step(None, GOOD), Step(NCCL_TIMEOUT_S / 5, FAIR), Step(NCCL_TIMEOUT_S, BAD)),
    )


def goodput() -> Panel:
    """Share of productive time."""
    useful = rate(catalog.GOODPUT_TIME, *RANKS, 'state="productive"')
    return panels.number(
        "Goodput",
        "Share of the wall time that went into steps that counted, without waiting for data.",
        "percentunit",
        Query(f"sum({useful}) / sum({rate(catalog.GOODPUT_TIME, *RANKS)})"),
        steps=(Step(None, BAD), Step(0.5, FAIR), Step(0.8, GOOD)),
    )


def anomalous() -> Panel:
    """Number of ranks with an active anomaly."""
    return panels.number(
        "Anomalous now",
        "Ranks whose last measured step was anomalous: not finite, or far above its own past.",
        "short",
        Query(f"count(max {BY_RANK} ({select(catalog.ANOMALY_ACTIVE, *RANKS)}) == 1) or vector(0)"),
        steps=(Step(None, GOOD), Step(1.0, BAD)),
    )


def states() -> Panel:
    """States of the ranks over time."""
    panel = panels.lines(
        "Ranks by state",
        "Unresponsive: its heartbeat stopped while the process is there. Hung: alive without a step for much longer than its "
        "steps take. Lost: gone without a word, as after SIGKILL.",
        "short",
        Query(f"sum by (state) ({select(catalog.RANK_STATE_SET, *RANKS)})", "{{state}}"),
        stacked=True,
    )
    return panels.color(panel, STATE_COLORS)


def ranks() -> Panel:
    """Table of the ranks."""
    state, reason = select(catalog.RANK_STATE_SET, *RANKS), select(catalog.RANK_EXIT, *RANKS)
    age = select(catalog.RANK_PROGRESS_AGE, *RANKS)
    return panels.rows(
        "Ranks",
        "Each rank's state, how it ended, and the time since its last step.",
        "s",
        (
            Query(f"max by (job_name, run_id, rank, instance, state) ({state}) == 1", instant=True),
            Query(f"max {BY_RANK} ({age})", instant=True),
            Query(f"max by (job_name, run_id, rank, instance, reason) ({reason}) == 1", instant=True),
        ),
        hide=("Time", "Value #A", "Value #C"),
        names={"Value #B": "progress age", "reason": "ended by"},
    )
