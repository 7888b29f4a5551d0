"""Alerts about a run that is slow, or that does not use its machines."""

from __future__ import annotations

from torchobs import catalog
from torchobs.detect.stragglers import LEAST_EXCESS_S, SLOW
from torchobs.rules.alert_texts import AT, SHARE, THIS_RUN, TIMES, Culprits, first
from torchobs.rules.alerts_ranks import lived
from torchobs.rules.promql import BY_RANK, BY_RUN, ONE_RANK, ONE_RUN, by_run, select
from torchobs.rules.recent import name, recent
from torchobs.rules.recordings import (
    EXCESS,
    GOODPUT_NOW,
    NODE_SLOWDOWN,
    PHASE_MEAN,
    RUN_GOODPUT_RATE,
    RUN_STEP_BEST,
    RUN_STEP_MEAN,
    SLOWDOWN,
)
from torchobs.rules.rule_file import WINDOW, Alert, Group
from torchobs.rules.values import DEFAULT, Values

BURNS = (("6h", "30m", 2.0), ("1d", "2h", 1.0))
"""Long and short window, and how many times as fast as allowed the budget of lost time is used up in both"""
_SLOW_NODE = ' On average a rank of node {{ $l.host }} makes a step {{ printf "%.2f" $v }} times as long.'
_GIVEN_UP = 'reason="recompile_limit"'
LEAST_SHARE = 0.05
"""Shares of the time below it are not worth a word."""
IDLE_S, IDLE_WITHIN = 60, "15m"
"""A pause outside of the training loop is in the time of the step that follows it. Less makes the steps of ten minutes a tenth
longer; and it is looked for beyond those ten minutes, because it was counted before that step ended."""


def speed(values: Values = DEFAULT) -> Group:
    """Return the rules about steps and machines."""
    return Group("torchobs.slow", (_slowdown(values), _straggler(values), _data(), _throttled(values), _goodput(values)))


def compilation(values: Values = DEFAULT) -> Group:
    """Return the rules about recompilation, by themselves: there is a series for each guard of each rank."""
    recompiles = recent(catalog.COMPILE_RECOMPILES, born_later=True)
    given_up = recent(catalog.COMPILE_FAILURES, _GIVEN_UP, born_later=True)
    return Group("torchobs.compile", (recompiles, given_up, _recompiles(values)))


def _slowdown(values: Values) -> Alert:
    """Return the alert; the baseline is the run's best ten minutes, which begin anew with another model (the next fold).

    Who pauses a notebook, and goes on, has not become slow.
    """
    idle = select(catalog.GOODPUT_TIME, 'state="idle"')
    means = f"avg by ({ONE_RUN}, phase) ({select(PHASE_MEAN, THIS_RUN)})"
    phases = f"{means} / on ({ONE_RUN}) group_left () sum {BY_RUN} ({means})"
    return Alert(
        alert="TorchobsSlowdown",
        expr=f"""
            max {BY_RUN} (
                {RUN_STEP_MEAN} / on ({ONE_RUN}) {RUN_STEP_BEST} > {values.thresholds.slower:g}
                unless on ({ONE_RUN})
                increase({idle}[{IDLE_WITHIN}]) > {IDLE_S}
            )
        """,
        summary="has become slow.",
        description=(
            'In the last 10 minutes a step took {{ printf "%.1f" $value }} times as long as in its best ones, evaluation, '
            "checkpoints and compilation not counted."
            f"{first(select(RUN_STEP_MEAN, THIS_RUN), ' It takes {{ $v | humanizeDuration }}')}"
            f"{first(select(RUN_STEP_BEST, THIS_RUN), ', at best {{ $v | humanizeDuration }}.')}"
        ),
        culprits=Culprits(f"{select(SLOWDOWN, THIS_RUN)} > {SLOW:g}", TIMES, "Slowest, for which the others wait"),
        also=(Culprits(f"{phases} > {LEAST_SHARE:g}", f"{SHARE} {{{{ $l.phase }}}}", "A step's time now is", named=False),),
    )


def _straggler(values: Values) -> Alert:
    """Return the alert: a rank that the others wait for, on whatever machines they are."""
    return Alert(
        alert="TorchobsStraggler",
        expr=by_run(f"{SLOWDOWN} > {values.thresholds.straggler:g} and on ({ONE_RANK}) {EXCESS} > {LEAST_EXCESS_S:g}"),
        summary="waits for one of its ranks.",
        description=(
            'In the last 10 minutes a step took {{ printf "%.1f" $value }} times as long as it would if the others did not '
            "wait for the slowest rank."
            f"{first(f'topk(1, {select(NODE_SLOWDOWN, THIS_RUN)} > {SLOW:g})', _SLOW_NODE)}"
        ),
        culprits=Culprits(f"{select(SLOWDOWN, THIS_RUN)} > {SLOW:g}", TIMES, "Slowest"),
    )


