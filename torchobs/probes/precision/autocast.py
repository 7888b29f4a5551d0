"""Data types that autocast uses, found by inspecting a few entries: nothing may be added to every step.

Autocast is thread-local and ends with the forward pass, so neither the sampler thread nor our hooks can see it. Its
``__enter__`` is wrapped until it was entered once enabled, or 64 times disabled, and again ten seconds later. Dynamo does not
trace ``__enter__`` but calls it when it compiles a region with autocast inside, so that is seen too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.probes.core.patch import Patch

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

MAX_ENTRIES = 64
MAX_SHOWN = 8
UNSCALED_STEPS = 100
"""Steps after which a float16 run would have used its loss scaler"""


class _Seen(NamedTuple):
    device: str
    dtype: str
    training: bool


class AutocastWatch:
    """Part of the AMP probe, which installs and removes it."""

    def __init__(self) -> None:
        self._patch: Patch | None = None
        self._entries_left = 0
        self._seen: set[_Seen] = set()
        self._shown: set[tuple[str, str]] = set()
        self._reported = self._removed = False

    def install(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        """Wrap autocast. Raises ``AttributeError`` where torch has no such class."""
        import torch
        from torch.amp import autocast_mode

        self._context, self._owner, self._is_grad_enabled = context, autocast_mode.autocast, torch.is_grad_enabled
        self._note_safely = breaker.guard(self._note)
        self._wrap()

    def remove(self) -> None:
        """Restore autocast for good; the rank's last round calls :meth:`observe` once more."""
        self._removed = True
        if self._patch is not None:
            self._patch.undo()

    def _wrap(self) -> None:
        if self._patch is not None or self._removed:
            return
        self._entries_left = MAX_ENTRIES
        self._patch = Patch(self._owner, "__enter__", self._watched_enter)

    def _watched_enter(self, original: Any) -> Any:
        note = self._note_safely

        @functools.wraps(original)
        def enter(context: Any) -> Any:
            entered = original(context)
            note(context)
            return entered

        return enter

    def _note(self, context: Any) -> None:
        self._entries_left -= 1
        if context._enabled:
            dtype = str(context.fast_dtype).removeprefix("torch.")
            self._seen.add(_Seen(context.device, dtype, self._is_grad_enabled()))
            if self._is_grad_enabled():
                self._context.training.autocast[context.device] = dtype
        if (context._enabled or self._entries_left <= 0) and self._patch is not None:
            self._patch.undo()
            self._patch = None  # only now, since the sampler thread may wrap it again

    def observe(self, *, scaled: bool) -> None:
        """Publish the data types seen and wrap autocast again. ``scaled``: a loss scaler was used. For the sampler thread."""
        for seen in sorted(self._seen.copy()):
            self._show(seen.device, seen.dtype)
        in_float16 = any(seen.training and seen.dtype == "float16" for seen in self._seen.copy())
        if in_float16 and not scaled and not self._reported and self._context.recorder.step >= UNSCALED_STEPS:
            self._report_unscaled()
        self._wrap()

    def _show(self, device: str, dtype: str) -> None:
        if (device, dtype) in self._shown or len(self._shown) >= MAX_SHOWN:
            return
        self._shown.add((device, dtype))
        self._context.set_gauge(catalog.AMP_AUTOCAST, 1.0, {"device_type": device, "dtype": dtype})

    def _report_unscaled(self) -> None:
        self._reported = True
        context = self._context
        context.event(catalog.EVENT_AMP_UNSCALED, {"steps": context.recorder.step})
        context.warn_limited("amp unscaled", "float16 autocast is in use without a GradScaler: small gradients become zero")
