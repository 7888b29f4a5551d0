"""The alerts. Each has a runbook in docs/runbooks, and test cases that fire and that do not in tests/rules."""

from __future__ import annotations

from dashboards.promql import BY_RUN_EVERYWHERE, ONE_RANK, select
from dashboards.recent import name, recent
from dashboards.rules import WINDOW, Alert, Group
from torchobs import catalog
from torchobs.detect.spikes import LEAST_EXPLOSIONS, LEAST_LOSS_SPIKES
from torchobs.detect.vanishing import LASTING

MOST_SKIPS = 20
"""A loss scaler starts at 2^16 and halves at each skipped step: 16 reduce it to 1, and a starting job may need some."""


def anomalies() -> Group:
    """Return the rules about anomalous steps."""
    counted = (catalog.ANOMALIES, catalog.AMP_STEPS_SKIPPED, catalog.STEPS)
    return Group("torchobs.anomalies", (*map(recent, counted), _gradient_explosion(), _gradient_vanishing()))


def _gradient_explosion() -> Alert:
    """Return one alert per run, however many of its ranks see the same gradient.

    With a loss scaler, non-finite gradients are normal: where it has skipped steps, only skipping most of them is an explosion.
    The maximum over the window is used, not the counter's present value, because that ends with the job.
    """
    explosions = select(name(catalog.ANOMALIES), f'kind="{_kind("gradient_explosion")}"')
    leaps = select(name(catalog.ANOMALIES), f'kind="{_kind("loss_spike")}"')
    nonfinite = select(name(catalog.ANOMALIES), f'kind=~"{_kind("nonfinite_gradient")}|{_kind("nonfinite_loss")}"')
    skipped = select(catalog.AMP_STEPS_SKIPPED)
    lately, steps = name(catalog.AMP_STEPS_SKIPPED), name(catalog.STEPS)
    expr = f"""
        max {BY_RUN_EVERYWHERE} (
            {explosions} >= {LEAST_EXPLOSIONS}
          or
            {leaps} >= {LEAST_LOSS_SPIKES}
          or
            {nonfinite}
            unless on ({ONE_RANK})
            max_over_time({skipped}[{WINDOW}]) > 0
          or
            {lately} > {MOST_SKIPS}
            and
            {lately} > 0.5 * {steps}
        )
    """
    return Alert(
        alert="TorchobsGradientExplosion",
        expr=expr,
        severity="critical",
        summary="Training run {{ $labels.run_id }} of {{ $labels.job_name }} is blowing up.",
        description=(
            'In the last 10 minutes the worst rank had {{ printf "%.0f" $value }} steps whose gradient or loss was NaN, '
            "infinite or far above its own past. What the run learns from here on is likely worthless."
        ),
    )


def _gradient_vanishing() -> Alert:
    """Return the alert; one verdict suffices, because each needs several measured steps in a row, or a hundred steps."""
    verdicts = select(name(catalog.ANOMALIES), f'kind="{_kind("gradient_vanishing")}"')
    return Alert(
        alert="TorchobsGradientVanishing",
        expr=f"""
            max {BY_RUN_EVERYWHERE} (
                {verdicts} >= {LASTING}
              or
                {select(catalog.GRAD_UNMOVED_LAYERS)} > 0
            )
        """,
        severity="warning",
        summary="Training run {{ $labels.run_id }} of {{ $labels.job_name }} does not learn, or a part of its model does not.",
        description=(
            'One of its ranks had {{ printf "%.0f" $value }} steps in the last 10 minutes whose gradient had all but '
            "disappeared, or has as many layers that hardly any gradient reaches: such weights stay as they are, whatever the "
            "loss does."
        ),
    )


def _kind(name: str) -> str:
    """Return a matcher for a kind of anomaly. Raises ``ValueError`` for a kind that is not in the catalog."""
    return catalog.ANOMALY_KINDS[catalog.ANOMALY_KINDS.index(name)]
