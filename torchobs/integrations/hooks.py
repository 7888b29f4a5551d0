"""What the integrations share: a fuse for their hooks, the phase that is open, and what of a framework's values is recorded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torchobs
from torchobs import catalog
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

logger = logging.getLogger("torchobs")

_MEANT_FOR_TORCHOBS = frozenset({"loss", "tokens", "samples", "total_steps"})
_MAX_SETTINGS = 32
_LONGEST_WORD = 64


def missing(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return what to raise: one line with the command that helps, unless it is something else that is not there."""
    if (error.name or "").partition(".")[0] not in {extra, "pytorch_lightning", "opentelemetry"}:
        return error
    return ModuleNotFoundError(f"the {extra} integration needs: pip install 'torchobs[{extra}]'", name=error.name)


class Hooks:
    """Calls for one integration. What is raised in one goes no further, is told once, and switches the integration off."""

    def __init__(self, name: str) -> None:
        self._breaker = CircuitBreaker(name)
        self._open: tuple[str, AbstractContextManager[None]] | None = None

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call it, unless one has failed before."""
        call(self._breaker, function, *args)
        for trip in self._breaker.trips:
            what = {"probe": trip.probe, "exception.type": trip.exception, "location": trip.location}
            torchobs.event(catalog.EVENT_PROBE_DISABLED.name, **what)
            logger.warning(
                "torchobs: the %s integration failed with %s at %s and is off; training is not affected",
                trip.probe, trip.exception, trip.location,
            )  # fmt: skip
        self._breaker.trips.clear()

    @property
    def phase(self) -> str | None:
        """The phase that is open."""
        return self._open[0] if self._open is not None else None

    def begin(self, name: str) -> None:
        """Open a phase, after the one that is open."""
        self.end()
        self._open = (name, torchobs.phase(name))
        self._open[1].__enter__()

    def end(self) -> None:
        """Close it. Frameworks leave out the second of two hooks when an exception passes, so this may find none."""
        if self._open is not None:
            (_, opened), self._open = self._open, None
            opened.__exit__(None, None, None)


def scalars(values: Mapping[str, Any], but: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the numbers among them, without those that ``torchobs.log`` would take for the step's own."""
    unwanted = _MEANT_FOR_TORCHOBS | but
    return {str(name): value for name, value in values.items() if name not in unwanted and _is_number(value)}


def tell_trainer(framework: str, version: str, settings: Mapping[str, Any]) -> None:
    """Record which framework trains, and with what: numbers, yes or no, and single words, for a path or a key is none."""
    safe = {name: word for name, value in settings.items() if (word := _safe(value)) is not None}
    attributes = dict(list(safe.items())[:_MAX_SETTINGS]) | {"framework": framework, "version": version}
    torchobs.event(catalog.EVENT_TRAINER.name, **attributes)


def _is_number(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    return hasattr(value, "numel") and value.numel() == 1 and not value.is_complex()


def _safe(value: Any) -> bool | int | float | str | None:
    value = getattr(value, "value", value)  # an enumeration's
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_WORD and value.replace("-", "").replace("_", "").isalnum() else None
    return value if isinstance(value, (bool, int, float)) else None
