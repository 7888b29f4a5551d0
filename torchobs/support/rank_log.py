"""The level of torchobs' log, and its lines: with the rank, once per node where they are common to all ranks.

Eight ranks read the same settings and see the same gradients: local rank 0 warns and the others log at DEBUG; events and
counters are recorded by every rank. A warning about one rank alone (its file, its memory, its loss) has ``extra=THIS_RANK``.
"""

from __future__ import annotations

import logging

_ours = logging.NOTSET


def set_level(logger: logging.Logger, level: str) -> None:
    """Set the level by name; leave one that the application has set."""
    global _ours  # noqa: PLW0603  # a process has one logger
    if logger.level in {logging.NOTSET, _ours}:
        logger.setLevel(level)
        _ours = logger.level


THIS_RANK = {"of_this_rank": True}
"""``extra=`` of a warning that concerns this rank alone"""
_PREFIX = "torchobs: "


class RankFilter(logging.Filter):
    """Filter of torchobs' logger in one of several ranks."""

    def __init__(self, rank: int, local_rank: int) -> None:
        super().__init__()
        self._rank, self._local_rank = rank, local_rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Prefix the rank; demote a warning that local rank 0 also logs to DEBUG."""
        if record.levelno < logging.WARNING:
            return True
        record.msg = f"{_PREFIX}rank {self._rank}: {str(record.msg).removeprefix(_PREFIX)}"
        if self._local_rank and not getattr(record, "of_this_rank", False):
            record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return True


def name_rank(logger: logging.Logger, rank: int, local_rank: int, world_size: int | None) -> None:
    """Prefix this process's warnings with its rank, replacing a previous prefix (a parent's, in a forked child)."""
    remove_rank(logger)
    if world_size is not None and world_size > 1:
        logger.addFilter(RankFilter(rank, local_rank))


def remove_rank(logger: logging.Logger) -> None:
    """Remove the prefix. Idempotent."""
    for rank_filter in [item for item in logger.filters if isinstance(item, RankFilter)]:
        logger.removeFilter(rank_filter)
