"""``exporter.log`` in the flight directory: what the exporter has to say, in a file that stays small.

The directory is memory (tmpfs), and nobody watches the file: at most one line per cause and minute, and the older half goes
when there is too much of it.
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
LIMIT = 256 * 1024
_CAUSES = 1000


def open_log(directory_fd: int) -> int:
    """Open the log for appending. Raises ``OSError``."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(NAME, flags, 0o600, dir_fd=directory_fd)


def shorten(fd: int, limit: int = LIMIT) -> None:
    """Drop the older lines when there are more than ``limit`` bytes, so that half of it is left.

    Only its one writer may: the file is read and then written, and what another appends in between is lost.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= limit:
        return
    kept = os.pread(fd, limit // 2, status.st_size - limit // 2).partition(b"\n")[2]
    os.ftruncate(fd, 0)
    os.write(fd, kept)


class OncePerMinute(logging.Filter):
    """Lets one record per cause, that is logger and bare message, pass every ``interval_s``; counts the rest.

    A record whose ``extra`` has a ``cause`` is told apart by that, too: the same message about another address is another fact.
    """

    def __init__(self, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        # messages that were formatted before they came here look like causes of their own: only so many are kept
        self._limiter, self._clock = RateLimiter(interval_s, most_keys=_CAUSES), clock

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be written; one that is says how many like it were not."""
        cause = record.name, str(record.msg), str(getattr(record, "cause", ""))
        if not self._limiter.take(self._clock(), cause):
            return False
        if dropped := self._limiter.held_back(cause):
            record.msg = f"{record.msg} [and {dropped} more like it]"
        return True
