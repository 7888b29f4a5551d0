"""What was found wrong with a file, as an event and a metric of the run."""

from __future__ import annotations

from torchobs import catalog
from torchobs.guard.record import count, record
from torchobs.guard.severity import Category, Severity


def found_wrong(by: str, verdict: str, reason: str, severity: Severity = Severity.ERROR) -> None:
    """Record that the function ``by`` found a file wrong."""
    count(catalog.GUARD_FINDINGS, 1, Category.FILE, severity, by=by)
    record(catalog.EVENT_GUARD_FILE, Category.FILE, severity, verdict=verdict, reason=reason)


def text_of(name: str) -> str:
    """Return a file's name for a message; one that would steer a terminal as Python writes it."""
    return name if name.isprintable() else repr(name)
