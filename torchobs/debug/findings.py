"""Where findings go: the logger ``torchobs.debug``, events of the flight file, and the summaries of this process."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torchobs import api, catalog
from torchobs.flight.totals import NORM_SUM, Word
from torchobs.runtime.session import current
from torchobs.support.after_fork import renew_in_child
from torchobs.support.rate_limit import RateLimiter, anomaly_limiter
from torchobs.support.result import Checked, Problem, Result

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

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


def record_finding(kind: str, message: str, *, function: str, name: str = "", **fields: Any) -> Problem:
    """Log a finding and record it as an event, where repeated ones are held back and counted; return it.

    Args:
        kind: one word for what is wrong, such as ``nonfinite_gradient``.
        message: one sentence for people.
        function: public function that found it.
        name: of the tensor, parameter or operation that has it.
        fields: numbers and texts that go with it.
    """
    now = time.monotonic()
    with _lock:
        problem = Problem(kind, name, message)
        for problems in (_problems, *collecting):
            problems.pop((kind, name), None)  # the last one is the newest
            problems[kind, name] = problem
            if len(problems) > MOST_RECENT:
                del problems[next(iter(problems))]
        logged, left_out = _log_limiter.take(now, (kind, name)), _log_limiter.held_back((kind, name))
        recorded, unrecorded = _event_limiter.take(now, kind), _event_limiter.held_back(kind)
    if logged:
        extra = {"kind": kind, "function": function, "subject": name, "left_out": left_out, **fields}
        session = current()
        if session is not None and session.identity is not None and session.context is not None:
            extra |= {"rank": session.identity.rank, "step": session.context.recorder.step}
        logger.warning("%s: %s", function, problem, extra={f"torchobs_{field}": value for field, value in extra.items()})
    if recorded:
        more = {"left_out": unrecorded} if unrecorded else {}
        about = {"function": function, "kind": kind, "name": name, "message": str(problem)[:300], **more}
        # not as keywords: an event has a name of its own, and the attribute `name` is another
        api.record_event(catalog.EVENT_DEBUG_FINDING, about | fields)
    return problem


def record_findings(function: str, findings: Iterable[tuple[str, str, str]]) -> tuple[Problem, ...]:
    """Log and record findings (kind, name, sentence), the first eight of each kind; return all."""
    problems = tuple(Problem(*finding) for finding in findings)
    counts = Counter[str]()
    for problem in problems:
        counts[problem.kind] += 1
        if counts[problem.kind] <= FLOOD:
            record_finding(problem.kind, problem.text, function=function, name=problem.where)
    return problems


def record_series(values: dict[str, Any]) -> None:
    """Record numbers by name as curves of the session, if one runs; tensors are copied without waiting for the device."""
    api.log(**values)


class LoggingBridge(logging.Handler, AbstractContextManager["LoggingBridge"]):
    """A handler, and a context manager, that passes findings to another logger until it is closed."""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self._target = target
        first = next((handler for handler in logger.handlers if isinstance(handler, LoggingBridge)), None)
        self._propagated: bool = logger.propagate if first is None else first._propagated
        logger.addHandler(self)
        logger.propagate = False  # the target's own handlers would print it a second time

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on if the target's level allows it."""
        if self._target.isEnabledFor(record.levelno):
            self._target.handle(record)

    def close(self) -> None:
        """Let findings go where they went before, if no other bridge is open. Idempotent."""
        if self in logger.handlers:
            logger.removeHandler(self)
            if not any(isinstance(handler, LoggingBridge) for handler in logger.handlers):
                logger.propagate = self._propagated
        super().close()

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def logging_bridge(to: logging.Logger) -> LoggingBridge:
    """Send findings to a training's own logger instead of the parents of ``torchobs.debug``.

    Each record has the fields ``torchobs_kind``, ``torchobs_function``, ``torchobs_subject``, ``torchobs_left_out`` and
    those of its kind; with a session ``torchobs_rank`` and ``torchobs_step``. ``close()``, or leaving a ``with``, ends it.

    Raises:
        TypeError: ``to`` is not a ``logging.Logger``.
        ValueError: ``to`` is ``torchobs.debug`` itself or below it.
    """
    if not isinstance(to, logging.Logger):
        raise TypeError(f"logging_bridge() takes a logging.Logger, not {type(to).__name__}: logging.getLogger(name)")
    if to.name == LOGGER or to.name.startswith(f"{LOGGER}."):
        raise ValueError(f"findings are logged to {LOGGER!r} already: give the logger of the training")
    return LoggingBridge(to)


