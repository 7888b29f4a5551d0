"""Panels about loss, speed and learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import panels
from dashboards.layout import Section
from dashboards.panels import Query
from dashboards.percentiles import rank_quantile, run_quantile
from dashboards.promql import BY_RUN, exemplars, rate, select
from dashboards.template import RANKS, RUN, RUNS
from torchobs import catalog

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Panel

SLOWEST = 5
"""Number of slowest ranks shown."""


def section() -> Section:
    """Return the section."""
    return Section("Progress", (loss(), steps(), durations(), slowest(), tokens(), samples(), learning_rate()))


def loss() -> Panel:
    """Mean loss of the ranks."""
    return panels.lines(
        "Loss",
        "Mean of the ranks' last losses. Infinite and NaN losses are not shown here but counted as anomalies.",
        "short",
        Query(f"avg {BY_RUN} ({select(catalog.LOSS, *RANKS)})", RUN),
    )


def steps() -> Panel:
    """Steps per second."""
    return panels.lines(
        "Steps per second",
        "Training steps of a rank per second, on average.",
        "short",
        Query(f"avg {BY_RUN} ({rate(catalog.STEPS, *RANKS)})", RUN),
    )


def durations() -> Panel:
    """Percentiles of a run's step durations."""
    return panels.lines(
        "Step duration",
        "Half of the steps of all ranks in the last 5 minutes were faster than p0.5, and 99 % faster than p0.99. "
        "Evaluation and checkpoints are not in it. A dot is one step: its span is a click away where exemplars are stored. "
        "Needs the recording rules.",
        "s",
        Query(select(run_quantile(catalog.STEP_DURATION), *RUNS), f"{RUN} p{{{{quantile}}}}"),
        Query(exemplars(catalog.STEP_DURATION, *RANKS), exemplars=True),
    )


def slowest() -> Panel:
    """Median step durations of the slowest ranks."""
    medians = select(rank_quantile(catalog.STEP_DURATION), *RANKS, 'quantile="0.5"')
    return panels.lines(
        "Step duration of the slowest ranks",
        f"The {SLOWEST} ranks with the greatest median in the last 5 minutes. Needs the recording rules.",
        "s",
        Query(f"topk({SLOWEST}, {medians})", f"{RUN} rank {{{{rank}}}}"),
    )


def tokens() -> Panel:
    """Throughput in tokens."""
    return panels.lines(
        "Tokens per second",
        "Tokens per second of all ranks, where the script gives them to torchobs.log().",
        "short",
        Query(f"sum {BY_RUN} ({rate(catalog.TOKENS, *RANKS)})", RUN),
        width=8,
    )


def samples() -> Panel:
    """Throughput in samples."""
    return panels.lines(
        "Samples per second",
        "Samples per second of all ranks, where the script gives them to torchobs.log().",
        "short",
        Query(f"sum {BY_RUN} ({rate(catalog.SAMPLES, *RANKS)})", RUN),
        width=8,
    )


def learning_rate() -> Panel:
    """Learning rates."""
    by_group = f"max by (job_name, run_id, group) ({select(catalog.LEARNING_RATE, *RANKS)})"
    return panels.lines(
        "Learning rate",
        "Learning rate of each of the optimizer's parameter groups.",
        "sci",
        Query(by_group, f"{RUN} group {{{{group}}}}"),
        width=8,
    )
