"""Records of the guard's findings and actions, with category and severity; its errors."""

from __future__ import annotations

import errno
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from torchobs import api, catalog

if TYPE_CHECKING:
    from torchobs.catalog import Event, Metric

E = TypeVar("E", bound=Enum)


class Severity(Enum):
    """How bad it is, in OpenTelemetry's words."""

    INFO = "info"
    """nothing was lost: a repeated operation worked"""
    WARNING = "warning"
    """something was lost and training went on: a batch, a step"""
    ERROR = "error"
    """a budget is spent, and the original error was raised"""


class Category(Enum):
    """What an error is about, by the exception's type, never by its message."""

    MEMORY = "memory"
    """a device or the machine ran out of memory"""
    NUMERICS = "numerics"
    """a loss, a gradient or an output is not finite, or has exploded"""
    DATA = "data"
    """a sample or a batch cannot be read or used"""
    IO = "io"
    """a file system or network failed, perhaps for a moment"""
    CONTRACT = "contract"
    """a tensor does not keep its contract"""
    RESOURCES = "resources"
    """a limit of processor, memory or disk is near"""
    FILE = "file"
    """a model file is suspicious or damaged"""
    OTHER = "other"


def record(error: BaseException, severity: Severity | str = Severity.WARNING, category: Category | str | None = None) -> None:
    """Record an error that the program has handled, as an event and a metric of the run, if one is recorded.

    Args:
        error: the exception; nothing of its message is recorded.
        severity: how bad it is: ``"info"``, ``"warning"``, ``"error"``, or a :class:`Severity`.
        category: a :class:`Category` or its word; by default by the exception's type.

    Raises:
        TypeError: ``error`` is no exception.
        ValueError: an unknown severity or category.
    """
    if not isinstance(error, BaseException):
        raise TypeError(f"error is an exception, caught or new, not {type(error).__name__}")
    about = category_of(error) if category is None else _member(Category, category)
    record_recovery(about, _member(Severity, severity), "record", error)


def _member(kind: type[E], value: object) -> E:
    try:
        return kind(value)
    except ValueError:
        words = ", ".join(str(member.value) for member in kind)
        raise ValueError(f"unknown {kind.__name__.lower()} {value!r}: use one of {words}") from None


def record_event(event: Event, category: Category, severity: Severity, **attributes: object) -> None:
    """Record an event of the run, if one is recorded; never raises."""
    api.record_event(event, {"category": category.value, "severity": severity.value, **attributes})


def count(metric: Metric, amount: float, category: Category, severity: Severity, **labels: str) -> None:
    """Add to a metric of the run, if one is recorded; never raises."""
    api.count(metric, amount, category=category.value, severity=severity.value, **labels)


def record_recovery(category: Category, severity: Severity, action: str, error: BaseException) -> None:
    """Record the action that was taken after an error."""
    count(catalog.GUARD_RECOVERIES, 1, category, severity, action=action)
    record_event(catalog.EVENT_GUARD_RECOVERY, category, severity, action=action, error=type(error).__name__)


def record_bad_file(by: str, verdict: str, reason: str, severity: Severity = Severity.ERROR) -> None:
    """Record that the function ``by`` found a file wrong."""
    count(catalog.GUARD_FINDINGS, 1, Category.FILE, severity, by=by)
    record_event(catalog.EVENT_GUARD_FILE, Category.FILE, severity, verdict=verdict, reason=reason)


def printable(name: str) -> str:
    """Return a file's name for a message; its ``repr()`` if it could steer a terminal."""
    return name if name.isprintable() else repr(name)


TRANSIENT_ERRNOS = frozenset(
    getattr(errno, name)
    for name in ("EAGAIN", "EBUSY", "EIO", "EINTR", "ESTALE", "ETIMEDOUT", "ENETDOWN", "ENETUNREACH", "EHOSTUNREACH")
    if hasattr(errno, name)
)
"""Errors of a file system or network that may be gone the next time (errno(3))"""


class NonFiniteLossError(FloatingPointError):
    """A loss, or a gradient, is NaN or infinite."""


class LossSpikeError(ArithmeticError):
    """A loss is far above the recent ones."""


def category_of(error: BaseException) -> Category:
    """Return what an error is about, by its type."""
    import torch  # files and resources are checked without it

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return Category.MEMORY
    if isinstance(error, OSError):
        return Category.IO
    if isinstance(error, ArithmeticError):
        return Category.NUMERICS
    if isinstance(error, (ValueError, TypeError, LookupError, EOFError)):
        return Category.DATA
    return Category.OTHER


def is_transient(error: BaseException) -> bool:
    """Return whether it is an error of input or output that may be gone the next time."""
    passing = (ConnectionError, TimeoutError, InterruptedError, BlockingIOError)
    return isinstance(error, passing) or (isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS)