MOST_OPERATIONS = 16
"""Operations by name; later names count as ``other``"""
MOST_RECENT = 100
OTHER = "other"
_ALL, _ANOMALOUS, _MEASURED = "steps", "anomalous steps", "measured norms"
LOSS_KINDS = ("nonfinite_loss", "loss_spike", "diverged")


@dataclass(frozen=True, slots=True)
class OperationSummary(Result):
    """The operations of one name."""

    operation: str
    count: int
    total_s: float
    mean_s: float
    minimum_s: float
    maximum_s: float
    memory_peak_bytes: int
    """Most memory that the process had during one of them"""
    gpu_memory_peak_bytes: int | None
    with_problems: int
    errors: int
    """That an exception ended"""


@dataclass(frozen=True, slots=True)
class DebugSummary(Checked):
    """All operations since the start or the last ``clear()``; times and memory are ``None`` where there was none."""

    total_operations: int
    with_problems: int
    """Operations that had a problem"""
    errors: int
    """Operations that an exception ended"""
    mean_s: float | None
    maximum_s: float | None
    longest_operation: str | None
    memory_peak_bytes: int | None
    gpu_memory_peak_bytes: int | None
    operations: tuple[OperationSummary, ...]
    denoising: tuple[Result, ...]
    """The ``DenoisingCheck`` of each diffusion monitor that still exists"""
    problems: tuple[Problem, ...]
    """The last hundred findings of all functions, the newest last; one for each kind and name"""


@dataclass(frozen=True, slots=True)
class TrainingSummary(Result):
    """Steps and their anomalies.

    Rates are shares of the steps, ``None`` before the first; those of gradients shares of the steps in which the norm was
    measured: in a session not in every step.
    """

    total_steps: int
    anomaly_steps: int
    gradient_explosions: int
    gradient_vanishing: int
    loss_anomalies: int
    anomaly_rate: float | None
    """Rate of anomalous steps, or of one kind of anomaly if that is greater"""
    gradient_explosion_rate: float | None
    gradient_vanishing_rate: float | None
    loss_anomaly_rate: float | None
    source: str
    """``monitored``: steps given to ``monitor_step`` or ``training_step``; ``recorded``: without any, all steps of the session
    (``anomaly_steps`` is then a lower bound: the greatest count of one kind)"""


_operations: dict[str, OperationSummary] = {}
_steps, _recorded_before = Counter[str](), Counter[str]()
"""Steps that were checked: all, those with an anomaly, and by kind; the session's counts at the last ``clear()``"""
_problems: dict[tuple[str, str], Problem] = {}
monitors = WeakSet[Any]()
"""Diffusion monitors that have recorded a step: the summary has their results"""
collecting: list[dict[tuple[str, str], Problem]] = []
"""Further dictionaries that get each finding, as long as they are in this list"""


def record_operation(
    name: str, time_s: float, memory: int, gpu_memory: int | None, *, has_problems: bool, has_raised: bool
) -> None:
    """Count an operation that has ended."""
    with _lock:
        if name not in _operations and len(_operations) >= MOST_OPERATIONS:
            name = OTHER
        old = _operations.get(name, OperationSummary(name, 0, 0.0, 0.0, time_s, time_s, memory, gpu_memory, 0, 0))
        count, total_s = old.count + 1, old.total_s + time_s
        row = _operations[name] = OperationSummary(
            name, count, total_s, total_s / count, min(old.minimum_s, time_s), max(old.maximum_s, time_s),
            max(old.memory_peak_bytes, memory), _greatest([old.gpu_memory_peak_bytes, gpu_memory]),
            old.with_problems + has_problems, old.errors + has_raised,
        )  # fmt: skip
    api.count(catalog.DEBUG_OPERATIONS, 1, operation=name)
    api.count(catalog.DEBUG_OPERATION_TIME, time_s, operation=name)
    api.count(catalog.DEBUG_OPERATION_ANOMALIES, has_problems, operation=name)
    api.set_gauge(catalog.DEBUG_OPERATION_LONGEST, row.maximum_s, operation=name)
    api.set_gauge(catalog.DEBUG_OPERATION_MEMORY, row.memory_peak_bytes, operation=name, space="host")
    if row.gpu_memory_peak_bytes:
        api.set_gauge(catalog.DEBUG_OPERATION_MEMORY, row.gpu_memory_peak_bytes, operation=name, space="device")


