"""The alerts, each with a runbook in docs/runbooks and cases that fire and stay quiet in tests/rules."""

from __future__ import annotations

from dashboards.promql import ONE_RANK, select
from dashboards.rules import Alert, Group, Recording
from torchobs import catalog
from torchobs.detect.spikes import LEAST_EXPLOSIONS, LEAST_LOSS_SPIKES

WINDOW, WINDOW_S = "10m", 600
"""A missed scrape or two does not hide an event, and steps of a minute are still several."""
MOST_SKIPS = 20
"""A loss scaler starts at 2^16 and halves at each skip: 16 take it to 1, and a job that starts may need some of them."""

RECENT = "rank_kind:torchobs_anomalies:recent"
"""Anomalies of the last ten minutes by rank and kind, where there are any."""


def anomalies() -> Group:
    """Return the rules about anomalous steps."""
    return Group("torchobs.anomalies", (_recent(), _gradient_explosion()))


def _recent() -> Recording:
    """`increase()` misses what a series is born with, and so the first seconds of a rank; but all of a young rank is recent.

    This is exact also where a restarted rank's counter has overtaken its predecessor's between two scrapes.
    """
    anomalous, started = select(catalog.ANOMALIES), select(catalog.RANK_START_TIME)
    expr = f"""
        (
            {anomalous} and on ({ONE_RANK}) time() - {started} < {WINDOW_S}
          or
            increase({anomalous}[{WINDOW}])
        ) > 0
    """
    return Recording(RECENT, expr)


def _gradient_explosion() -> Alert:
    """One alert per run, however many of its ranks see the same gradient.

    A loss scaler makes non-finite gradients part of the plan: where it has skipped a step, only skipping most of them is an
    explosion. The maximum over the window, and not the counter of now, because that ends with the job and the window does not.
    """
    explosions = select(RECENT, f'kind="{_kind("gradient_explosion")}"')
    leaps = select(RECENT, f'kind="{_kind("loss_spike")}"')
    nonfinite = select(RECENT, f'kind=~"{_kind("nonfinite_gradient")}|{_kind("nonfinite_loss")}"')
    skipped, steps = select(catalog.AMP_STEPS_SKIPPED), select(catalog.STEPS)
    expr = f"""
        max by (namespace, job_name, run_id) (
            {explosions} >= {LEAST_EXPLOSIONS}
          or
            {leaps} >= {LEAST_LOSS_SPIKES}
          or
            {nonfinite}
            unless on ({ONE_RANK})
            max_over_time({skipped}[{WINDOW}]) > 0
          or
            increase({skipped}[{WINDOW}]) > {MOST_SKIPS}
            and
            increase({skipped}[{WINDOW}]) > 0.5 * increase({steps}[{WINDOW}])
        )
    """
    return Alert(
        alert="TorchobsGradientExplosion",
        expr=expr,
        keep_firing_for=WINDOW,
        severity="critical",
        summary="Training run {{ $labels.run_id }} of {{ $labels.job_name }} is blowing up.",
        description=(
            'In the last 10 minutes the worst rank had {{ printf "%.0f" $value }} steps whose gradient or loss was NaN, '
            "infinite or far above its own past. What the run learns from here on is likely worthless."
        ),
    )


def _kind(name: str) -> str:
    """Return the kind of anomaly. Raises ``ValueError`` for one that the catalog does not have."""
    return catalog.ANOMALY_KINDS[catalog.ANOMALY_KINDS.index(name)]
