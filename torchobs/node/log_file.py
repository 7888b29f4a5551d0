"""``exporter.log`` in the flight directory: the exporter's log, of bounded size.

The directory is memory (tmpfs) and nobody watches the file: at most one line per cause and minute, and the older half is
dropped when it grows too large.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from typing import TYPE_CHECKING

from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "exporter.log"
MAX_SIZE = 256 * 1024
_MAX_CAUSES = 1000


def open_log(directory_fd: int) -> int:
    """Open the log for appending. Raises ``OSError``."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(NAME, flags, 0o600, dir_fd=directory_fd)


def shorten(fd: int, limit: int = MAX_SIZE) -> None:
    """Drop the older lines if the file exceeds ``limit`` bytes, keeping half of it.

    Only for the file's single writer: lines that another process appends between read and write are lost.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= limit:
        return
    kept = os.pread(fd, limit // 2, status.st_size - limit // 2).partition(b"\n")[2]
    os.ftruncate(fd, 0)
    os.write(fd, kept)


class OncePerMinute(logging.Filter):
    """Passes one record per cause (logger and unformatted message) every ``interval_s``; counts the rest.

    A ``cause`` in the record's ``extra`` is part of it: the same message about another address is another cause.
    """

    def __init__(self, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        # already formatted messages look like separate causes: their number is bounded
        self._limiter, self._clock = RateLimiter(interval_s, most_keys=_MAX_CAUSES), clock

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be written; the number of suppressed ones is appended to it."""
        cause = record.name, str(record.msg), str(getattr(record, "cause", ""))
        if not self._limiter.take(self._clock(), cause):
            return False
        if dropped := self._limiter.held_back(cause):
            record.msg = f"{record.msg} [and {dropped} more like it]"
        return True
