"""Ranks: the ranks of one run compared, on all its nodes: which of them holds up the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import Column, Query
from dashboards.grafana.queries import (
    MOST,
    PRODUCTIVE,
    RANKS,
    RUNS,
    own_step_s,
    per_rank,
    per_run,
    rank_step_s,
    rate,
    slow_nodes,
    straggling,
    worst,
)
from dashboards.grafana.template import Choice, page
from torchobs import catalog
from torchobs.rules.promql import BY_GROUP, ON_RANK, ONE_GROUP, ONE_RANK, grouped, select

if TYPE_CHECKING:
    from collections.abc import Callable

    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

    from torchobs.catalog import Metric
    from torchobs.rules.values import Thresholds

RANK = "rank {{rank}} {{instance}}"
LISTED = 20


def dashboard(limits: Thresholds) -> Dashboard:
    """Return the dashboard."""
    sections = [
        Section("Who is slow", slow(limits)),
        Section("Who is where", where()),
        Section("Who is alive", alive()),
        Section("How they are joined", joined(), collapsed=True),
    ]
    about = "The ranks of one run compared: which of them holds up the others."
    return page("torchobs-ranks", "ranks", about, Choice.RUN | Choice.RANK, sections)


def slow(limits: Thresholds) -> tuple[Panel, ...]:
    """Return stragglers."""
    return (
        panels.by_rank(
            "Own step time by rank",
            "Each rank's time for a step without the backward pass, in which it waits for the others. Good: one colour; "
            "a red line is a straggler, a red column a moment that was slow for all, red blocks are a slow node.",
            "s",
            own_step_s(*RANKS),
        ),
        panels.by_rank(
            "Waiting for others by rank",
            "Share of its step time that each rank spends in the backward pass, where it waits for the slowest one. In a "
            "synchronous training the slow rank is the one that waits least: green among red. Good: one colour.",
            "percentunit",
            f"{per_rank(rate(catalog.STEP_PHASE_TIME, *RANKS, BACKWARD), operator='sum')}"
            f" / ({per_rank(rate(catalog.STEP_PHASE_TIME, *RANKS), operator='sum')} > 0)",
        ),
        panels.coarse(
            panels.lines(
                "Stragglers across nodes",
                f"The {MOST} ranks that the others wait for most, on whatever nodes: step time over what it would be if they "
                "did not. Good: below 1.2.",
                "short",
                Query(worst(straggling(*RANKS)), RANK),
                steps=thresholds.ratio(limits.straggler),
            )
        ),
        panels.coarse(
            panels.lines(
                "Slow nodes",
                f"The {MOST} machines whose ranks the others wait for most, on average. Good: below 1.2; a whole node above "
                "it has a hot GPU, a busy CPU or a slow disk.",
                "short",
                Query(worst(slow_nodes(*RANKS)), "{{host}}"),
                steps=thresholds.ratio(limits.straggler),
            )
        ),
        panels.lines(
            "Slowest on their machine",
            f"The exporters' own comparison, step by step: the {MOST} ranks with the longest step time over what it would be "
            "if their peers on the same machine did not wait for them. Good: below 1.2. Empty: with one rank per exporter.",
            "short",
            Query(worst(select(catalog.RANK_SLOWDOWN, *RANKS)), RANK),
            steps=thresholds.ratio(limits.straggler),
        ),
        panels.lines(
            "What the slowest lose time with",
            f"Time per step that the peers on the same machine wait for a rank, by phase: the {MOST} worst. Good: below 5 ms. "
            "Empty: with one rank per exporter.",
            "s",
            Query(worst(select(catalog.RANK_EXCESS, *RANKS)), "rank {{rank}} {{phase}}"),
        ),
        panels.shares(
            "Step time by phase and rank",
            f"Seconds per second in each phase, now, of the {LISTED} ranks that wait least for others. Good: all bars alike.",
            Query(
                f"label_join({per_run('sum', rate(catalog.STEP_PHASE_TIME, *RANKS), 'rank', 'phase')} and on (rank) "
                f"bottomk({LISTED}, sum by (rank) ({rate(catalog.STEP_PHASE_TIME, *RANKS, BACKWARD)})), "
                '"row", " ", "rank", "cluster")',
                instant=True,
            ),
            row="row",
            column="phase",
        ),
    )


BACKWARD = 'phase="backward"'


def where() -> tuple[Panel, ...]:
    """Return progress of each."""
    steps = grouped(per_rank(select(catalog.STEPS, *RANKS)))
    return (
        panels.by_rank(
            "Steps behind by rank",
            "Steps by which each rank is behind the furthest rank of its replica group on its machine. Good: 0 or 1; more in a "
            "synchronous training means a rank that has stopped. Empty: with one rank per exporter.",
            "short",
            select(catalog.RANK_BEHIND, *RANKS),
            highest=10,
        ),
        panels.by_rank(
            "Goodput by rank",
            "Productive share of each rank's time. Good: green.",
            "percentunit",
            per_rank(rate(catalog.GOODPUT_TIME, *RANKS, PRODUCTIVE)),
            reverse=True,
            highest=1,
        ),
        panels.lines(
            "Step spread",
            "Steps between the first and the last rank of a replica group: of all nodes, and within a machine as its exporter "
            "sees it. Good: 0 or 1, and the seconds between two scrapes' worth of steps across nodes.",
            "short",
            Query(f"max(max {BY_GROUP} ({steps}) - min {BY_GROUP} ({steps}))", "all nodes"),
            Query(f"max({select(catalog.RUN_STEP_SPREAD, *RUNS)})", "within a machine"),
        ),
        panels.lines(
            "Oldest last step",
            f"Time since the last step of the {MOST} ranks that have waited longest, with the scrape's age. Good: less than "
            "the longest evaluation.",
            "s",
            Query(worst(f"time() - {per_rank(select(catalog.LAST_STEP_TIMESTAMP, *RANKS))}"), RANK),
            steps=thresholds.PROGRESS_AGE,
        ),
        panels.coarse(
            panels.lines(
                "Slowest by whole step",
                f"Median step duration of the {MOST} slowest ranks, waiting included; the mean where recording rules are not "
                "loaded. Good: all alike, for ranks that wait for each other take the same time.",
                "s",
                Query(worst(rank_step_s(*RANKS)), RANK),
            )
        ),
    )


def alive() -> tuple[Panel, ...]:
    """Return life signs."""
    beat = per_rank(select(catalog.RANK_HEARTBEAT_TIMESTAMP, *RANKS))
    return (
        panels.lines(
            "Oldest heartbeat",
            f"Time since the last heartbeat of the {MOST} ranks that have been silent longest. Good: some seconds, of "
            "which most is the scrape's age.",
            "s",
            Query(worst(f"time() - {beat}"), RANK),
            steps=thresholds.HEARTBEAT_AGE,
        ),
        panels.lines(
            "Ranks seen",
            "Ranks of the run that live: as the exporters count them on their machines, and as many as the launcher and the "
            "process group say there are; and how many of them train on the same batch. Good: all the same. Empty: the last, "
            "without tensor or pipeline parallelism.",
            "short",
            Query(f"sum({select(catalog.RUN_LOCAL_RANKS, *RUNS)})", "on the machines"),
            Query(f"max({select(catalog.WORLD_SIZE, *RUNS)})", "by the launcher"),
            Query(f"max({select(catalog.DISTRIBUTED_WORLD_SIZE, *RUNS)})", "in the process group"),
            Query(f"sum({select(catalog.RUN_MISSING_RANKS, *RUNS)})", "missing on a machine"),
            Query(f"max({select(catalog.DISTRIBUTED_COPIES, *RUNS)})", "that train on the same batch"),
        ),
        panels.lines(
            "Threads, children and files",
            "The most of any rank: threads, processes that descend from it, and its share of the file descriptors that "
            "it may open. Good: level; growth is a leak. Empty: the children, while there are none.",
            "short",
            Query(f"max({select(catalog.PROCESS_THREADS, *RANKS)})", "threads"),
            Query(f"max({select(catalog.PROCESS_CHILDREN, *RANKS)})", "children"),
            Query(
                f"100 * max({per_rank(select(catalog.PROCESS_OPEN_FILES, *RANKS))}"
                f" / {per_rank(select(catalog.PROCESS_MAX_FILES, *RANKS))})",
                "open files, % of the limit",
            ),
        ),
        panels.rows(
            "Ranks that are not alive",
            "Ranks in another state than alive, the time since their last step, where a hung one is stuck, and how they "
            "ended. Good: an empty table, or finished. Empty: while all live.",
            (
                Column("", f"{per_rank(OTHERWISE, 'state')} == 1"),
                Column("no step for", per_rank(select(catalog.RANK_PROGRESS_AGE, *RANKS)) + NOT_ALIVE, "s"),
                Column("at step", per_rank(select(catalog.RANK_STALL_POSITION, *RANKS), "phase") + NOT_ALIVE),
                Column("", f"{per_rank(select(catalog.RANK_EXIT, *RANKS), 'reason')} == 1"),
                Column("", f"{per_rank(select(catalog.RANK_EXCEPTION, *RANKS), 'exception_type', 'message')} == 1"),
            ),
            labels={
                "rank": "rank",
                "instance": "exporter",
                "state": "state",
                "phase": "stuck in",
                "reason": "ended by",
                "exception_type": "exception",
                "message": "message",
            },
        ),
    )


OTHERWISE = select(catalog.RANK_STATE_SET, *RANKS, 'state!="alive"')
NOT_ALIVE = f" and {ON_RANK} ({OTHERWISE} == 1)"


def _by_place(axis: str) -> str:
    """Return the mean step of the ranks that have the same index on this axis."""
    places = per_rank(select(catalog.DISTRIBUTED_COORDINATES, *RANKS, f'{axis}!=""'), axis)
    return f"avg by ({axis}) (({rank_step_s(*RANKS)}) * {ON_RANK} group_left ({axis}) {places})"


def joined() -> tuple[Panel, ...]:
    """Return how the ranks work together."""
    return (
        panels.lines(
            "DistributedDataParallel's time",
            "The parts of the iteration that DDP timed last, on average: forward, backward, communication, and how much "
            "of it computation hid. Good: overlap is nearly all of communication. Empty: without DDP.",
            "s",
            Query(f"avg by (part) ({select(catalog.DDP_TIME, *RANKS)})", "{{part}}"),
            width=12,
        ),
        panels.lines(
            "Gradient buckets",
            "Number of DDP's buckets, each of which is one all-reduce. Good: some; one bucket overlaps with nothing. Empty: "
            "without DDP.",
            "short",
            Query(f"max({select(catalog.DDP_BUCKETS, *RANKS)})", "buckets"),
            width=6,
        ),
        panels.lines(
            "Bucket and unused parameters",
            "Size of the largest bucket, and of the parameters unused in the iteration timed last. Good: no unused "
            "parameters, which make DDP search for them. Empty: without DDP.",
            "bytes",
            Query(f"max({select(catalog.DDP_BUCKET_SIZE, *RANKS)})", "largest bucket"),
            Query(f"max({select(catalog.DDP_UNUSED_SIZE, *RANKS)})", "unused parameters"),
            width=6,
        ),
        panels.rows(
            "Parallelism",
            "Backend, kind of parallelism and mesh, with the number of ranks that say so. Good: one row. Empty: without "
            "torch.distributed.",
            (Column("ranks", per_run("count", select(catalog.DISTRIBUTED_INFO, *RANKS), "backend", "parallelism", "mesh")),),
            labels={"backend": "backend", "parallelism": "parallelism", "mesh": "mesh"},
            width=12,
        ),
        panels.coarse(
            panels.lines(
                "Step time by place",
                "Mean step of the ranks of each pipeline stage and each tensor-parallel index. Good: all the same; a stage "
                "that is slower than the others has too many layers. Empty: without a mesh that has these dimensions.",
                "s",
                *(Query(_by_place(axis), f"{axis} {{{{{axis}}}}}") for axis in ("pp", "tp")),
            )
        ),
        panels.rows(
            "Settings of DDP",
            "Settings of DistributedDataParallel, with the number of ranks that have them. Good: one row. Empty: without DDP.",
            (Column("ranks", per_run("count", select(catalog.DDP_INFO, *RANKS), *DDP_SETTINGS)),),
            labels={name: name.replace("_", " ") for name in DDP_SETTINGS},
            width=12,
        ),
        *collectives(),
    )


def mean(metric: Metric) -> str:
    """Return the mean of a histogram's new values, classic or native."""
    total, number, native = (
        f"sum(rate({select(metric, *RANKS, suffix=suffix)}[$__rate_interval]))" for suffix in ("_sum", "_count", "")
    )
    return f"{total} / ({number} > 0) or histogram_sum({native}) / (histogram_count({native}) > 0)"