def _data() -> Alert:
    time_ = select(catalog.STEP_PHASE_TIME)
    waiting = select(catalog.STEP_PHASE_TIME, 'phase="data"')
    here, all_here = select(catalog.STEP_PHASE_TIME, THIS_RUN, 'phase="data"'), select(catalog.STEP_PHASE_TIME, THIS_RUN)
    return Alert(
        alert="TorchobsDataStarvation",
        expr=f"""
            max {BY_RUN} (
                sum {BY_RANK} (rate({waiting}[{WINDOW}])) / sum {BY_RANK} (rate({time_}[{WINDOW}]) > 0)
                and on ({ONE_RANK})
                min_over_time({select(catalog.DATA_STARVED)}[{WINDOW}]) == 1
                and on ({ONE_RANK})
                time() - {select(catalog.RANK_START_TIME)} > 600
            )
        """,
        summary="waits for its data.",
        description="One of its ranks spends {{ $value | humanizePercentage }} of its training time waiting for batches.",
        culprits=Culprits(
            f"sum {BY_RANK} (rate({here}[{WINDOW}])) / sum {BY_RANK} (rate({all_here}[{WINDOW}]) > 0)",
            SHARE,
        ),
    )


def _recompiles(values: Values) -> Alert:
    """Return the alert, also on functions at the recompile limit: they run uncompiled, and only a counter shows it."""
    recompiles = f"sum {BY_RANK} ({name(catalog.COMPILE_RECOMPILES)})"
    return Alert(
        alert="TorchobsRecompileStorm",
        expr=f"""
            max {BY_RUN} (
                {name(catalog.COMPILE_FAILURES)} > 0
              or
                {recompiles} > {values.thresholds.recompiles:g}
            )
        """,
        summary="is compiled again and again.",
        description=(
            f"In the last 10 minutes one of its ranks had more than {values.thresholds.recompiles:g} recompilations, or "
            "torch.compile gave a function up because of them."
        ),
        culprits=Culprits(
            f"max by ({ONE_RUN}, guard) ({select(name(catalog.COMPILE_RECOMPILES), THIS_RUN)})",
            '{{ printf "%.0f" $v }} by a guard of kind {{ $l.guard }}',
            "Most",
            named=False,
        ),
    )


def _throttled(values: Values) -> Alert:
    throttled, periods = select(catalog.CGROUP_CPU_THROTTLED_PERIODS), select(catalog.CGROUP_CPU_PERIODS)
    return Alert(
        alert="TorchobsCpuThrottled",
        expr=by_run(f"rate({throttled}[{WINDOW}]) / (rate({periods}[{WINDOW}]) > 0) > {values.thresholds.cpu_throttled:g}"),
        summary="is held back by its CPU limit.",
        description=(
            "In {{ $value | humanizePercentage }} of the quota's periods of the last 10 minutes a container stood still."
        ),
        culprits=Culprits(
            f"rate({select(catalog.CGROUP_CPU_THROTTLED_TIME, THIS_RUN)}[{WINDOW}])",
            f"{AT}, whose threads lost {{{{ $v | humanizeDuration }}}} each second",
            "Most",
            named=False,
        ),
    )


def _goodput(values: Values) -> Alert:
    """Return the alert: the budget of lost time is used up faster than allowed over a long and a short window.

    Who never trains (serves a model, or only evaluates one) has no such objective, and a script that failed at once, and was
    given up, holds no machine. One that fails so again and again does, and may wait for long in between: it is asked how long
    it lived in the whole day.
    """
    allowed = 1 - values.thresholds.goodput
    used, states = (
        f"avg_over_time({select(RUN_GOODPUT_RATE, THIS_RUN, *more)}[{BURNS[0][0]}])" for more in ((), ('state!="productive"',))
    )
    lost = [
        f"""
            (1 - avg_over_time({GOODPUT_NOW}[{long}])) / {allowed:.3g} > {burn:g}
            and on ({ONE_RUN}) (1 - avg_over_time({GOODPUT_NOW}[{short}])) / {allowed:.3g} > {burn:g}
            and on ({ONE_RUN}) {GOODPUT_NOW} offset {short} >= 0
            and on ({ONE_RUN}) {GOODPUT_NOW} >= 0"""
        for long, short, burn in BURNS
    ]
    either = "\n          or".join(lost)
    day = BURNS[-1][0]
    trains = f"and on ({ONE_RUN}) max_over_time({GOODPUT_NOW}[{day}]) > 0\n          and on ({ONE_RUN}) {lived(values, day)}"
    return Alert(
        alert="TorchobsGoodputLow",
        expr=f"max {BY_RUN} (\n          ({either})\n          {trains}\n)",
        summary="wastes its machines.",
        description=(
            'It loses the time of its machines {{ $value | printf "%.0f" }} times as fast as the objective of '
            f"{values.thresholds.goodput:.0%} productive allows: restarts, waiting, evaluation, compilation."
        ),
        culprits=Culprits(
            f"{states} / on ({ONE_RUN}) group_left () sum {BY_RUN} ({used}) > {LEAST_SHARE:g}",
            f"{SHARE} {{{{ $l.state }}}}",
            f"Of its ranks' time of the last {BURNS[0][0]}",
            named=False,
        ),
    )
