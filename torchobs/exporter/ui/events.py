"""Convert the events and long spans in a rank's event ring to lines of text."""

from __future__ import annotations

from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.diagnosis import quantities
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchobs.flight.format.layout import Header

MOST_TEXT = 400
_EVENTS = {event.name: event for event in vars(catalog).values() if isinstance(event, catalog.Event)}
_SPANS = {
    span.name: title
    for span, title in (
        (catalog.SPAN_EPOCH, "Epoch"),
        (catalog.SPAN_EVALUATION, "Evaluation"),
        (catalog.SPAN_CHECKPOINT, "Checkpoint"),
        (catalog.SPAN_RESTORE, "Restore"),
    )
}
"""Spans shown as events because they are long; those of steps are for tracing tools."""

_FAR_S = 1e11
ALIKE_S = 60.0


class EventRow(NamedTuple):
    """One line of the list. ``at_s`` is Unix time."""

    at_s: float
    ranks: tuple[str, ...]
    step: int | None
    severity: Severity
    title: str
    text: str
    anomaly: str = ""
    """the kind of anomaly; empty for other events"""
    number: int = 0
    """number of events that it stands for, including those the rank left out before it"""


def of_ring(header: Header, rank: str, frames: Iterable[tuple[int, dict[str, Any]]]) -> list[EventRow]:
    """Return the events of a rank's ring, oldest first. The content of frames is not trusted."""
    found = (_event(header, rank, fields) or _span(rank, fields) for _, fields in frames)
    return [happening for happening in found if happening is not None]


def grouped(told: Iterable[EventRow]) -> list[EventRow]:
    """Merge equal events of several ranks within a minute; input and result are newest first."""
    merged: dict[tuple[object, ...], list[EventRow]] = {}
    for happening in told:
        alike = merged.setdefault(happening[2:], [])
        if alike and alike[-1].at_s - happening.at_s < ALIKE_S and happening.ranks[0] not in alike[-1].ranks:
            alike[-1] = alike[-1]._replace(ranks=(*happening.ranks, *alike[-1].ranks))
        else:
            alike.append(happening)
    return sorted(chain.from_iterable(merged.values()), key=lambda happening: happening.at_s, reverse=True)


def _event(header: Header, rank: str, fields: Mapping[str, Any]) -> EventRow | None:
    name, at_ns, attributes = fields.get("name"), fields.get("t"), fields.get("attrs")
    if fields.get("k") != "event" or not isinstance(name, str) or not isinstance(at_ns, int):
        return None
    if name == catalog.EVENT_SCALARS.name:  # shown as curves
        return None
    known = _EVENTS.get(name)
    step = fields.get("step")
    return EventRow(
        at_s=header.wall_s(min(max(at_ns, 0), 1 << 62)),
        ranks=(rank,),
        step=step if isinstance(step, int) else None,
        severity=_severity(known, attributes),
        title=_title(name) if known else labels.text(name)[:MOST_TEXT],
        text=_text(attributes),
        **_anomaly(known, attributes),
    )


def _anomaly(known: catalog.Event | None, attributes: object) -> dict[str, Any]:
    if known is not catalog.EVENT_ANOMALY or not isinstance(attributes, dict):
        return {}
    kind, more = attributes.get("kind"), attributes.get("left_out", 0)
    more = more if isinstance(more, int) else 0
    return {"anomaly": kind, "number": 1 + max(0, more)} if kind in catalog.ANOMALY_KINDS else {}


def _severity(known: catalog.Event | None, attributes: object) -> Severity:
    if known is catalog.EVENT_ANOMALY and isinstance(attributes, dict):
        return catalog.ANOMALY_SEVERITY.get(str(attributes.get("kind")), known.severity)
    return known.severity if known else Severity.INFO


def _title(name: str) -> str:
    words = name.removeprefix("torchobs.").replace("_", " ").replace(".", " ")
    return words[:1].upper() + words[1:]


def _span(rank: str, fields: Mapping[str, Any]) -> EventRow | None:
    title, begun_ns, ended_ns = _SPANS.get(str(fields.get("name"))), fields.get("t0"), fields.get("t1")
    ours = isinstance(fields.get("scope"), list) and fields["scope"][:1] == ["torchobs"]
    if not title or not ours or not isinstance(begun_ns, int) or not isinstance(ended_ns, int):
        return None
    if not abs(ended_ns) < _FAR_S * 1e9 > abs(begun_ns):
        return None
    took = quantities.took(max((ended_ns - begun_ns) / 1e9, 0.0))
    text = _text(fields.get("attrs"))
    return EventRow(ended_ns / 1e9, (rank,), None, Severity.INFO, title, f"took {took}" + (f" · {text}" if text else ""))


def _text(attributes: object) -> str:
    if not isinstance(attributes, dict):
        return ""
    parts = (f"{labels.text(name).removeprefix('exception.')} {_value(value)}" for name, value in attributes.items())
    return " · ".join(part for part in parts if not part.endswith(" "))[:MOST_TEXT]


def _value(value: object) -> str:
    if isinstance(value, float) and isfinite(value):
        return quantities.number(value)
    return ", ".join(map(_value, value[:8])) if isinstance(value, list) else labels.text(value)
