"""Curves of the scalars that a script logs, read from the events that hold their points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torchobs import catalog

MOST_NAMES = 64
MOST_POINTS = 512
"""Most points kept per curve, the newest ones. A rank thins them out over time (``probes.core.user_scalars``)."""


class Point(NamedTuple):
    """A logged value, with the step after which it was logged."""

    step: int
    value: float


Curves = dict[str, tuple[Point, ...]]


def curves(events: Iterable[Mapping[str, Any]], known: Mapping[str, tuple[Point, ...]] | None = None) -> Curves:
    """Return the curves by name from the frames of an event ring, oldest first; ``known``: curves of earlier frames.

    Other events are skipped.
    """
    found = dict(known or {})
    for frame in events:
        if frame.get("name") == catalog.EVENT_SCALARS.name and frame.get("k") == "event":
            with suppress(KeyError, TypeError, ValueError):  # the application may give an event of its own this name
                for name, point in [*_points(frame["attrs"])]:
                    if name in found or len(found) < MOST_NAMES:
                        found[name] = (*found.get(name, ()), point)[-MOST_POINTS:]
    return found


def _points(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Point]]:
    for name, step, value in zip(attributes["names"], attributes["steps"], attributes["values"], strict=False):
        yield name, Point(step, float(value))  # also of a text: "NaN", "Infinity"
