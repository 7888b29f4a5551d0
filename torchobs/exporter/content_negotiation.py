"""Parse ``Accept`` and ``Accept-Encoding`` with weights (RFC 9110, section 12.5); ``q=0`` excludes an element."""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST = 64
"""Most elements parsed; Prometheus 3 sends six."""


class AcceptItem(NamedTuple):
    """One element of the header: a media type or coding in lower case, its weight, and its other parameters."""

    name: str
    parameters: Mapping[str, str]
    weight: float


def accept_items(header: str) -> list[AcceptItem]:
    """Return a header's elements, including excluded ones, by descending weight; equal ones in the header's order."""
    return sorted(map(_item, header.split(",", _MOST)[:_MOST]), key=lambda one: -one.weight)


@lru_cache(64)  # as `text_format.negotiate`
def accepts_gzip(header: str) -> bool:
    """Return True if ``Accept-Encoding`` accepts gzip, by name or, if it is not named, by ``*``."""
    weights = {one.name: one.weight for one in accept_items(header)}
    return max((weights[name] for name in ("gzip", "x-gzip") if name in weights), default=weights.get("*", 0.0)) > 0


def _item(element: str) -> AcceptItem:
    name, *rest = element.split(";")
    pairs = (part.partition("=") for part in rest)
    parameters = {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}
    return AcceptItem(name.strip().lower(), parameters, _weight(parameters.pop("q", "1")))


def _weight(text: str) -> float:
    """Return a weight; an invalid one counts as 1."""
    try:
        weight = float(text)
    except ValueError:
        return 1.0
    return weight if isfinite(weight) else 1.0
