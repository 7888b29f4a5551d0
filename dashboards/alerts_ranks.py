"""Alerts about ranks: failed, hung, slower than before, slower than the others."""

from __future__ import annotations

from dashboards.promql import BY_RANK_EVERYWHERE, BY_RUN_EVERYWHERE, ONE_RANK, ONE_RUN, select
from dashboards.rules import WINDOW, Alert, Group
from torchobs import catalog

WAITS_S = 1800
"""Default timeout of torch.distributed's process groups with gloo: after it, a peer's evaluation explains no wait."""
UNRESPONSIVE_S = 120
"""A process that is being torn down is unresponsive, too: measured 29 ms per GiB of its memory, 11 s with a core dump."""
SLOWER = 1.5
"""Steps half as long again waste a third of the machines' time, which matters in a run of any length."""
BEFORE, COMPARED = "1h", "70m"


def ranks() -> Group:
    """Return the rules."""
    return Group("torchobs.ranks", (_failed(), _hung(), _slowdown(), _straggler()))


def _failed() -> Alert:
    """Return the alert, without ranks ended by Ctrl-C: whoever pressed it knows."""
    reasons = "|".join(reason for reason in catalog.EXIT_REASONS if reason not in {"finished", "interrupted"})
    failed = select(catalog.RANK_EXIT, f'reason=~"{reasons}"')
    return Alert(
        alert="TorchobsRankFailed",
        expr=f"""
            max {BY_RUN_EVERYWHERE} (
                count {BY_RUN_EVERYWHERE} ({failed} == 1)
            )
        """,
        severity="critical",
        summary="Training run {{ $labels.run_id }} of {{ $labels.job_name }} has lost a rank.",
        description=(
            '{{ printf "%.0f" $value }} of its ranks ended with an exception or an exit code, or vanished (killed, likely out '
            "of memory). The others wait for them until their collectives time out."
        ),
    )


def _hung() -> Alert:
    """Return the alert on the exporter's state *hung*: no step for 20 times the 99th percentile, at least a minute.

    Ranks in a phase that may last are not hung, nor ranks that wait for another rank's evaluation, even on another machine.
    """
    hung, stopped = (select(catalog.RANK_STATE_SET, f'state="{state}"') for state in ("hung", "unresponsive"))
    age = select(catalog.RANK_PROGRESS_AGE)
    aside = select(catalog.GOODPUT_TIME, 'state=~"evaluation|checkpoint|compile"')
    return Alert(
        alert="TorchobsRankHung",
        expr=f"""
            max {BY_RUN_EVERYWHERE} (
                count {BY_RUN_EVERYWHERE} (
                    (
                        {hung} == 1
                      unless on ({ONE_RANK}) (
                          {age} < {WAITS_S}
                        and on ({ONE_RUN})
                          sum {BY_RUN_EVERYWHERE} (rate({aside}[2m])) > 0
                      )
                    )
                  or
                    {stopped} == 1 and on ({ONE_RANK}) {age} > {UNRESPONSIVE_S}
                )
            )
        """,
        severity="critical",
        summary="Training run {{ $labels.run_id }} of {{ $labels.job_name }} does not move.",
        description='{{ printf "%.0f" $value }} of its ranks live and have finished no step for far longer than one takes.',
    )


def _slowdown() -> Alert:
    """Return the alert, computed from the phases' time and the steps, which exist with classic and native histograms.

    Not after a change of the model (the next fold or trial), whose steps cannot be compared with those before.
    """

    def step_s(range_: str, offset: str = "") -> str:
        time_, steps = select(catalog.STEP_PHASE_TIME), select(catalog.STEPS)
        trained, taken = f"rate({time_}[{range_}]{offset})", f"rate({steps}[{range_}]{offset})"
        return f"sum {BY_RANK_EVERYWHERE} ({trained}) / sum {BY_RANK_EVERYWHERE} ({taken} > 0)"

    return Alert(
        alert="TorchobsSlowdown",
        expr=f"""
            max {BY_RUN_EVERYWHERE} (
                ({step_s(WINDOW)})
                /
                ({step_s(BEFORE, f" offset {WINDOW}")})
                > {SLOWER}
                unless on ({ONE_RANK})
                increase({select(catalog.MODEL_CHANGES)}[{COMPARED}]) > 0
                and on ({ONE_RANK})
                time() - {select(catalog.RANK_START_TIME)} > 3600
            )
        """,
        severity="warning",
        summary="Training run {{ $labels.run_id }} of {{ $labels.job_name }} has become slow.",
        description=(
            'In the last 10 minutes a step took {{ printf "%.1f" $value }} times as long as in the hour before, '
            "evaluation, checkpoints and compilation not counted."
        ),
    )


def _straggler() -> Alert:
    """Return the alert, only for runs compared for the whole window: a rank's first seconds are no median of ten minutes."""
    slow = select(catalog.RANK_SLOWDOWN)
    return Alert(
        alert="TorchobsStraggler",
        expr=f"""
            max {BY_RUN_EVERYWHERE} (
                quantile_over_time(0.5, {slow}[{WINDOW}]) > {SLOWER} and {slow} offset {WINDOW}
            )
        """,
        severity="warning",
        summary="All ranks of training run {{ $labels.run_id }} of {{ $labels.job_name }} wait for one of them.",
        description=(
            'In the last 10 minutes the slowest rank took {{ printf "%.1f" $value }} times as long for a step as its peers on '
            "its machine, waiting for each other not counted."
        ),
    )
