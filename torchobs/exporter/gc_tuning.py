"""Garbage collection, without looking at 10^5 series again and again.

What the exporter knows of a series is some ten objects, which stay as long as the series does and are in no cycles. A full
collection looks at all of them: 30 ms with 10,000 series, in the middle of a scrape, once in some hundred scrapes. Here what a
full collection has found alive is kept out of the next ones for an hour; what became garbage meanwhile goes at the end of it.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

THOROUGH_S = 3600.0
"""Between two collections that look at everything"""
YOUNG = 10_000
"""Objects more than before that have the youngest looked at: by Python's own measure it is done three times per page."""
_FULL = 2


class _Keeper:
    """What is called before and after each collection (``gc.callbacks``), in any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._thorough_s = clock, clock()

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        if info["generation"] < _FULL:
            return
        if phase == "stop":
            gc.freeze()
        elif self._clock() - self._thorough_s >= THOROUGH_S:
            self._thorough_s = self._clock()
            gc.unfreeze()


@contextmanager
def frozen_gc(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Within the ``with`` block, look at what has survived a full collection once an hour, and at the rest less often.

    ``clock``: seconds.
    """
    keeper, thresholds = _Keeper(clock), gc.get_threshold()
    gc.callbacks.append(keeper)
    gc.set_threshold(YOUNG, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(keeper)
        gc.unfreeze()
