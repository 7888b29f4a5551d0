"""Warnings about a misuse of the API: each once, for they would come with every step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("torchobs")
_said: set[str] = set()


def warn_once(problem: str, *details: object) -> None:
    """Log a warning, the first time that ``problem`` (without its details) is heard of."""
    if problem not in _said:
        _said.add(problem)
        logger.warning("torchobs: " + problem, *details)  # noqa: G003  # our own texts, a handful of them


def hand_on(to_heir: Callable[..., None], delegate: object) -> None:
    """Call ``to_heir(heir)``; the application's provider may refuse what it is given, and then one warning says so."""
    breaker = CircuitBreaker("heir")
    call(breaker, to_heir, delegate)
    for trip in breaker.trips:
        warn_once("the application's meter provider failed with %s at %s", trip.exception, trip.location)
