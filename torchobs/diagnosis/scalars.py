"""Curves of the scalars that a script logs, read from the events that hold their points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torchobs import catalog

MOST_NAMES = 64
MOST_POINTS = 512
"""Most points kept per curve, the newest ones. A rank thins them out over time (``probes.core.user_scalars``)."""
_SPECIAL = frozenset({"NaN", "Infinity", "-Infinity"})
_FAR = 1 << 62


class Point(NamedTuple):
    """A logged value, with the step after which it was logged."""

    step: int
    value: float


Curves = dict[str, tuple[Point, ...]]


def curves(events: Iterable[Mapping[str, Any]], known: Mapping[str, tuple[Point, ...]] | None = None) -> Curves:
    """Return the curves by name from the frames of an event ring, oldest first; ``known``: curves of earlier frames.

    Other events and invalid points are skipped.
    """
    found = dict(known or {})
    for frame in events:
        if frame.get("name") == catalog.EVENT_SCALARS.name and frame.get("k") == "event":
            for name, point in _points(frame.get("attrs")):
                if name in found or len(found) < MOST_NAMES:
                    found[name] = (*found.get(name, ()), point)[-MOST_POINTS:]
    return found


def _points(attributes: object) -> Iterator[tuple[str, Point]]:
    given = attributes if isinstance(attributes, dict) else {}
    columns = [given.get(key) for key in ("names", "steps", "values")]
    lists = [column if isinstance(column, list) else [] for column in columns]
    for name, step, value in zip(*lists, strict=False):
        if isinstance(name, str) and isinstance(step, int) and 0 <= step < _FAR and (number := _number(value)) is not None:
            yield name, Point(step, number)


def _number(value: object) -> float | None:
    if isinstance(value, str) and value in _SPECIAL:
        return float(value)
    if isinstance(value, int):
        return float(value) if abs(value) < _FAR else None
    return value if isinstance(value, float) else None
