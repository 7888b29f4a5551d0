"""Run: the story of one run, from its health over its progress to what its time goes into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import BAD, FAIR, GOOD, Column, Query, Step
from dashboards.grafana.queries import (
    RANKS,
    RUNS,
    exemplars,
    goodput,
    increase,
    mean_step_s,
    per_run,
    rank_step_s,
    rate,
    run_step_s,
    shares,
    starts,
    tokens,
    uses,
    worst,
)
from dashboards.grafana.template import Choice, page
from torchobs import catalog
from torchobs.rules.promql import BY_RUN, ON_RUN, select

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

    from torchobs.rules.values import Thresholds

RUN = "{{job_name}} {{cluster}}"
"""Legend of the one series of a run: the name is longer only where two clusters have a run of this id."""
RESTARTS = "restarts by the launcher"
STATE_COLORS = {"alive": GOOD, "finished": "blue", "unresponsive": FAIR, "hung": BAD, "failed": "dark-red", "lost": "purple"}


def dashboard(limits: Thresholds) -> Dashboard:
    """Return the dashboard."""
    sections = [
        Section("Health", (*numbers(limits), states(), exits(), beginnings())),
        Section("Progress", progress()),
        Section("Use of time", use_of_time(limits)),
        Section("Verdicts", verdicts()),
        Section("Settings of the training", settings(), collapsed=True),
    ]
    return page("torchobs-run", "run", "The story of one training run.", Choice.RUN | Choice.RANK, sections)


def numbers(limits: Thresholds) -> tuple[Panel, ...]:
    """Return the numbers at the top."""
    well = per_run("sum", select(catalog.RANK_STATE_SET, *RUNS, 'state=~"alive|finished"'))
    expected = per_run("max", select(catalog.WORLD_SIZE, *RUNS))
    done = per_run("max", select(catalog.STEPS, *RUNS))
    return (
        panels.number(
            "Ranks up",
            "Ranks whose process lives. Good: all of them, until they have finished.",
            "short",
            Query(f"sum({select(catalog.RANK_UP, *RANKS)})"),
        ),
        panels.number(
            "Ranks well",
            "Share of the ranks that are alive or have finished, of as many as the launcher says there are. Good: 100 %. "
            "Below, some are hung, failed, lost, or have not started yet.",
            "percentunit",
            Query(f"sum({well}) / sum({expected})"),
            steps=thresholds.ONE_IS_GOOD,
        ),
        panels.number(
            "Missing ranks",
            "Ranks that a launcher started on its machine and that no exporter sees. Good: 0.",
            "short",
            Query(f"sum({select(catalog.RUN_MISSING_RANKS, *RUNS)})"),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Last step",
            "Time since the last step of the rank that has waited longest. Good: less than the longest evaluation. Red "
            "from 10 minutes on, after which NCCL's watchdog ends a collective by default.",
            "s",
            Query(f"max({select(catalog.RANK_PROGRESS_AGE, *RANKS)})"),
            steps=thresholds.PROGRESS_AGE,
        ),
        panels.number(
            "Goodput",
            "Productive share of the time: steps that counted, without waiting for data. With the recording rule, "
            f"restarts and lost ranks count as lost. Good: above {thresholds.percent(limits.goodput)}.",
            "percentunit",
            Query(f"avg({goodput(*RUNS)})"),
            steps=thresholds.goodput(limits.goodput),
        ),
        panels.number(
            "Anomalous ranks",
            "Ranks whose last measured step was not finite, or far from its own past. Good: 0.",
            "short",
            Query(f"count(max by (rank, instance) ({select(catalog.ANOMALY_ACTIVE, *RANKS)}) == 1) or vector(0)"),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Steps",
            "Training steps done since the run was last started. Good: it grows.",
            "short",
            Query(f"max({done})"),
        ),
        panels.number(
            "Done",
            "Share of the planned steps that are done. Good: it grows. Empty: where the number of steps is not known.",
            "percentunit",
            Query(f"max({done} / ({per_run('max', select(catalog.STEPS_PLANNED, *RUNS))} > 0))"),
        ),
        panels.number(
            "Time to the end",
            "The planned steps that are left, at the present speed. Good: it falls as fast as time goes by. Empty: where the "
            "number of steps is not known, or none is made.",
            "s",
            Query(f"max(({per_run('max', select(catalog.STEPS_PLANNED, *RUNS))} - {done}) / ({speed()} > 0))"),
        ),
        panels.number(
            "Resumed from",
            "Step that the run was last started from. Good: 0, or the last step before the restart; the steps that lie "
            "between are repeated, and lost to the goodput. Empty: where the optimizer does not count its steps (SGD).",
            "short",
            Query(f"max({select(catalog.STEPS_RESUMED_FROM, *RANKS)})"),
        ),
        panels.number(
            "Epoch",
            "Passes over the training loader begun since the start. Good: it grows. Empty: without a DataLoader.",
            "short",
            Query(f"max({select(catalog.EPOCHS, *RANKS)})"),
        ),
        panels.number(
            "Running for",
            "Time since the youngest rank started. Good: as long as you expect; less means a restart.",
            "s",
            Query(f"time() - max({select(catalog.RANK_START_TIME, *RUNS)})"),
        ),
        panels.coarse(
            panels.number(
                "Starts again",
                "Starts of one rank after its first within the graphs' time, also of a replaced pod. Good: 0.",
                "short",
                Query(f"max({starts(*RUNS)})", instant=True),
                steps=thresholds.FEW_IS_FAIR,
                height=8,  # it stands beside the graphs of the ranks
            )
        ),
    )


def speed() -> str:
    """Return steps of a rank per second."""
    return per_run("avg", rate(catalog.STEPS, *RANKS))


def states() -> Panel:
    """Return states of the ranks over time."""
    panel = panels.lines(
        "Ranks by state",
        "Unresponsive: its heartbeat stopped while the process is there. Hung: alive without a step for much longer than its "
        "steps take. Lost: gone without a word, as after SIGKILL. Good: all green, blue at the end.",
        "short",
        Query(f"sum by (state) ({select(catalog.RANK_STATE_SET, *RANKS)} == 1)", "{{state}}"),
        stacked=True,
        width=10,
    )
    return panels.color(panel, STATE_COLORS)


def exits() -> Panel:
    """Return how ranks ended."""
    return panels.lines(
        "Ended ranks",
        "Ranks that have ended, by how. Good: none, and at the end finished. Empty: while all live.",
        "short",
        Query(f"sum by (reason) ({select(catalog.RANK_EXIT, *RANKS)} == 1)", "{{reason}}"),
        stacked=True,
        width=10,
    )


def beginnings() -> Panel:
    """Return the age of the present incarnation: a saw tooth is a crash loop."""
    panel = panels.lines(
        "Time since the start",
        "Time since the youngest and the oldest rank started, and restarts that the launcher counts. Good: one rising "
        "line; a saw tooth is a crash loop, of a replaced pod, too.",
        "s",
        Query(f"time() - max({select(catalog.RANK_START_TIME, *RUNS)})", "youngest"),
        Query(f"time() - min({select(catalog.RANK_START_TIME, *RUNS)})", "oldest"),
        Query(f"max({select(catalog.RANK_RESTARTS, *RUNS)})", RESTARTS),
    )
    return panels.right_axis(panel, RESTARTS)


def progress() -> tuple[Panel, ...]:
    """Return loss, speed, throughput."""
    return (
        panels.lines(
            "Loss",
            "Mean of the ranks' last losses. Good: it falls. Infinite and NaN losses are not shown but counted as anomalies.",
            "short",
            Query(per_run("avg", select(catalog.LOSS, *RANKS)), RUN),
        ),
        panels.lines(
            "Gradient norm",
            "L2 norm of all gradients before clipping by norm, put together from the ranks where parameters are sharded. "
            "Good: level within a power of ten. Finite values only.",
            "short",
            Query(grad_norm(), RUN),
            log_base=10,
        ),
        panels.lines(
            "Learning rate",
            "Learning rate of each of the optimizer's parameter groups. Good: the schedule that you have planned.",
            "sci",
            Query(f"max by (group) ({select(catalog.LEARNING_RATE, *RANKS)})", "group {{group}}"),
        ),
        panels.lines(
            "Steps per second",
            "Training steps of a rank per second, on average. Good: level.",
            "short",
            Query(speed(), RUN),
        ),
        panels.coarse(
            panels.lines(
                "Step duration",
                "Half of the steps of all ranks were faster than the median, 99 % faster than p99, each to within the factor "
                "of two of a histogram's buckets; the mean is exact, and alone where recording rules are not loaded. "
                "Evaluation and checkpoints are not in it. Good: p99 is no more than twice the median. A dot is one step: "
                "its span is a click away where exemplars are stored. Empty: the quantiles, without the rules.",
                "s",
                Query(run_step_s("0.5", *RUNS), "median"),
                Query(run_step_s("0.99", *RUNS), "p99"),
                Query(mean_step_s(*RANKS), "mean"),
                Query(exemplars(catalog.STEP_DURATION, *RANKS), exemplars=True),
            )
        ),
        panels.coarse(
            panels.lines(
                "Step duration of the slowest ranks",
                "The ranks with the greatest median; the mean where recording rules are not loaded. Good: they are close "
                "together, and not always the same.",
                "s",
                Query(worst(rank_step_s(*RANKS)), "rank {{rank}}"),
            )
        ),
        panels.lines(
            "Tokens per second",
            "Tokens per second of the run; without the recording rules, those that tensor- and pipeline-parallel ranks count "
            "again are in it. Good: level. Empty: where the script gives none to torchobs.log(), and its batches have no ids.",
            "short",
            Query(tokens(*RANKS), RUN),
        ),
        panels.lines(
            "Samples per second",
            "Samples per second of all ranks. Good: level. Empty: where the script gives none to torchobs.log(), and has no "
            "data loader of torch's.",
            "short",
            Query(per_run("sum", rate(catalog.SAMPLES, *RANKS)), RUN),
        ),
        panels.lines(
            "Model FLOPs utilization",
            "Share of the devices' dense peak that the model's own operations are, the mean over the ranks and the lowest. "
            "Good: level; 30 to 50 % is usual for large language models. Empty: on CPUs and unknown devices, and where neither "
            "tokens nor torchobs.log(flops=...) are known.",
            "percentunit",
            Query(per_run("avg", select(catalog.MFU, *RANKS)), f"{RUN} mean"),
            Query(per_run("min", select(catalog.MFU, *RANKS)), f"{RUN} lowest"),
        ),
        panels.lines(
            "Model FLOPs per second",
            "Floating-point operations of the model per second, of all ranks. Good: level. Empty: where neither tokens nor "
            "torchobs.log(flops=...) are known.",
            "flops",
            Query(per_run("sum", f"{rate(catalog.STEPS, *RANKS)} * {select(catalog.MODEL_FLOPS, *RANKS)}"), RUN),
        ),
        panels.lines(
            "Scalars",
            "Mean over the ranks of each number that the script gives to torchobs.log(). Good: you know. Empty: where it "
            "gives none.",
            "short",
            Query(f"avg by (name) ({select(catalog.SCALAR_VALUE, *RANKS)})", "{{name}}"),
        ),
    )


def grad_norm() -> str:
    """Return the norm of the run: if N ranks hold a shard each, its square is N times the mean of their squares.

    Where all ranks are on one machine, the exporter has combined it.
    """
    combined = per_run("max", select(catalog.RUN_GRAD_NORM, *RUNS))
    squares = per_run("avg", f"{select(catalog.GRAD_NORM, *RANKS)} ^ 2")
    ranks = per_run("max", select(catalog.GRAD_NORM_RANKS, *RANKS))
    sharded, whole = f"{squares} * {ON_RUN} {ranks}", squares  # the number is quiet at 1, where each rank has all of it
    return f"{combined} or sqrt({sharded} or {whole})"


def use_of_time(limits: Thresholds) -> tuple[Panel, ...]:
    """Return phases of steps and the use of the wall time."""
    return (
        panels.coarse(
            panels.lines(
                "Step time by phase",
                "Share of the steps' time in each phase, over all ranks. Good: mostly forward and backward. Much data: "
                "the input pipeline is too slow.",
                "percentunit",
                Query(shares(catalog.STEP_PHASE_TIME, "phase", *RANKS), "{{phase}}"),
                stacked=True,
            )
        ),
        panels.coarse(
            panels.lines(
                "Wall time by use",
                "Share of the wall time that was productive, spent waiting for data, in steps that a loss scaler skipped, in "
                "evaluation, checkpoints, compilation, or idle. Good: nearly all productive.",
                "percentunit",
                Query(uses(*RANKS), "{{state}}"),
                stacked=True,
            )
        ),
        panels.coarse(
            panels.lines(
                "Goodput over time",
                "Productive share of the time; with the recording rule, restarts, gaps and lost ranks count as lost. "
                f"Good: above {thresholds.percent(limits.goodput)}.",
                "percentunit",
                Query(goodput(*RUNS), RUN),
                steps=thresholds.goodput(limits.goodput),
            )
        ),
    )


def verdicts() -> tuple[Panel, ...]:
    """Return anomalies, and alerts of the run."""
    alerts = f'ALERTS{{{", ".join(RUNS[2:])}, alertname=~"Torchobs.*", alertstate="firing"}}'
    return (
        panels.lines(
            "Anomalies",
            "Anomalous steps by kind, on the rank that has most: ranks that share their gradients see the same. Good: 0, but "
            "for single loss spikes.",
            "short",
            Query(f"max by (kind) ({increase(catalog.ANOMALIES, *RANKS)})", "{{kind}}"),
        ),
        panels.lines(
            "Changes of the model",
            "Times that training continued with parameters never trained before, which resets all baselines. Good: as "
            "many as folds or trials. Empty: in a training of one model.",
            "short",
            Query(f"max({increase(catalog.MODEL_CHANGES, *RANKS)})", "changes"),
        ),
        panels.timeline(
            "Alerts of this run",
            "Alerts of torchobs that fired for this run, and since when. Good: none. Empty: while none fires.",
            "short",
            Query(f"max by (alertname) ({alerts})", "{{alertname}}"),
            steps=(Step(None, GOOD), Step(1.0, BAD)),
            texts={"1": "firing"},
            width=8,
        ),
    )


def settings() -> tuple[Panel, ...]:
    """Return what the training was told."""
    facts = {name: name.replace("_", " ") for name in ("rank", "host", "script", "launcher", "torch_version", "python_version")}
    return (
        panels.lines(
            "Weight decay",
            "Weight decay of the first parameter group, and of the next three where it differs. Good: as you have set it. "
            "Empty: without an optimizer that has one.",
            "short",
            Query(f"max by (group) ({select(catalog.OPTIMIZER_WEIGHT_DECAY, *RANKS)})", "group {{group}}"),
        ),
        panels.lines(
            "Momentum and betas",
            "Momentum or Adam's beta1, and beta2. Good: as you have set them. Empty: without an optimizer that has one.",
            "short",
            Query(f"max by (group) ({select(catalog.OPTIMIZER_MOMENTUM, *RANKS)})", "momentum or beta1, group {{group}}"),
            Query(f"max by (group) ({select(catalog.OPTIMIZER_BETA2, *RANKS)})", "beta2, group {{group}}"),
        ),
        panels.lines(
            "Schedulers",
            "Steps of learning-rate schedulers per step of the training, and wrong uses by kind. Good: no wrong use. "
            "Empty: without a scheduler.",
            "short",
            Query(f"avg {BY_RUN} ({rate(catalog.SCHEDULER_STEPS, *RANKS)}) / ({speed()} > 0)", "steps per step"),
            Query(f"max by (kind) ({increase(catalog.SCHEDULER_MISUSE, *RANKS)})", "{{kind}}"),
        ),
        panels.rows(
            "What runs",
            "Machine, script, launcher and versions of each rank. Good: all ranks have the same versions.",
            (Column("", per_run("max", select(catalog.RANK_INFO, *RANKS), *facts)),),
            labels=facts,
        ),
    )
