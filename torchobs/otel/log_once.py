"""Warnings about misuse of the API, each logged once, for they would recur with every step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("torchobs")
_logged: set[str] = set()


def warn_once(problem: str, *details: object) -> None:
    """Log a warning the first time that ``problem`` (without its details) occurs."""
    if problem not in _logged:
        _logged.add(problem)
        logger.warning("torchobs: " + problem, *details)  # noqa: G003  # our own texts, a handful of them


def delegate_safely(set_delegate: Callable[..., None], delegate: object) -> None:
    """Call ``set_delegate(delegate)``; if the application's provider raises, log one warning."""
    breaker = CircuitBreaker("provider")
    call(breaker, set_delegate, delegate)
    for failure in breaker.failures:
        warn_once("the application's meter provider failed with %s at %s", failure.exception, failure.location)
