"""AMP and numerics: loss scale, skipped steps, what is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import Column, Query
from dashboards.grafana.queries import RANKS, increase, per_run, rate
from dashboards.grafana.template import Choice, page
from torchobs import catalog
from torchobs.rules.promql import select

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

    from torchobs.rules.values import Thresholds


def dashboard(limits: Thresholds) -> Dashboard:
    """Return the dashboard."""
    sections = [
        Section("Loss scaler", scaler(limits)),
        Section("Numerics", numerics()),
        Section("Guard", guarded()),
        Section("Tuning", tuned()),
    ]
    about = (
        "Mixed precision of one run: loss scale, skipped steps, what is not finite, what torchobs.guard and torchobs.tune did."
    )
    return page("torchobs-amp", "AMP and numerics", about, Choice.RUN | Choice.RANK, sections)


def scaler(limits: Thresholds) -> tuple[Panel, ...]:
    """Return loss scale and skips."""
    skipped, all_steps = rate(catalog.AMP_STEPS_SKIPPED, *RANKS), rate(catalog.STEPS, *RANKS)
    return (
        panels.number(
            "Skipped in a row",
            "Steps that a loss scaler has skipped up to now, the longest streak. Good: 0 or 1; from red on no scale is "
            "found. Empty: without a loss scaler.",
            "short",
            Query(f"max({select(catalog.AMP_SKIP_STREAK, *RANKS)})"),
            steps=thresholds.count(limits.skipped),
        ),
        panels.number(
            "Loss scale",
            "Smallest loss scale. Good: thousands; at 1 and below gradients are truly infinite. Empty: without a loss scaler.",
            "short",
            Query(f"min({select(catalog.AMP_SCALE, *RANKS)})"),
        ),
        panels.number(
            "Skipped steps",
            "Share of the steps that were skipped. Good: below 0.1 %: one in the 2000 after which the scale is tried "
            "twice as large.",
            "percentunit",
            Query(f"max({skipped}) / (max({all_steps}) > 0) or vector(0)"),
        ),
        panels.rows(
            "Autocast",
            "Data types that autocast uses, and the number of ranks that use them. Good: one row. With bfloat16 alone "
            "there is no loss scaler. Empty: without autocast.",
            (Column("ranks", per_run("count", select(catalog.AMP_AUTOCAST, *RANKS) + " == 1", "device_type", "dtype")),),
            labels={"device_type": "device", "dtype": "type"},
            width=12,
            height=4,
        ),
        panels.lines(
            "Loss scale over time",
            "Loss scale of each GradScaler: the ranks' smallest. Good: it doubles every 2000 steps and halves now and "
            "then; falling without end is a NaN in the model. Empty: without a loss scaler.",
            "short",
            Query(f"min by (scaler) ({select(catalog.AMP_SCALE, *RANKS)})", "scaler {{scaler}}"),
            log_base=2,
        ),
        panels.lines(
            "Steps without overflow",
            "Steps since the loss scale last changed. Good: up to 2000, again and again. Empty: without a loss scaler.",
            "short",
            Query(f"max by (scaler) ({select(catalog.AMP_GROWTH_TRACKER, *RANKS)})", "scaler {{scaler}}"),
        ),
        panels.lines(
            "Skips in a row over time",
            "The longest streak of skipped steps. Good: 0 or 1. Empty: without a loss scaler.",
            "short",
            Query(f"max({select(catalog.AMP_SKIP_STREAK, *RANKS)})", "streak"),
            steps=thresholds.count(limits.skipped),
        ),
        panels.lines(
            "Overflows and skips",
            "Steps of each optimizer that found gradients not finite, and steps skipped, on the rank that has most. "
            "Good: single ones. Empty: while there are none.",
            "short",
            Query(f"max by (optimizer) ({increase(catalog.AMP_OVERFLOWS, *RANKS)})", "overflows of optimizer {{optimizer}}"),
            Query(f"max({increase(catalog.AMP_STEPS_SKIPPED, *RANKS)})", "skipped"),
        ),
    )


def numerics() -> tuple[Panel, ...]:
    """Return what is not finite, with and without a scaler."""
    return (
        panels.lines(
            "Non-finite steps",
            "Measured steps with a NaN or infinite gradient, beside those that a loss scaler skipped. Good: as many "
            "skipped as non-finite; where none are skipped, one ruins the weights. Empty: the skipped ones, without a "
            "loss scaler.",
            "short",
            Query(f"max({increase(catalog.GRAD_NONFINITE_STEPS, *RANKS)})", "non-finite"),
            Query(f"max({increase(catalog.AMP_STEPS_SKIPPED, *RANKS)})", "skipped"),
        ),
        panels.lines(
            "Non-finite elements",
            "Gradient elements that were NaN or infinite, on the rank that has most. Good: 0, or single bursts under a loss "
            "scaler. Empty: while there are none.",
            "short",
            Query(f"max({increase(catalog.GRAD_NONFINITE_ELEMENTS, *RANKS)})", "elements"),
        ),
        panels.lines(
            "Anomalies now",
            "Ranks whose last measured step was anomalous, by kind. Good: 0. Empty: before the first anomaly.",
            "short",
            Query(f"sum by (kind) ({select(catalog.ANOMALY_ACTIVE, *RANKS)})", "{{kind}}"),
        ),
        panels.lines(
            "NaN and infinity in the loss",
            "Steps whose loss, or gradient, was not finite, on the rank that has most. Good: 0; a NaN in the loss that "
            "lasts is the end of the run.",
            "short",
            Query(f"max by (kind) ({increase(catalog.ANOMALIES, *RANKS, NONFINITE)})", "{{kind}}"),
        ),
    )


NONFINITE = 'kind=~"nonfinite_loss|nonfinite_gradient"'


def guarded() -> tuple[Panel, ...]:
    """Return what `torchobs.guard` refused, replaced and went on after."""
    return (
        panels.lines(
            "Refused and suspicious",
            "Tensors that did not keep their contract, by what is wrong; elements refused or replaced; files, models "
            "and outputs with a finding, by the function. Good: none. Empty: while there are none, and without torchobs.guard.",
            "short",
            Query(f"sum by (what) ({increase(catalog.GUARD_VIOLATIONS, *RANKS)})", "{{what}}"),
            Query(f"sum by (policy) ({increase(catalog.GUARD_SANITIZED, *RANKS)})", "outputs: {{policy}}"),
            Query(f"sum by (by) ({increase(catalog.GUARD_FINDINGS, *RANKS)})", "{{by}}"),
        ),
        panels.lines(
            "Recoveries",
            "Errors that a guard.Recovery went on after, by kind and by what was done; raised: a budget was spent. Good: few. "
            "Empty: while there are none, and without a guard.Recovery.",
            "short",
            Query(f"sum by (category, action) ({increase(catalog.GUARD_RECOVERIES, *RANKS)})", "{{category}}: {{action}}"),
        ),
        panels.lines(
            "Resources above their threshold",
            "Times that processor, memory, device memory or disk got above the threshold of guard.resources. Good: none. "
            "Empty: while there are none, and without guard.resources.",
            "short",
            Query(f"sum by (resource) ({increase(catalog.GUARD_EXCEEDED, *RANKS)})", "{{resource}}"),
        ),
    )


def tuned() -> tuple[Panel, ...]:
    """Return what `torchobs.tune` changed, and what it measured."""
    return (
        panels.lines(
            "Plans",
            "Plans of torchobs.tune by what happened: refused ones differ too much from float32, and after compile_failed the "
            "model runs eagerly. Good: applied alone. Empty: while there are none, and without torchobs.tune.",
            "short",
            Query(f"sum by (action) ({increase(catalog.TUNE_PLANS, *RANKS)})", "{{action}}"),
        ),
        panels.lines(
            "Speed-up by mode",
            "How many times as fast as the first mode each one was in the last tune.benchmark, the median; "
            "whether that is noise is in its event. Good: above 1. Empty: without a benchmark.",
            "none",
            Query(f"max by (mode) ({select(catalog.TUNE_SPEEDUP, *RANKS)})", "{{mode}}"),
        ),
    )
