"""Records what the guard found and did as events and metrics of the run, each with its category and severity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import api, catalog
from torchobs.guard.severity import Category, Severity

if TYPE_CHECKING:
    from torchobs.catalog import Event, Metric


def record(event: Event, category: Category, severity: Severity, **attributes: object) -> None:
    """Record an event of the run, if one is recorded; never raises."""
    api.record_event(event, {"category": category.value, "severity": severity.value, **attributes})


def count(metric: Metric, amount: float, category: Category, severity: Severity, **labels: str) -> None:
    """Add to a metric of the run, if one is recorded; never raises."""
    api.count(metric, amount, category=category.value, severity=severity.value, **labels)


def found_wrong(by: str, verdict: str, reason: str, severity: Severity = Severity.ERROR) -> None:
    """Record that the function ``by`` found a file wrong."""
    count(catalog.GUARD_FINDINGS, 1, Category.FILE, severity, by=by)
    record(catalog.EVENT_GUARD_FILE, Category.FILE, severity, verdict=verdict, reason=reason)


def text_of(name: str) -> str:
    """Return a file's name for a message; one that would steer a terminal as Python writes it."""
    return name if name.isprintable() else repr(name)
