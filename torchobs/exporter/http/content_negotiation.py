"""What a request wants: ``Accept`` and ``Accept-Encoding`` (RFC 9110, section 12.5), by weight; ``q=0`` refuses."""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST = 64
"""No scraper names more; Prometheus 3 names six."""


class AcceptItem(NamedTuple):
    """One element of the header: a media type or a coding, in lower case, and its parameters without the weight."""

    what: str
    parameters: Mapping[str, str]
    weight: float


def wishes(header: str) -> list[AcceptItem]:
    """Return what a header names, the dearest first, of equal ones the first; with those that it refuses."""
    return sorted(map(_wish, header.split(",", _MOST)[:_MOST]), key=lambda one: -one.weight)


@lru_cache(64)  # as with `encoder.negotiate`
def accepts_gzip(header: str) -> bool:
    """Return True if ``Accept-Encoding`` admits gzip: by its name, which beats the ``*`` for all that have none."""
    weights = {one.what: one.weight for one in wishes(header)}
    return max((weights[name] for name in ("gzip", "x-gzip") if name in weights), default=weights.get("*", 0.0)) > 0


def _wish(element: str) -> AcceptItem:
    what, *rest = element.split(";")
    pairs = (part.partition("=") for part in rest)
    parameters = {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}
    return AcceptItem(what.strip().lower(), parameters, _weight(parameters.pop("q", "1")))


def _weight(text: str) -> float:
    """Return a weight; what is none means nothing."""
    try:
        weight = float(text)
    except ValueError:
        return 1.0
    return weight if isfinite(weight) else 1.0
