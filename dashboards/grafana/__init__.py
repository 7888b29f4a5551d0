"""The dashboards for Grafana, one module each, and the metrics that have no panel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.grafana import (
    alerts,
    compilation,
    data,
    fleet,
    gpu,
    gradients,
    itself,
    memory,
    node,
    precision,
    provisioning,
    ranks,
    run,
)
from torchobs import catalog
from torchobs.catalog import Metric

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard

    from torchobs.rules.values import Values

_DEBUG = (
    catalog.DEBUG_OPERATIONS, catalog.DEBUG_OPERATION_TIME, catalog.DEBUG_OPERATION_LONGEST, catalog.DEBUG_OPERATION_MEMORY,
    catalog.DEBUG_OPERATION_ANOMALIES, catalog.DEBUG_STEPS, catalog.DEBUG_ANOMALY_STEPS, catalog.DEBUG_STEP_ANOMALIES,
)  # fmt: skip
WITHOUT_PANEL: Mapping[Metric, str] = dict.fromkeys(
    _DEBUG, "only where a person calls torchobs.debug, whose results, and the API's summaries, show it."
) | {
    catalog.MODEL_PARAMETERS: "A number that does not change: the live page and inspect show it, and which layers are frozen.",
    catalog.GRAD_LAYER_GROWTH: "it is for the alert, which names the layer; the norms by layer have panels.",
    catalog.CHECKPOINT_FAILURE_STREAK: "it is for the live page, top and inspect; the checkpoints by result have a panel.",
    catalog.ACTIVATION_LAYER_MEAN_ABS: "the standard deviation, which has a panel, goes up and down with it.",
    catalog.ACTIVATION_LAYER_MAX: "the standard deviation, which has a panel, says sooner that outputs grow.",
    catalog.ACTIVATION_LAYER_NONFINITE: "a loss that is not finite is an anomaly, with its origin, and has panels.",
}
"""Metrics that no panel shows, with the reason; every other metric of the catalog is on a dashboard."""


def dashboards(values: Values) -> tuple[Dashboard, ...]:
    """Return all of them, with the thresholds and the runbooks of the alerts."""
    limits = values.thresholds
    return (
        *(fleet.dashboard(limits), run.dashboard(limits), ranks.dashboard(limits), gradients.dashboard()),
        *(memory.dashboard(limits), data.dashboard(), precision.dashboard(limits), compilation.dashboard(limits)),
        *(gpu.dashboard(limits), node.dashboard(limits), itself.dashboard(), alerts.dashboard(values.runbooks)),
    )


def files(values: Values) -> dict[str, str]:
    """Return the dashboards, and what brings them into a Grafana on Kubernetes, by their path under `deploy/`."""
    rendered = render(values)
    return {
        **{f"grafana/dashboards/{uid}.json": text for uid, text in rendered.items()},
        "grafana/kustomization.yaml": provisioning.kustomization(rendered),
        "grafana/grafana-operator.yaml": provisioning.operator(rendered),
    }


def render(values: Values) -> dict[str, str]:
    """Return their JSON by uid, in the classic model, which every Grafana version imports."""
    return {str(one.uid): f"{JSONEncoder(indent=1).encode(one)}\n" for one in dashboards(values)}
