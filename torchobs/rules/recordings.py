"""Recording rules of ranks, nodes and runs, named level:metric:operation; recent increases; percentiles.

*Recent increases* are those of the last ten minutes with a counter's first sample: `increase()` counts from the second sample
on, so the value at a series' first scrape is lost: a rank's first seconds, or a recompile storm between two scrapes. But a
rank's counters begin at 0 with it, so that a young rank's whole count is recent; likewise that of a series that did not exist
ten minutes ago although its rank did. (The usual `x unless x offset 10m` alone takes series for new after an outage of
Prometheus.)

Some series of a run outlive those of its ranks: alerts ask how many ranks lived, and how they ended, when no rank is left.

*Percentiles* are recorded of classic and of native histograms: with `convert_classic_histograms_to_nhcb` there are no `_bucket`
series, and dashboards and alerts query the same ones.
"""

from __future__ import annotations

from torchobs import catalog
from torchobs.catalog import Metric
from torchobs.rules.promql import (
    BY_GROUP,
    BY_RANK,
    BY_RUN,
    ON_GROUP,
    ON_RANK,
    ON_RUN,
    ONE_GROUP,
    ONE_RANK,
    ONE_RUN,
    REPLICA_GROUP,
    RUN,
    grouped,
    select,
)
from torchobs.rules.rule_file import SEEN, WINDOW, WINDOW_S, Group, Recording

RECENT = ":recent"


def name(metric: Metric) -> str:
    """Return the name of the recorded series of the metric's recent increase."""
    level = "_".join(["rank", *(attribute.name.replace(".", "_") for attribute in metric.attributes)])
    return f"{level}:{metric.prometheus.removesuffix('_total')}{RECENT}"


def recent(metric: Metric, *matchers: str, born_later: bool = False, moves: bool = False) -> Recording:
    """Return the rule; nothing is recorded where nothing was counted.

    ``born_later``: the series may be much younger than their rank; otherwise they begin with it. The last sample counts also of
    series that have ended since the evaluation before. ``moves``: nothing soon after the last count, for it is asked what share
    another one is: a window that is about to end would hold a run's last few steps alone.
    """
    counter, started = select(metric, *matchers), select(catalog.RANK_START_TIME)
    now, before = f"last_over_time({counter}[{SEEN}])", f"offset {WINDOW}"
    new = f"""
          or
            {now} unless {counter} {before} and on ({ONE_RANK}) {started} {before}"""
    lately = f" and {now} unless increase({counter}[{SEEN}]) == 0" if moves else ""
    expr = f"""
        (
            {now} and on ({ONE_RANK}) time() - last_over_time({started}[{SEEN}]) < {WINDOW_S}{new if born_later else ""}
          or
            increase({counter}[{WINDOW}]){lately}
        ) > 0
    """
    return Recording(name(metric), expr)


ONE_NUMBER = f"{ONE_RUN}, rank"
"""Labels of a rank on any machine: after a restart elsewhere it has another instance."""

STARTED = "rank_number:torchobs_rank_start_time_seconds:max"
TWINS = "rank_number:torchobs_rank_up:several"
ALIVE = "run:torchobs_rank_up:sum"
FAILED = "run:torchobs_rank_exit:failed"
LEFT = "run:torchobs_rank_exit:left"
LEFT_AT = "rank_number:torchobs_rank_exit:left_at"
WORLD_SIZE = "run:torchobs_world_size:max"
MISSING = "run:torchobs_rank_up:missing"
FIRST_START = "run:torchobs_rank_start_time_seconds:first"
CHECKPOINT = "run:torchobs_checkpoint_timestamp_seconds:max"
PHASE_MEAN = "rank_phase:torchobs_step_phase_time_seconds:mean10m"
STEP_MEAN = "rank:torchobs_step_duration_seconds:mean10m"
ABOVE = "rank_phase:torchobs_step_phase_time_seconds:above10m"
TOGETHER = "rank:torchobs_step_phase_time_seconds:together10m"
EXCESS = "rank:torchobs_rank_excess_seconds:run10m"
SLOWDOWN = "rank:torchobs_rank_slowdown_ratio:run10m"
NODE_SLOWDOWN = "node:torchobs_rank_slowdown_ratio:avg10m"
RUN_STEP_MEAN = "run:torchobs_step_duration_seconds:mean10m"
RUN_STEP_BEST = "run:torchobs_step_duration_seconds:best"
RUN_GOODPUT_RATE = "run:torchobs_goodput_time_seconds:rate5m"
GOODPUT_NOW = "run:torchobs_goodput:ratio5m"
GOODPUT = "run:torchobs_goodput:ratio"
TOKENS = "run:torchobs_tokens:rate5m"
POSITION = "run:torchobs_steps:position"
REACHED = "run:torchobs_steps:reached"
REPEATING = "run:torchobs_steps:repeating"
PRODUCTIVE = "run:torchobs_goodput_time_seconds:productive_rate5m"

