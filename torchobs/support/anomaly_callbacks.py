"""Functions of the user's that are called for each anomaly: ``torchobs.on_anomaly``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable

    Entry = tuple[Callable[["AnomalyReport"], object], CircuitBreaker]

logger = logging.getLogger("torchobs")
_callbacks: list[Entry] = []


@dataclass(frozen=True, slots=True)
class AnomalyReport(Result):
    """One anomaly. ``value`` and ``baseline`` in the unit of the metric: a loss, a norm."""

    kind: str
    step: int
    value: float
    baseline: float
    origin: Any
    """Where a value that is not finite was born (``NonfiniteOrigin``), if it was traced; else ``None``"""


def on_anomaly(callback: Callable[[AnomalyReport], object]) -> Callable[[], None]:
    """Call ``callback(report)`` for every step that is judged anomalous; return a function that ends it.

    It is called in torchobs' own thread, at most a second after the step, and must return soon: meanwhile nothing is published.
    One that raises is logged and not called again. To stop a training at once use ``init(raise_on={"nonfinite"})``.

    Raises:
        TypeError: ``callback`` cannot be called.
    """
    if not callable(callback):
        raise TypeError(f"on_anomaly() takes a function, not {type(callback).__name__}")
    entry = callback, CircuitBreaker("on_anomaly")
    _callbacks.append(entry)
    return lambda: _remove(entry)


def notify(report: AnomalyReport) -> None:
    """Call them all."""
    for entry in tuple(_callbacks):
        callback, breaker = entry
        call(breaker, callback, report)
        for failure in breaker.failures:
            what = f"raised {failure.exception} at {failure.location}"
            logger.warning("torchobs: the function given to on_anomaly() %s and is not called again", what)
            _remove(entry)


def wanted() -> bool:
    """Return whether there are any."""
    return bool(_callbacks)


def _remove(ended: Entry) -> None:
    _callbacks[:] = [entry for entry in _callbacks if entry is not ended]
