"""Records what the guard found and did as events and metrics of the run, each with its category and severity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import api

if TYPE_CHECKING:
    from torchobs.catalog import Event, Metric
    from torchobs.guard.severity import Category, Severity


def record(event: Event, category: Category, severity: Severity, **attributes: object) -> None:
    """Record an event of the run, if one is recorded; never raises."""
    api.record_event(event, {"category": category.value, "severity": severity.value, **attributes})


def count(metric: Metric, amount: float, category: Category, severity: Severity, **labels: str) -> None:
    """Add to a metric of the run, if one is recorded; never raises."""
    api.count(metric, amount, category=category.value, severity=severity.value, **labels)
