"""A model's output, or what stood in its way, as a result instead of an exception."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from torchobs import catalog
from torchobs.guard.batches import free_memory
from torchobs.guard.errors import category_of, is_transient
from torchobs.guard.outputs import NonFiniteOutputError, sanitize_outputs
from torchobs.guard.record import count, record
from torchobs.guard.severity import Category, Severity
from torchobs.support.arguments import is_number, is_whole
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class InferenceResult(Result):
    """What :func:`safe_inference` returns."""

    success: bool
    data: Any
    """the output; None without success"""
    error: Exception | None
    attempts: int
    severity: Severity
    category: Category | None
    """what the error is about; None if there was none"""


def safe_inference(model: Callable[..., Any], x: Any, max_retries: int = 3, *, backoff_s: float = 0.1) -> InferenceResult:
    """Call a model for its output, without gradients, and return what became of it instead of raising.

    What may be better next time is tried again: an out-of-memory error after freeing cached memory, a transient error of input
    or output. An output that is not finite is no success, and is not tried again.

    Args:
        model: called with ``x``, or with ``**x`` for a mapping. A module is called in the mode that it is in.
        x: the input.
        max_retries: further attempts after the first.
        backoff_s: wait before the first of them in seconds; doubled each time.

    Raises:
        ValueError: ``max_retries`` or ``backoff_s`` is negative, or no number.
        TypeError: the model cannot be called.
    """
    if not is_whole(max_retries) or max_retries < 0:
        raise ValueError(f"max_retries is {max_retries!r}; it is a whole number, 0 or more")
    if not (is_number(backoff_s) and 0 <= backoff_s < inf):
        raise ValueError(f"backoff_s is {backoff_s!r}; it is a time in seconds, 0 or more")
    if not callable(model):
        raise TypeError(f"model is {type(model).__name__}, which cannot be called")
    attempt = 0
    while True:
        attempt += 1
        try:
            with torch.no_grad():  # tables that a first pass makes, in inference mode, would break a training that comes after
                data = model(**x) if isinstance(x, Mapping) else model(x)
            sanitize_outputs(data)
        except NonFiniteOutputError as error:
            return _failed(error, attempt, Category.NUMERICS)
        except Exception as error:  # noqa: BLE001  # returned to the caller, who asked for that
            category = category_of(error)
            if attempt > max_retries or not (category is Category.MEMORY or is_transient(error)):
                return _failed(error.with_traceback(None), attempt, category)
            _record(category, Severity.INFO, "retry", error)
        else:
            return InferenceResult(True, data, None, attempt, Severity.INFO if attempt == 1 else Severity.WARNING, None)  # noqa: FBT003
        free_memory()
        time.sleep(backoff_s * 2 ** (attempt - 1))


def _failed(error: Exception, attempts: int, category: Category) -> InferenceResult:
    _record(category, Severity.ERROR, "return", error)
    return InferenceResult(success=False, data=None, error=error, attempts=attempts, severity=Severity.ERROR, category=category)


def _record(category: Category, severity: Severity, action: str, error: Exception) -> None:
    count(catalog.GUARD_RECOVERIES, 1, category, severity, action=action)
    record(catalog.EVENT_GUARD_RECOVERY, category, severity, action=action, error=type(error).__name__)