NO_FAULT = ("finished", "interrupted", "terminated")
"""Exit reasons that somebody wanted: no faults."""
FAULTS = "|".join(reason for reason in catalog.EXIT_REASONS if reason not in NO_FAULT)
PAST = "7d"
"""Longest gap over which a run's best and its first start are remembered; of a longer run its last seven days count."""
GONE = "1h"
"""Time in which a run without a living rank may be restarted: its wall time counts on, as time lost."""


def runs() -> Group:
    """Return the rules about living and ended ranks: a handful of series for each run."""
    started, up = select(catalog.RANK_START_TIME), select(catalog.RANK_UP)
    return Group(
        "torchobs.runs",
        (
            Recording(STARTED, f"max by ({ONE_NUMBER}) ({started})"),
            Recording(TWINS, f"count by ({ONE_NUMBER}) ({up} == 1) > 1"),
            Recording(ALIVE, f"sum {BY_RUN} ({up}) or 0 * {ended()}"),
            Recording(FAILED, f"{ended(FAULTS)} or 0 * {ALIVE}"),
            Recording(LEFT, f"{ended('|'.join(NO_FAULT))} or 0 * {ALIVE}"),
            Recording(WORLD_SIZE, f"max {BY_RUN} ({select(catalog.WORLD_SIZE)})"),
            Recording(LEFT_AT, _left_at()),
            Recording(MISSING, f"clamp_min({WORLD_SIZE} - {ON_RUN} {ALIVE} - {ON_RUN} {_left()}, 0) and {ON_RUN} {ALIVE} > 0"),
            Recording(FIRST_START, _first_start()),
            Recording(CHECKPOINT, f"max {BY_RUN} ({select(catalog.CHECKPOINT_TIMESTAMP)})"),
            Recording(TOKENS, _tokens()),
            Recording(POSITION, _position()),
            Recording(REACHED, _reached()),
            Recording(REPEATING, _repeating()),
        ),
    )


def ended(reasons: str = "", *matchers: str) -> str:
    """Return how many ranks of each run have ended for one of the reasons (all by default), and were not started again.

    A rank may show its end in a single scrape, between two evaluations of a rule: the query looks back.
    """
    return f"count {BY_RUN} ({gone(reasons, *matchers)})"


def gone(reasons: str = "", *matchers: str) -> str:
    """Return the ranks that :func:`ended` counts."""
    exits = select(catalog.RANK_EXIT, *matchers, *([f'reason=~"{reasons}"'] if reasons else []))
    again = f"unless on ({ONE_NUMBER}) {select(catalog.RANK_UP, *matchers)} == 1"
    return f"max by ({ONE_NUMBER}) (max_over_time({exits}[{SEEN}])) == 1 {again}"


def _left_at() -> str:
    """Return when ranks were first seen to have left in order, remembered while others of their run go on."""
    moments = f"last_over_time({LEFT_AT}[{GONE}]) or 0 * ({gone('|'.join(NO_FAULT))}) + time()"
    return f"({moments}) unless on ({ONE_NUMBER}) {select(catalog.RANK_UP)} == 1 and {ON_RUN} {ALIVE} > 0"


def _left() -> str:
    """Return how many ranks have left a run: lately, or since a rank started; after a restart the ends are seen late."""
    since = f"{LEFT_AT} - 30 > {ON_RUN} group_left () max {BY_RUN} ({select(catalog.RANK_START_TIME)})"
    return f"(count {BY_RUN} ({since}) > {ON_RUN} {LEFT} or {LEFT})"


def _first_start() -> str:
    """Return the time at which the run first started, remembered; none after it has ended in order or for an hour."""
    earliest = f"min {BY_RUN} ({select(catalog.RANK_START_TIME)})"
    before = f"last_over_time({FIRST_START}[{PAST}])"
    return f"""
        ({before} <= {ON_RUN} {earliest} or {earliest} or {before})
        and {ON_RUN} max_over_time({ALIVE}[{GONE}]) > 0
        unless {ON_RUN} (last_over_time({ALIVE}[{GONE}]) == 0 and {ON_RUN} last_over_time({FAILED}[{GONE}]) == 0)
    """


def _position() -> str:
    """Return the step that a run has reached, by ranks that know where they resumed; an optimizer counts no skipped steps."""
    done = f"{select(catalog.STEPS_RESUMED_FROM)} + {ON_RANK} {select(catalog.STEPS)}"
    return f"max {BY_RUN} ({done} - {ON_RANK} {select(catalog.AMP_STEPS_SKIPPED)} or {done})"


