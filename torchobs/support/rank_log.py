"""Warnings of a training of several ranks: each names its rank, and what all ranks of a node would say is said once there.

Eight ranks read the same settings and see the same gradients: local rank 0 warns, and the others log it at DEBUG; events and
counters have it of every rank all the same. What concerns one rank (its file, its memory, its loss) it says itself:
``extra=OWN``.
"""

from __future__ import annotations

import logging

OWN = {"of_this_rank": True}
"""For ``extra=`` of a warning that another rank need not have"""
_PREFIX = "torchobs: "


class RankFilter(logging.Filter):
    """For the logger of torchobs, in one rank of several."""

    def __init__(self, rank: int, local_rank: int) -> None:
        super().__init__()
        self._rank, self._local_rank = rank, local_rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Name the rank; turn what local rank 0 says, too, into a message at DEBUG."""
        if record.levelno < logging.WARNING:
            return True
        record.msg = f"{_PREFIX}rank {self._rank}: {str(record.msg).removeprefix(_PREFIX)}"
        if self._local_rank and not getattr(record, "of_this_rank", False):
            record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return True


def name_rank(logger: logging.Logger, rank: int, local_rank: int, world_size: int | None) -> None:
    """Have this process's warnings named from now on, instead of as before (as its parent's, in a forked child)."""
    name_nobody(logger)
    if world_size is not None and world_size > 1:
        logger.addFilter(RankFilter(rank, local_rank))


def name_nobody(logger: logging.Logger) -> None:
    """Leave the logger as it was. Idempotent."""
    for known in [known for known in logger.filters if isinstance(known, RankFilter)]:
        logger.removeFilter(known)
