"""The two ways to look for anomalies inside a ``debug.context``; what the user had set is restored."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.debug.operator_watch import Birth

_lock = Lock()
renew_in_child(sys.modules[__name__], _lock=Lock)
_raising: list[tuple[bool, bool]] = []
"""Torch's anomaly mode as it was before each context with ``raise``, one element; it is one for the process"""
_count = 0


@contextmanager
def entered(anomaly: str, found: Callable[[Birth], None]) -> Iterator[None]:
    """Look for anomalies that way during the block."""
    if anomaly == "raise":
        with _torch_raises():
            yield
    elif anomaly == "warn":
        from torchobs.debug import operator_watch

        operator_watch.watch_operators(found)
        try:
            yield
        finally:
            operator_watch.unwatch_operators()
    else:
        yield


@contextmanager
def _torch_raises() -> Iterator[None]:
    """Torch's anomaly mode, from the first context that wants it to the last."""
    import torch

    global _count  # noqa: PLW0603  # of the process, as the mode is
    with _lock:
        _count += 1
        if _count == 1:
            _raising.append((torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()))
            _set(torch, enabled=True, check_nan=True)
    try:
        yield
    finally:
        with _lock:
            _count -= 1
            if _count == 0:
                enabled, check_nan = _raising.pop()
                _set(torch, enabled=enabled, check_nan=check_nan)


def _set(torch: Any, *, enabled: bool, check_nan: bool) -> None:
    torch.autograd.set_detect_anomaly(enabled, check_nan)  # as a function it does not warn


def raised_by_torch(error: BaseException) -> bool:
    """Return True if torch's anomaly mode raised it."""
    return isinstance(error, RuntimeError) and "returned nan values in its" in str(error)
