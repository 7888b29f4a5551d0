"""Data and checkpoints: whether training waits for its input, and whether its work is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import Query
from dashboards.grafana.queries import MOST, RANKS, RUNS, increase, per_rank, per_run, rate, worst
from dashboards.grafana.template import Choice, page
from torchobs import catalog
from torchobs.rules.promql import select

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

WAITING = 'phase="data"'


def dashboard() -> Dashboard:
    """Return the dashboard."""
    sections = [Section("Data", data()), Section("Checkpoints", checkpoints())]
    about = "Input and checkpoints of one run: whether training waits for data, and whether its work is saved."
    return page("torchobs-data", "data and checkpoints", about, Choice.RUN | Choice.RANK, sections)


def waiting() -> str:
    """Return each rank's share of the step time that it waits for data."""
    part, whole = rate(catalog.STEP_PHASE_TIME, *RANKS, WAITING), rate(catalog.STEP_PHASE_TIME, *RANKS)
    return f"{per_rank(part, operator='sum')} / ({per_rank(whole, operator='sum')} > 0)"


def data() -> tuple[Panel, ...]:
    """Return the input pipeline."""
    workers = select(catalog.DATA_WORKERS, *RANKS)
    return (
        panels.number(
            "Starved ranks",
            "Ranks that wait for data for a fifth of their time or more. Good: 0.",
            "short",
            Query(f"sum({select(catalog.DATA_STARVED, *RANKS)}) or vector(0)"),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Waiting for data",
            "Share of the step time, on the rank that waits most. Good: below 10 %.",
            "percentunit",
            Query(f"max({waiting()})"),
            steps=thresholds.STARVED,
        ),
        panels.number(
            "Batches ready",
            "Batches that workers have finished and training has not used, on the rank with fewest. Good: above 0. "
            "Empty: without workers.",
            "short",
            Query(f"min({select(catalog.DATA_BATCHES_READY, *RANKS)})"),
            steps=thresholds.ONE_IS_GOOD,
        ),
        panels.number(
            "Dead workers",
            "Worker processes ended by a signal or an error within the graphs' time. Good: 0.",
            "short",
            Query(f"sum(increase({select(catalog.DATA_WORKERS_DIED, *RANKS)}[$__range])) or vector(0)", instant=True),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Epoch",
            "Passes over the training loader begun since the start. Good: it grows. Empty: without a DataLoader.",
            "short",
            Query(f"max({select(catalog.EPOCHS, *RANKS)})"),
        ),
        panels.coarse(
            panels.lines(
                "Waiting for data over time",
                f"Share of the step time, of the {MOST} ranks that wait most. Good: below 10 %. The alert fires from 20 % on.",
                "percentunit",
                Query(worst(waiting()), "rank {{rank}}"),
                steps=thresholds.STARVED,
            )
        ),
        panels.by_rank(
            "Waiting for data by rank",
            "Share of the step time. Good: green; a red block is a node with a slow disk, all red a slow pipeline.",
            "percentunit",
            waiting(),
            width=8,
            highest=0.5,
        ),
        panels.lines(
            "Batches ready over time",
            f"Of the {MOST} ranks with fewest, and ranks that starve. Good: as many as prefetch_factor times workers. Empty: "
            "without workers.",
            "short",
            Query(f"bottomk({MOST}, {per_rank(select(catalog.DATA_BATCHES_READY, *RANKS))})", "rank {{rank}}"),
            Query(f"sum({select(catalog.DATA_STARVED, *RANKS)})", "starved ranks"),
        ),
        panels.lines(
            "Workers",
            "Worker processes of all ranks: configured, alive, and ended by a signal or an error. Good: as many alive as "
            "configured. Empty: without workers.",
            "short",
            Query(f"sum by (state) ({workers})", "{{state}}"),
            Query(f"sum({increase(catalog.DATA_WORKERS_DIED, *RANKS)})", "died"),
        ),
        panels.lines(
            "Start of workers",
            "Share of the time that goes into starting worker processes, on the worst rank. Good: below 1 %; "
            "persistent_workers=True keeps them between epochs. Empty: without workers.",
            "percentunit",
            Query(f"max({per_rank(rate(catalog.DATA_WORKER_START_TIME, *RANKS))})", "start"),
        ),
        panels.lines(
            "Epochs",
            "Epochs begun. Good: as many as the script asks for. Empty: without a DataLoader.",
            "short",
            Query(f"max({increase(catalog.EPOCHS, *RANKS)})", "epochs"),
        ),
    )


def checkpoints() -> tuple[Panel, ...]:
    """Return saves."""
    last = per_run("max", select(catalog.CHECKPOINT_TIMESTAMP, *RUNS))
    spent = rate(catalog.GOODPUT_TIME, *RANKS, 'state="checkpoint"')
    return (
        panels.number(
            "Last checkpoint",
            "Time since the last checkpoint was complete: what a crash now would cost. Good: below your interval. Empty: "
            "before the first.",
            "s",
            Query(f"time() - max({last})"),
            width=8,
        ),
        panels.number(
            "Failed checkpoints",
            "Saves that raised, within the graphs' time. Good: 0.",
            "short",
            Query(
                f"max(increase({select(catalog.CHECKPOINTS, *RANKS, FAILED)}[$__range])) or vector(0)",
                instant=True,
            ),
            steps=thresholds.NONE_IS_GOOD,
            width=8,
        ),
        panels.number(
            "Time for checkpoints",
            "Share of the wall time that training waited for saves. Good: below 5 %. Empty: before the first.",
            "percentunit",
            Query(f"avg({per_rank(spent)})"),
            width=8,
        ),
        panels.lines(
            "Age of the last checkpoint",
            "Time since the last complete checkpoint. Good: an even saw tooth; a tooth that grows is a checkpoint that is "
            "overdue. Empty: before the first.",
            "s",
            Query(f"time() - max({last})", "age"),
        ),
        panels.lines(
            "Saved and failed",
            "Checkpoints saved and failed, on the rank that has most. Good: none failed. Empty: before the first.",
            "short",
            Query(f"max by (result) ({increase(catalog.CHECKPOINTS, *RANKS)})", "{{result}}"),
        ),
        panels.lines(
            "Duration of checkpoints",
            f"Time until the last checkpoint was complete, of the {MOST} slowest ranks. Good: level. Empty: before the first.",
            "s",
            Query(worst(per_rank(select(catalog.CHECKPOINT_DURATION, *RANKS))), "rank {{rank}}"),
        ),
        panels.lines(
            "Size of checkpoints",
            "Bytes that all ranks together, and the one with most, wrote for the last checkpoint. Good: level; growth is "
            "history that is saved along. Empty: before the first.",
            "bytes",
            Query(f"sum({per_rank(select(catalog.CHECKPOINT_SIZE, *RANKS))})", "all ranks"),
            Query(f"max({select(catalog.CHECKPOINT_SIZE, *RANKS)})", "largest"),
        ),
    )


FAILED = 'result="failed"'
