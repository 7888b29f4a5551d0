"""Errors by what they are about: by their type, never by the words of a message."""

from __future__ import annotations

import errno

import torch

from torchobs.guard.severity import Category

TRANSIENT_ERRNOS = frozenset(
    getattr(errno, name)
    for name in ("EAGAIN", "EBUSY", "EIO", "EINTR", "ESTALE", "ETIMEDOUT", "ENETDOWN", "ENETUNREACH", "EHOSTUNREACH")
    if hasattr(errno, name)
)
"""Errors of a file system or network that may be gone the next time (errno(3))"""


class NonFiniteLossError(FloatingPointError):
    """A loss, or a gradient, is NaN or infinite."""


class LossSpikeError(ArithmeticError):
    """A loss is far above what its recent past makes likely."""


def category_of(error: BaseException) -> Category:
    """Return what an error is about, by its type."""
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
    """Return True for an error of input or output that may be gone the next time."""
    passing = (ConnectionError, TimeoutError, InterruptedError, BlockingIOError)
    return isinstance(error, passing) or (isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS)
