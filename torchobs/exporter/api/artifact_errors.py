"""Problems for artifacts that a rank was asked for and could not write: the reason, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.exporter.api.problems import Problem
from torchobs.exporter.otlp.transport import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchobs.exporter.api.history import Dated

_EVENTS = {catalog.EVENT_STACKS_FAILED.name, catalog.EVENT_PROFILE_FAILED.name}
_WHAT_TO_DO = {
    "no_room": "had no room for it: make room where its flight file is, in its memory limit or `ulimit -f`, and ask again.",
    "not_permitted": "may not write where its flight file is: make that directory writable for its user, and ask again.",
    "temporary_directory": "could not write the trace to its temp directory: make room there, or set TMPDIR for the training.",
    "too_large": "has a trace that is larger than 32 MiB: ask for fewer steps.",
    "profiler_in_use": "has a profiler running, its own or one that was asked for: ask again when that has ended.",
    "no_step": "began no backward pass within 120 s: ask for its stacks, which say what it does.",
}


def find(events: Iterable[Dated], identifier: str) -> Mapping[str, Any] | None:
    """Return the attributes of the event that reports the artifact as failed, if there is one."""
    return next(
        (
            dated.event["attributes"]
            for dated in events
            if dated.event["name"] in _EVENTS and dated.event["attributes"].get("evidence") == identifier
        ),
        None,
    )


def problem(rank: str, said: Mapping[str, Any]) -> Problem:
    """Return the problem for a request of that artifact. The event's attributes come from a rank and are not trusted."""
    reason = said.get("reason")
    what = _WHAT_TO_DO.get(reason, "failed at it.") if isinstance(reason, str) else "failed at it."
    given = [said.get(name) for name in ("detail", "exception.type")]
    details = "; ".join(printable(text) for text in given if isinstance(text, str))
    return Problem(410, "evidence-failed", f"Rank {rank} {what}" + (f" ({details})" if details else ""))
