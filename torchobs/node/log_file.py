"""``exporter.log`` in the flight directory: the exporter's log, of bounded size.

The directory is memory (tmpfs) and nobody watches the file: a line comes once a minute, and the older half is dropped when it
grows too large.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections import Counter
from typing import TYPE_CHECKING

from torchobs.support.descriptors import Descriptor
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "exporter.log"
MAX_SIZE = 256 * 1024
BURST = 10
"""Lines a minute that differ in what they name only"""
_MAX_CAUSES = 1000


def open_log(directory_fd: int) -> Descriptor:
    """Open the log for appending. Raises ``OSError``."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    return Descriptor("", NAME, flags, directory=directory_fd)


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
    """Passes a line (logger and text) once every ``interval_s``, and of lines with one unformatted message ``BURST``.

    The rest is counted. A record with ``good_news`` in its ``extra`` passes always, and what was wrong before is new again.
    """

    def __init__(self, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._texts = RateLimiter(interval_s, most_keys=_MAX_CAUSES)
        # the same about hundreds of files, or in words that others choose
        self._messages = RateLimiter(interval_s / BURST, BURST, most_keys=_MAX_CAUSES)
        self._clock = clock
        self._good_news: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be written; the number of suppressed ones is appended to it."""
        if getattr(record, "good_news", False):
            self._good_news[record.name] += 1
            return True
        now, source = self._clock(), (record.name, self._good_news[record.name])
        text, message = (*source, record.getMessage()), (*source, str(record.msg))
        if not self._texts.take(now, text) or not self._messages.take(now, message):
            return False
        if dropped := self._texts.held_back(text) + self._messages.held_back(message):
            record.msg = f"{record.msg} [and {dropped} more like it]"
        return True