def collectives() -> tuple[Panel, ...]:
    """Return what torch's flight recorder says."""
    group = ("backend", "group")
    called = select(catalog.COLLECTIVE_ENQUEUED, *RANKS)
    of_group = f"by ({ONE_GROUP}, {', '.join(group)})"
    apart = f"max {of_group} ({grouped(called)}) - min {of_group} ({grouped(called)})"
    behind, last = _behind(called, *group)
    size, duration = mean(catalog.COLLECTIVE_SIZE), mean(catalog.COLLECTIVE_DURATION)
    given = f"sum by (operation) (rate({select(catalog.COLLECTIVE_INPUT, *RANKS)}[$__rate_interval]))"
    return (
        panels.lines(
            "Collectives between the first rank and the last",
            "Collectives of a process group that the rank with the most has called, and the one with the fewest has not. Good: "
            "some, as ranks are asked at different moments; in a hang it stays above zero, and the last rank is the one that "
            "the others wait for. Empty: without process groups of several ranks, or without torch's flight recorder.",
            "short",
            Query(apart, "{{group}} ({{backend}})"),
            width=12,
        ),
        panels.rows(
            "Ranks in a collective",
            f"Where no step ends, the {LISTED} that are furthest behind: how many collectives another rank of its group has "
            "called and it has not, how long it has waited in one, how large its input is, and the number of the last that "
            "has come back. Waiting for 0 s: it did not come, or waits for nothing. Good: nothing to see. Empty: without "
            "torch's flight recorder.",
            (
                Column("behind", behind),
                Column("waits for", last(catalog.COLLECTIVE_PENDING_AGE, "operation"), "s"),
                Column("input", last(catalog.COLLECTIVE_PENDING_SIZE, "operation"), "bytes"),
                Column("last done", last(catalog.COLLECTIVE_COMPLETED)),
            ),
            labels={"rank": "rank", "instance": "exporter", **{name: name for name in (*group, "operation")}},
            width=12,
        ),
        panels.lines(
            "Input of collectives",
            "What the ranks give to collectives, by operation, of those that torch's flight recorder holds when it is asked. "
            "Good: level. Empty: below level advanced.",
            "Bps",
            Query(given, "{{operation}}"),
            width=12,
        ),
        panels.lines(
            "Mean size of a collective",
            "Mean input of the collectives that are seen. Good: megabytes; many small ones cost latency. Empty: below level "
            "advanced.",
            "bytes",
            Query(size, "mean input"),
            width=6,
        ),
        panels.lines(
            "Mean duration of a collective",
            "Mean time of a collective on the device, waiting for late ranks included. Good: level. Empty: below level "
            "advanced, and without NCCL's timing (TORCH_NCCL_ENABLE_TIMING=1).",
            "s",
            Query(duration, "mean"),
            width=6,
        ),
    )


def _behind(called: str, *group: str) -> tuple[str, Callable[..., str]]:
    """Return how many collectives the ranks lack that are furthest behind, and what gives a metric of these ranks alone."""
    of_group, of_rank = (f"({of}, {', '.join(group)})" for of in (ONE_GROUP, ONE_RANK))
    most, ranks = f"max by {of_group} ({grouped(called)})", grouped(per_rank(called, *group))
    behind = worst(per_rank(f"{most} - on {of_group} group_right () {ranks}", *group), LISTED)

    def last(metric: Metric, *more: str) -> str:
        return f"{per_rank(select(metric, *RANKS), *group, *more)} and on {of_rank} {behind}"

    return behind, last


DDP_SETTINGS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "comm_hook")
