"""Shared parts of the frameworks' callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torchobs
from torchobs import catalog
from torchobs.support.error_guard import CircuitBreaker, call

_MAX_PARTS = 16
"""Most elements of a batch that are inspected: it may be a list of a million numbers"""


def samples_in(batch: Any) -> int:
    """Return the first dimension of the batch's first tensor; 0 if there is none."""
    if hasattr(batch, "dim"):
        return int(batch.shape[0]) if batch.dim() else 0
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        parts = batch
    return next((number for part in islice(parts, _MAX_PARTS) if (number := samples_in(part))), 0)


def tokens_in(batch: Any) -> int:
    """Return the number of elements of the batch's ``input_ids``, padding included; 0 if it has none."""
    ids: Any = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.numel()) if hasattr(ids, "numel") else 0


logger = logging.getLogger("torchobs")

_RESERVED = frozenset({"loss", "tokens", "samples", "total_steps", "resumed_from", "flops"})
_MAX_SETTINGS = 32
_MAX_WORD_LENGTH = 64


def missing(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error to raise: one line with the command that helps, or the original if another module is missing."""
    if (error.name or "").partition(".")[0] not in {extra, "pytorch_lightning", "opentelemetry"}:
        return error
    return ModuleNotFoundError(f"the {extra} integration needs: pip install 'torchobs[{extra}]'", name=error.name)


class Hooks:
    """Guarded calls of one integration. An exception goes no further, is reported once, and turns the integration off."""

    def __init__(self, name: str) -> None:
        self._breaker = CircuitBreaker(name)
        self._open: tuple[str, AbstractContextManager[None]] | None = None

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call ``function``, unless an earlier call has failed."""
        call(self._breaker, function, *args)
        for failure in self._breaker.failures:
            what = {"probe": failure.probe, "exception.type": failure.exception, "location": failure.location}
            torchobs.event(catalog.EVENT_PROBE_DISABLED.name, **what)
            logger.warning(
                "torchobs: the %s integration failed with %s at %s and is off; training is not affected",
                failure.probe, failure.exception, failure.location,
            )  # fmt: skip
        self._breaker.failures.clear()

    @property
    def phase(self) -> str | None:
        """Name of the open phase."""
        return self._open[0] if self._open is not None else None

    def begin(self, name: str) -> None:
        """Open a phase; an open one is closed first."""
        self.end()
        self._open = (name, torchobs.phase(name))
        self._open[1].__enter__()

    def end(self) -> None:
        """Close the open phase, if any: frameworks skip the second of two hooks when an exception passes."""
        if self._open is not None:
            (_, opened), self._open = self._open, None
            opened.__exit__(None, None, None)


def scalars(values: Mapping[str, Any], excluding: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the numeric values, without the names that ``torchobs.log`` reserves for the step's own."""
    excluded = _RESERVED | excluding
    return {str(name): value for name, value in values.items() if name not in excluded and _is_number(value)}


def record_trainer(framework: str, version: str, settings: Mapping[str, Any]) -> None:
    """Record the framework and its settings: numbers, booleans and single words only, which excludes paths and keys."""
    safe = {name: word for name, value in settings.items() if (word := _safe(value)) is not None}
    attributes = dict(list(safe.items())[:_MAX_SETTINGS]) | {"framework": framework, "version": version}
    torchobs.event(catalog.EVENT_TRAINER.name, **attributes)


def _is_number(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    return hasattr(value, "numel") and value.numel() == 1 and not value.is_complex()


def _safe(value: Any) -> bool | int | float | str | None:
    value = getattr(value, "value", value)  # of an enum member
    if isinstance(value, str):
        return value if len(value) <= _MAX_WORD_LENGTH and value.replace("-", "").replace("_", "").isalnum() else None
    return value if isinstance(value, (bool, int, float)) else None
