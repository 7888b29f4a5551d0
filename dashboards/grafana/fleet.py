"""Fleet: all runs at a glance; which are sick, what they get out of their time, which GPUs do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import Column, Query
from dashboards.grafana.queries import FLEET, goodput, increase, per_run, rate, starts, worst
from dashboards.grafana.template import Choice, link, page
from torchobs import catalog
from torchobs.rules.promql import select

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

    from torchobs.rules.values import Thresholds

RUN = "{{job_name}} {{run_id}}"
MOST_RUNS = 10
FIRING = 'ALERTS{alertname=~"Torchobs.*", job_name=~"$job_name", alertstate="firing"}'
IDLE = 0.05
"""GPU utilization below which no training uses the GPU."""


def dashboard(limits: Thresholds) -> Dashboard:
    """Return the dashboard."""
    sections = [Section("Now", now(limits)), Section("Runs", (table(limits),)), Section("Over time", over_time(limits))]
    return page("torchobs-fleet", "fleet", "All training runs: which are sick, and what they cost.", Choice.NONE, sections)


def now(limits: Thresholds) -> tuple[Panel, ...]:
    """Return the numbers."""
    up, sick = select(catalog.RANK_UP, *FLEET), select(catalog.RANK_STATE_SET, *FLEET, f'state=~"{SICK}"')
    well = per_run("sum", select(catalog.RANK_STATE_SET, *FLEET, WELL))
    lost = f"{well} < {per_run('max', select(catalog.WORLD_SIZE, *FLEET))}"
    busy = select(catalog.HW_GPU_UTILIZATION, *FLEET)
    one_per_gpu = f"max by (hw_id) ({busy})"
    return (
        panels.number(
            "Runs alive",
            "Runs with a living rank. Good: as many as you have started.",
            "short",
            Query(f"count({per_run('sum', up)} > 0) or vector(0)"),
        ),
        panels.number(
            "Sick runs",
            "Runs of which a rank is hung, unresponsive, failed or lost. Good: 0.",
            "short",
            Query(f"count({per_run('sum', sick)} > 0) or vector(0)"),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Incomplete runs",
            "Runs with fewer ranks alive or finished than their launcher says there are. Good: 0, but for some that start.",
            "short",
            Query(f"count({lost}) or vector(0)"),
            steps=thresholds.FEW_IS_FAIR,
        ),
        panels.number(
            "Goodput",
            "Productive share of the time, on average over the runs. Good: above "
            f"{thresholds.percent(limits.goodput)}. Empty: without a run.",
            "percentunit",
            Query(f"avg({goodput(*FLEET)})"),
            steps=thresholds.goodput(limits.goodput),
        ),
        panels.number(
            "Idle GPUs",
            f"GPUs that a run observes and that are used for less than {IDLE:.0%} of the time. Good: 0. Empty: without GPUs.",
            "short",
            Query(f"count({one_per_gpu} < {IDLE}) or 0 * count({one_per_gpu})"),
            steps=thresholds.FEW_IS_FAIR,
        ),
        panels.number(
            "Alerts firing",
            "Alerts of torchobs that fire now. Good: 0.",
            "short",
            Query(f"count({FIRING}) or vector(0)"),
            steps=thresholds.NONE_IS_GOOD,
        ),
    )


SICK = "unresponsive|hung|failed|lost"
WELL = 'state=~"alive|finished"'


def table(limits: Thresholds) -> Panel:
    """Return the runs, one a row."""
    sick = select(catalog.RANK_STATE_SET, *FLEET, f'state=~"{SICK}"')
    busy = select(catalog.HW_GPU_UTILIZATION, *FLEET)
    columns = (
        Column("age", f"time() - {per_run('max', select(catalog.RANK_START_TIME, *FLEET))}", "s"),
        Column("ranks", per_run("sum", select(catalog.RANK_UP, *FLEET))),
        Column("of", per_run("max", select(catalog.WORLD_SIZE, *FLEET))),
        Column("sick", per_run("sum", sick), steps=thresholds.NONE_IS_GOOD),
        Column("starts again", starts(*FLEET), steps=thresholds.FEW_IS_FAIR),
        Column("steps", per_run("max", select(catalog.STEPS, *FLEET))),
        Column("no step for", per_run("max", select(catalog.RANK_PROGRESS_AGE, *FLEET)), "s", thresholds.PROGRESS_AGE),
        Column("goodput", goodput(*FLEET), "percentunit", thresholds.goodput(limits.goodput)),
        Column("loss", per_run("avg", select(catalog.LOSS, *FLEET))),
        Column("anomalies", f"round({per_run('max', f'increase({select(catalog.ANOMALIES, *FLEET)}[$__range])')})"),
        Column("GPU busy", per_run("avg", busy), "percentunit", thresholds.BUSY),
        Column("alerts", per_run("count", FIRING), steps=thresholds.NONE_IS_GOOD),
    )
    panel = panels.rows(
        "All runs",
        "Each run: age since its last start, ranks alive of how many, sick ones, starts within the graphs' time, progress. A "
        "click on a run leads to its story. Good: nothing in red, no step older than the longest evaluation. Empty: "
        "alerts, while none fires; GPU busy, without GPUs.",
        columns,
        labels={"job_name": "job", "run_id": "run"},
        links={"run": {"The story of this run": link("torchobs-run"), "Its ranks": link("torchobs-ranks")}},
        height=10,
    )
    return panels.coarse(panel)  # starts are looked for at so many points in time


def over_time(limits: Thresholds) -> tuple[Panel, ...]:
    """Return the graphs."""
    busy = select(catalog.HW_GPU_UTILIZATION, *FLEET)
    sick = select(catalog.RANK_STATE_SET, *FLEET, f'state=~"{SICK}"')
    return (
        panels.lines(
            "Goodput by run",
            f"The {MOST_RUNS} runs that make least of their time: its productive share, by the recording rule also of "
            f"lost ranks and of the time between restarts. Good: above {thresholds.percent(limits.goodput)} and level.",
            "percentunit",
            Query(f"bottomk({MOST_RUNS}, {goodput(*FLEET)})", RUN),
            steps=thresholds.goodput(limits.goodput),
        ),
        panels.lines(
            "Sick ranks by run",
            "Ranks that are hung, unresponsive, failed or lost. Good: nothing above 0.",
            "short",
            Query(worst(per_run("sum", sick), MOST_RUNS), RUN),
        ),
        panels.lines(
            "Anomalies by run",
            "Anomalous steps between two points, on the rank that has most. Good: 0, but for single loss spikes.",
            "short",
            Query(worst(per_run("max", increase(catalog.ANOMALIES, *FLEET)), MOST_RUNS), RUN),
        ),
        panels.lines(
            "GPU utilization by run",
            "Mean share of the time in which the run's GPUs had a kernel to run; the least of them. Good: above 80 %. "
            "Empty: without GPUs.",
            "percentunit",
            Query(f"bottomk({MOST_RUNS}, {per_run('avg', busy)})", RUN),
            steps=thresholds.BUSY,
        ),
        panels.lines(
            "Power by run",
            "Power that the run's GPUs draw, each counted once. Good: level; a drop is a run that waits. Empty: without GPUs.",
            "watt",
            Query(worst(per_run("sum", per_run("max", select(catalog.HW_POWER, *FLEET), "hw_id")), MOST_RUNS), RUN),
        ),
        panels.lines(
            "Steps per second by run",
            "Steps of a rank per second. Good: level; runs of different models are not to be compared.",
            "short",
            Query(worst(per_run("avg", rate(catalog.STEPS, *FLEET)), MOST_RUNS), RUN),
            log_base=10,
        ),
    )