def _reached() -> str:
    """Return the furthest step that a run has reached, remembered over restarts.

    After a rank that has finished it begins anew: a second training of one job repeats nothing.
    """
    before = f"last_over_time({REACHED}[{PAST}])"
    finished = select(catalog.RANK_EXIT, 'reason="finished"')
    anew = f"{ON_RUN} max {BY_RUN} (max_over_time({finished}[5m])) == 1"
    return f"{POSITION} and {anew} or {before} >= {ON_RUN} {POSITION} or {POSITION}"


def _repeating() -> str:
    """Return 1 while a run repeats steps, else 0; nothing before the first step after a restart."""
    resumed = f"max {BY_RUN} ({select(catalog.STEPS_RESUMED_FROM)})"
    return f"({POSITION} > {ON_RUN} {resumed}) < bool {ON_RUN} {REACHED}"


def _tokens() -> str:
    """Return the run's tokens a second: a data-parallel group's ranks each count their own, copies count the same ones.

    Ranks of a mesh with tensor or pipeline dimensions count the same tokens as often as there are such copies.
    """
    rate = f"sum {BY_RUN} (rate({select(catalog.TOKENS)}[5m]))"
    copies = f"max {BY_RUN} ({select(catalog.DISTRIBUTED_COPIES)})"
    return f"{rate} / {ON_RUN} {copies} or {rate}"


def speed() -> Group:
    """Return the rules about step times: how long each rank's peers wait for it.

    An exporter compares the ranks of its machine. The ranks of a run on several machines are compared here, in the same way.
    """
    phases, steps = select(catalog.STEP_PHASE_TIME), select(catalog.STEPS)
    rate = f"(rate({steps}[{WINDOW}]) > 0)"
    grown = f"and {ON_RANK} time() - {select(catalog.RANK_START_TIME)} >= {WINDOW_S}"
    means = f"rate({phases}[{WINDOW}]) / {ON_RANK} group_left () {rate} {grown}"
    info = f"topk {BY_RANK} (1, {select(catalog.RANK_INFO)})"
    phases = "|".join(catalog.LATE_PHASES)
    together = f"""sum by ({ONE_RANK}, {REPLICA_GROUP}) ({select(ABOVE, f'phase=~"{phases}"')})"""
    many = f"count {BY_GROUP} (2 * {TOGETHER} >= {ON_GROUP} group_left () max {BY_GROUP} ({TOGETHER}))"
    few = f"{TOGETHER} and {ON_GROUP} 2 * {many} < {ON_GROUP} count {BY_GROUP} ({TOGETHER})"
    late = f"""clamp_min(max {BY_RANK} ({select(ABOVE, 'phase="data"')} or {few}), 0)"""
    wait = f"""sum {BY_RANK} (clamp_min(-1 * {select(ABOVE, 'phase!="data"')}, 0))"""
    excess = select(catalog.RANK_EXCESS)
    return Group(
        "torchobs.speed",
        (
            Recording(PHASE_MEAN, grouped(means)),
            Recording(STEP_MEAN, f"sum by ({ONE_RANK}, {REPLICA_GROUP}) ({PHASE_MEAN})"),
            Recording(ABOVE, _above_peers()),
            Recording(TOGETHER, together),
            Recording(
                EXCESS,
                f"{late} < {ON_RANK} {wait} or {wait} or sum {BY_RANK} (quantile_over_time(0.5, {excess}[{WINDOW}])) {grown}",
            ),
            Recording(
                SLOWDOWN,
                f"{STEP_MEAN} / {ON_RANK} ({STEP_MEAN} - {ON_RANK} {EXCESS} > 0) and {ON_RANK} {ABOVE} "
                f"or max {BY_RANK} (quantile_over_time(0.5, {select(catalog.RANK_SLOWDOWN)}[{WINDOW}])) {grown}",
            ),
            Recording(NODE_SLOWDOWN, f"avg by ({ONE_RUN}, host) ({SLOWDOWN} * {ON_RANK} group_left (host) {info})"),
            Recording(RUN_STEP_MEAN, f"avg {BY_RUN} ({STEP_MEAN})"),
            Recording(RUN_STEP_BEST, _best()),
        ),
        interval="1m",  # means of ten minutes: up to fifteen series for each rank
    )