def _greatest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def record_step(kinds: Collection[str], *, anomalous: bool) -> None:
    """Count a step that was checked, and its kinds of ``catalog.STEP_ANOMALIES``."""
    with _lock:
        _steps.update([_ALL, *[_ANOMALOUS] * anomalous, *kinds])
    api.count(catalog.DEBUG_STEPS, 1)
    api.count(catalog.DEBUG_ANOMALY_STEPS, anomalous)
    for kind in catalog.STEP_ANOMALIES:
        api.count(catalog.DEBUG_STEP_ANOMALIES, kind in kinds, kind=kind)


def summary() -> DebugSummary:
    """Return time, memory and problems of all operations so far."""
    denoising = tuple(monitor.result() for monitor in list(monitors))
    with _lock:
        rows, problems = tuple(_operations.values()), tuple(_problems.values())
    count, longest = sum(row.count for row in rows), max(rows, key=lambda row: row.maximum_s, default=None)
    return DebugSummary(
        total_operations=count, with_problems=sum(row.with_problems for row in rows), errors=sum(row.errors for row in rows),
        mean_s=sum(row.total_s for row in rows) / count if count else None, maximum_s=longest.maximum_s if longest else None,
        longest_operation=longest.operation if longest else None,
        memory_peak_bytes=_greatest(row.memory_peak_bytes for row in rows),
        gpu_memory_peak_bytes=_greatest(row.gpu_memory_peak_bytes for row in rows), operations=rows,
        denoising=denoising, problems=problems,
    )  # fmt: skip


def training_summary() -> TrainingSummary:
    """Count steps and anomalies: those given to ``monitor_step`` and ``training_step``, or else the session's."""
    return training_since(Counter())


def steps_so_far() -> Counter[str]:
    """Return counts of the steps that were checked, for :func:`training_since`."""
    with _lock:
        return _steps.copy()


def training_since(before: Counter[str]) -> TrainingSummary:
    """Return the :func:`training_summary` without the steps counted ``before``."""
    counts, source = steps_so_far() - before, "monitored"
    measured = counts[_ALL]
    explosions, vanishing, loss = (counts[kind] for kind in catalog.STEP_ANOMALIES)
    if not counts[_ALL] and current() is not None:
        counts, source = _session_counts(), "recorded"
        counts.subtract(_recorded_before)
        explosions, vanishing = (counts[kind] for kind in catalog.STEP_ANOMALIES[:2])
        loss, measured = sum(counts[kind] for kind in LOSS_KINDS), counts[_MEASURED] or counts[_ALL]
        counts[_ANOMALOUS] = max(counts[kind] for kind in catalog.ANOMALY_KINDS)
    steps, anomalous = counts[_ALL], counts[_ANOMALOUS]
    if not steps:
        return TrainingSummary(0, anomalous, explosions, vanishing, loss, None, None, None, None, source)
    exploded, vanished = explosions / measured, vanishing / measured
    rates = max(anomalous / steps, exploded, vanished), exploded, vanished, loss / steps
    return TrainingSummary(steps, anomalous, explosions, vanishing, loss, *rates, source)


def _session_counts() -> Counter[str]:
    """Return the counts of the session's sampler: steps, those with a gradient norm, anomalies by kind."""
    session = current()
    if session is None or session.context is None:
        return Counter()
    ints = session.context.writer.table.core.totals.ints
    measured = sum(ints[Word.NORM_DISTRIBUTION : NORM_SUM]) + ints[Word.NONFINITE_STEPS]
    kinds = {kind: ints[Word.ANOMALIES + place] for place, kind in enumerate(catalog.ANOMALY_KINDS)}
    return Counter({_ALL: ints[Word.STEPS], _MEASURED: measured, **kinds})


def clear() -> None:
    """Forget all operations and steps seen so far, and which findings were logged already. Metrics and events stay."""
    global _log_limiter, _event_limiter  # of the process
    recorded = _session_counts()
    with _lock:
        _log_limiter, _event_limiter = RateLimiter(LOG_EVERY_S), anomaly_limiter()
        _recorded_before.clear()
        _recorded_before.update(recorded)  # the session's counts never fall
        _operations.clear()
        _steps.clear()
        _problems.clear()
        monitors.clear()
