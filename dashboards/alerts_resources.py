"""Alerts about resources of a training: memory, data, compilation, loss scale, GPUs."""

from __future__ import annotations

from dashboards.alerts import MOST_SKIPS
from dashboards.promql import BY_RANK_EVERYWHERE, BY_RUN_EVERYWHERE, ONE_RANK, select
from dashboards.recent import name, recent
from dashboards.rules import WINDOW, Alert, Group
from torchobs import catalog

TIME_TO_ACT_S = 4 * 3600
"""A trend is extrapolated to at most 60 times its observed length (`torchobs/detect/growth.py`), so that one of four hours was
observed for at least four minutes; and four hours suffice to let the run reach a checkpoint."""
MANY_RECOMPILES = 16
"""Within the window, of all functions. torch stops at 8 for one function (`torch._dynamo.config.recompile_limit`); a model with
a dynamic size, used in training and evaluation, has a handful in its first minutes."""
THROTTLED = 0.1
"""Share of the time. Throttling by the power limit is normal, and may last all the time; thermal throttling is not."""
_GIVEN_UP = 'reason="recompile_limit"'
_GPU_ERRORS = 'error_type=~"xid_hardware|ecc_uncorrected"'


def resources() -> Group:
    """Return the rules."""
    return Group(
        "torchobs.resources",
        (
            recent(catalog.COMPILE_RECOMPILES, born_later=True),
            recent(catalog.COMPILE_FAILURES, _GIVEN_UP, born_later=True),
            recent(catalog.HW_ERRORS, _GPU_ERRORS),
            *(_memory(), _data(), _recompiles(), _scaler(), _gpu_fault(), _gpu_throttled()),
        ),
    )


def _memory() -> Alert:
    return Alert(
        alert="TorchobsMemoryGrowth",
        expr=f"""
            min {BY_RUN_EVERYWHERE} (
                {select(catalog.MEMORY_TIME_TO_LIMIT)} < {TIME_TO_ACT_S}
            )
        """,
        severity="warning",
        summary="Training run {{ $labels.run_id }} of {{ $labels.job_name }} runs out of memory.",
        description=(
            "The memory of one of its ranks grows steadily with the steps, and reaches its limit in "
            "{{ $value | humanizeDuration }}."
        ),
    )


def _data() -> Alert:
    time_ = select(catalog.STEP_PHASE_TIME)
    waiting = select(catalog.STEP_PHASE_TIME, 'phase="data"')
    return Alert(
        alert="TorchobsDataStarvation",
        expr=f"""
            max {BY_RUN_EVERYWHERE} (
                sum {BY_RANK_EVERYWHERE} (rate({waiting}[{WINDOW}])) / sum {BY_RANK_EVERYWHERE} (rate({time_}[{WINDOW}]) > 0)
                and on ({ONE_RANK})
                min_over_time({select(catalog.DATA_STARVED)}[{WINDOW}]) == 1
                and on ({ONE_RANK})
                time() - {select(catalog.RANK_START_TIME)} > 600
            )
        """,
        severity="warning",
        summary="Training run {{ $labels.run_id }} of {{ $labels.job_name }} waits for its data.",
        description="One of its ranks spends {{ $value | humanizePercentage }} of its training time waiting for batches.",
    )


def _recompiles() -> Alert:
    """Return the alert, also on functions at the recompile limit: they run uncompiled, and only a counter shows it."""
    return Alert(
        alert="TorchobsRecompileStorm",
        expr=f"""
            max {BY_RUN_EVERYWHERE} (
                {name(catalog.COMPILE_FAILURES)} > 0
              or
                sum {BY_RANK_EVERYWHERE} ({name(catalog.COMPILE_RECOMPILES)}) > {MANY_RECOMPILES}
            )
        """,
        severity="warning",
        summary="Training run {{ $labels.run_id }} of {{ $labels.job_name }} is compiled again and again.",
        description=(
            'In the last 10 minutes one of its ranks had {{ printf "%.0f" $value }} recompilations, or functions that '
            "torch.compile gave up because of them."
        ),
    )


def _scaler() -> Alert:
    return Alert(
        alert="TorchobsLossScaleStuck",
        expr=f"""
            max {BY_RUN_EVERYWHERE} (
                {select(catalog.AMP_SKIP_STREAK)} >= {MOST_SKIPS}
            )
        """,
        severity="critical",
        summary="Training run {{ $labels.run_id }} of {{ $labels.job_name }} makes no steps.",
        description=(
            'Its loss scaler has skipped {{ printf "%.0f" $value }} steps in a row: it finds no scale at which the gradients '
            "are finite."
        ),
    )


def _gpu_fault() -> Alert:
    failed = select(catalog.HW_STATUS, 'hw_state="failed"')
    return Alert(
        alert="TorchobsGpuFault",
        expr=f"""
            max {BY_RUN_EVERYWHERE} (
                {name(catalog.HW_ERRORS)} > 0
              or
                {failed} == 1
            )
        """,
        severity="critical",
        summary="A GPU of training run {{ $labels.run_id }} of {{ $labels.job_name }} is faulty.",
        description=(
            'It is lost or asks to be replaced, or had {{ printf "%.0f" $value }} errors (XID, or of its memory) in the last '
            "10 minutes."
        ),
    )


def _gpu_throttled() -> Alert:
    held = select(catalog.GPU_THROTTLE_TIME, 'reason="thermal"')
    return Alert(
        alert="TorchobsGpuThrottled",
        expr=f"""
            max {BY_RUN_EVERYWHERE} (
                rate({held}[{WINDOW}]) > {THROTTLED}
            )
        """,
        severity="warning",
        summary="A GPU of training run {{ $labels.run_id }} of {{ $labels.job_name }} is too hot.",
        description="Its clocks were held down by heat for {{ $value | humanizePercentage }} of the last 10 minutes.",
    )