def _above_peers() -> str:
    """Return each rank's time per step in each phase above the median of its peers, where no exporter sees the whole run.

    Its peers are the ranks of its replica group. They are not compared while some record between what others record as forward.
    """
    median = f"quantile by ({ONE_GROUP}, phase) (0.5, {PHASE_MEAN})"
    # the median of two is their mean, half way to the other
    peers = f"{ON_GROUP} group_left () (1 + (count {BY_GROUP} ({STEP_MEAN}) == bool 2))"
    together = f"unless {ON_RUN} max {BY_RUN} ({select(catalog.RUN_LOCAL_RANKS)}) >= {ON_RUN} {ALIVE}"
    between = select(PHASE_MEAN, 'phase="between"')
    alike = f"unless {ON_GROUP} (max {BY_GROUP} ({between}) > 0 and {ON_GROUP} min {BY_GROUP} ({between}) == 0)"
    return (
        f"({PHASE_MEAN} - on ({ONE_GROUP}, phase) group_left () {median}) * {peers} "
        f"and {ON_GROUP} count {BY_GROUP} ({STEP_MEAN}) > 1 {together} {alike}"
    )


def _best() -> str:
    """Return the run's best mean so far, remembered over restarts; it begins anew with a model never trained before."""
    before = f"last_over_time({RUN_STEP_BEST}[{PAST}])"
    changed = f"{ON_RUN} sum {BY_RUN} (increase({select(catalog.MODEL_CHANGES)}[{WINDOW}])) > 0"
    return f"{RUN_STEP_MEAN} and {changed} or {before} <= {ON_RUN} {RUN_STEP_MEAN} or {RUN_STEP_MEAN}"


def goodput() -> Group:
    """Return the rules about the use of the machines' time: productive rank seconds over world size times wall time.

    No rank has the time between a crash and the restart, or that of missing ranks, so that it is not productive. Neither is the
    share of the time in which the run repeated steps that it had made before a restart; where ranks do not know from which
    step they resumed, repeated steps count as productive.
    """
    rate = f'sum {BY_RUN} ({RUN_GOODPUT_RATE}{{state="productive"}})'
    anew = f"{rate} * {ON_RUN} (1 - avg_over_time({REPEATING}[5m]))"
    used, up = f"rate({select(catalog.GOODPUT_TIME)}[5m])", select(catalog.RANK_UP)
    watched = f"sum {BY_RANK} ({used}) > 0 unless {ON_RANK} {up} offset 5m"  # of a rank seen for less than the five minutes
    share = f"({used} / {ON_RANK} group_left () ({watched}) or {used}) and {ON_RANK} {up} == 1"
    return Group(
        "torchobs.goodput",
        (
            Recording(RUN_GOODPUT_RATE, f"sum by ({ONE_RUN}, state) ({share})"),
            Recording(PRODUCTIVE, f"{anew} or {rate}"),
            Recording(
                GOODPUT_NOW,
                f"clamp_max({PRODUCTIVE} / {ON_RUN} last_over_time({WORLD_SIZE}[{GONE}]), 1) and {ON_RUN} "
                f"{FIRST_START} or 0 * ({FIRST_START} == {FIRST_START} offset 1m)",
            ),
            Recording(GOODPUT, f"avg_over_time({GOODPUT_NOW}[{PAST}]) and {ON_RUN} {FIRST_START}"),
        ),
        interval="1m",
    )


RANK_QUANTILE = f"rank_quantile:{catalog.STEP_DURATION.prometheus}:histogram_quantile"
RUN_QUANTILE = f"run_quantile:{catalog.STEP_DURATION.prometheus}:histogram_quantile"
"""Quantiles of each rank's steps, and of all ranks of a run together, with the label `quantile`"""
RATE_WINDOW = "5m"
"""Five scrapes at the longest usual interval, a minute, so that one may fail; steps of a minute still count."""


def percentiles(*, native: bool) -> list[Group]:
    """Return a group for each percentile: groups are evaluated side by side, and the rules of one in turn.

    ``native``: of native histograms, including those with custom buckets; else of classic ones (`_bucket` series).
    """
    rates = f"rate({select(catalog.STEP_DURATION, suffix='' if native else '_bucket')}[{RATE_WINDOW}])"
    summed = f"sum by ({', '.join(RUN if native else (*RUN, 'le'))}) ({rates})"
    wanted = [
        (name, of, quantile) for name, of in ((RANK_QUANTILE, rates), (RUN_QUANTILE, summed)) for quantile in ("0.5", "0.99")
    ]
    return [
        # Without steps in the window the quantile is NaN, which `>= 0` drops: nothing is recorded for a dead rank.
        Group(
            f"torchobs.percentiles.{number}",
            (Recording(name, f"histogram_quantile({quantile}, {of}) >= 0", (("quantile", quantile),)),),
            interval="1m",  # for a thousand ranks a percentile takes half a second: 23 buckets each
        )
        for number, (name, of, quantile) in enumerate(wanted, start=1)
    ]
