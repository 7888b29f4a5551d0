"""Where findings go: the logger ``torchobs.debug``, the flight file's events where a session runs, the history."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from torchobs import api, catalog
from torchobs.detect.event_rate_limit import anomaly_limiter
from torchobs.runtime.session import current
from torchobs.support.after_fork import renew_in_child
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

LOGGER = "torchobs.debug"
LOG_EVERY_S = 60.0
"""A finding of one kind about one thing is logged at most once in this time"""
FLOOD = 8
"""Most findings of one kind that a call logs and records; its result has all of them"""

logger = logging.getLogger(LOGGER)
_lock = Lock()
renew_in_child(sys.modules[__name__], _lock=Lock)
_log_limiter = RateLimiter(LOG_EVERY_S)
_event_limiter = anomaly_limiter()


def found(kind: str, message: str, *, function: str, name: str = "", **fields: Any) -> None:
    """Log a finding and record it as an event; repeated ones are held back and counted.

    Args:
        kind: one word for what is wrong, such as ``nonfinite_gradient``.
        message: one sentence for people.
        function: public function that found it.
        name: what it was found in (a tensor's, a parameter's, an operation's name).
        fields: numbers and texts that go with it.
    """
    now = time.monotonic()
    with _lock:
        logged, left_out = _log_limiter.take(now, (kind, name)), _log_limiter.held_back((kind, name))
        recorded, unrecorded = _event_limiter.take(now, kind), _event_limiter.held_back(kind)
    if logged:
        logger.warning("%s: %s", function, message, extra=_extra(kind, function, name, fields, left_out))
    if recorded:
        more = {"left_out": unrecorded} if unrecorded else {}
        about = {"function": function, "kind": kind, "name": name, "message": message[:300], **more}
        # not as keywords: an event has a name of its own, and the attribute `name` is another
        api.record_event(catalog.EVENT_DEBUG_FINDING, about | fields)


def told(function: str, findings: Iterable[tuple[str, str, str]]) -> tuple[str, ...]:
    """Log and record findings (kind, what it was found in, sentence), of each kind the first eight; return all sentences."""
    seen, texts = Counter[str](), list[str]()
    for kind, name, text in findings:
        seen[kind] += 1
        if seen[kind] <= FLOOD:
            found(kind, text, function=function, name=name)
        texts.append(text)
    return tuple(texts)


def _extra(kind: str, function: str, name: str, fields: dict[str, Any], left_out: int) -> dict[str, Any]:
    session = current()
    extra = {"kind": kind, "function": function, "subject": name, "left_out": left_out, **fields}
    if session is not None and session.identity is not None and session.context is not None:
        extra |= {"rank": session.identity.rank, "step": session.context.recorder.step}
    return {f"torchobs_{field}": value for field, value in extra.items()}


def record_series(values: dict[str, Any]) -> None:
    """Record numbers by name as curves of the session, if one runs; tensors are copied without waiting for the device."""
    api.log(**values)


def forget() -> None:
    """Log and record the next finding of each kind again, as at the start."""
    global _log_limiter, _event_limiter  # the limiters of the process
    with _lock:
        _log_limiter, _event_limiter = RateLimiter(LOG_EVERY_S), anomaly_limiter()


class LoggingBridge(logging.Handler):
    """Hands findings on to another logger until it is closed. A context manager, too."""

    _open: ClassVar[set[LoggingBridge]] = set()
    _propagated: ClassVar[bool] = True
    """What the first of those that are open found"""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self._target = target
        if not self._open:
            LoggingBridge._propagated = logger.propagate
        self._open.add(self)
        logger.addHandler(self)
        logger.propagate = False  # the target's own handlers would print it a second time

    def emit(self, record: logging.LogRecord) -> None:
        """Hand on a record if the target's level lets it pass."""
        if self._target.isEnabledFor(record.levelno):
            self._target.handle(record)

    def close(self) -> None:
        """Let findings go where they went before. Idempotent."""
        if self in self._open:
            self._open.remove(self)
            logger.removeHandler(self)
            logger.propagate = self._propagated if not self._open else False
        super().close()

    def __enter__(self) -> LoggingBridge:  # noqa: PYI034  # typing.Self needs Python 3.11
        """Return the bridge."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it."""
        self.close()


def logging_bridge(target: logging.Logger) -> LoggingBridge:
    """Send findings to a training's own logger, with its handlers and level, in place of ``torchobs.debug``'s parents.

    Each record has structured fields: ``torchobs_kind``, ``torchobs_function``, ``torchobs_subject``, ``torchobs_left_out`` and
    what the kind adds; with a session ``torchobs_rank`` and ``torchobs_step``. ``close()``, or leaving a ``with``, ends it.

    Raises:
        TypeError: ``target`` is not a ``logging.Logger``.
        ValueError: ``target`` is ``torchobs.debug`` itself or below it.
    """
    if not isinstance(target, logging.Logger):
        raise TypeError(f"logging_bridge() takes a logging.Logger, not {type(target).__name__}: logging.getLogger(name)")
    if target.name == LOGGER or target.name.startswith(f"{LOGGER}."):
        raise ValueError(f"findings are logged to {LOGGER!r} already: give the logger of the training")
    return LoggingBridge(target)
