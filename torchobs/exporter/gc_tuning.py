"""Keep the garbage collector from traversing the state of up to 10^5 series again and again.

Each series has some ten objects, which live as long as the series and are in no cycles. A full collection traverses all of
them: 30 ms with 10,000 series, in the middle of a scrape, once in some hundred scrapes. Here the survivors of a full collection
are frozen for an hour (``gc.freeze``); what became garbage meanwhile is collected at its end.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

THOROUGH_S = 3600.0
"""Seconds between two full collections that include frozen objects"""
YOUNG = 10_000
"""Threshold of the youngest generation: with Python's default it would be collected three times per page."""
_FULL = 2


class _Keeper:
    """Callback before and after each collection (``gc.callbacks``), in any thread."""

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
    """Context manager: traverse survivors of full collections only once an hour, and collect young objects less often.

    ``clock`` returns seconds.
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
