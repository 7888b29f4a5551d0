"""Warnings about a misuse of the API: each once, for they would come with every step."""

from __future__ import annotations

import logging

logger = logging.getLogger("torchobs")
_said: set[str] = set()


def warn_once(problem: str, *details: object) -> None:
    """Log a warning, the first time that ``problem`` (without its details) is heard of."""
    if problem not in _said:
        _said.add(problem)
        logger.warning("torchobs: " + problem, *details)  # noqa: G003  # our own texts, a handful of them
