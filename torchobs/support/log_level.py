"""The level of torchobs' logger: the last session's, unless the application has chosen one."""

from __future__ import annotations

import logging

_ours = logging.NOTSET


def set_level(logger: logging.Logger, level: str) -> None:
    """Set the level by name; leave one that the application has set."""
    global _ours  # noqa: PLW0603  # a process has one logger
    if logger.level in {logging.NOTSET, _ours}:
        logger.setLevel(level)
        _ours = logger.level
