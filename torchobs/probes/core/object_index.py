"""Assign small indices to objects that come and go: labels for what has no name (scalers, optimizers)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

S = TypeVar("S")


class _Entry(NamedTuple):
    ref: weakref.ref[Any]
    number: int
    state: Any


class ObjectIndex(Generic[S]):
    """Index and state for each of at most ``limit`` living objects; indices of dead ones are reused.

    Holds weak references. Written by the training thread, read by any.
    """

    def __init__(self, limit: int, make: Callable[[int], S]) -> None:
        self._limit, self._make = limit, make
        self._entries: dict[int, _Entry] = {}

    def of(self, thing: object) -> S | None:
        """Return the state of ``thing``, which is created at the first call; ``None`` beyond the limit."""
        entry = self._entries.get(id(thing))
        if entry is not None and entry.ref() is thing:
            found: S = entry.state
            return found
        return self._enter(thing)

    def _enter(self, thing: object) -> S | None:
        living = {key: entry for key, entry in self._entries.items() if entry.ref() is not None}
        taken = {entry.number for entry in living.values()}
        index = next((number for number in range(self._limit) if number not in taken), None)
        state = None
        if index is not None:
            state = self._make(index)
            living[id(thing)] = _Entry(weakref.ref(thing), index, state)
        self._entries = living
        return state

    def living(self) -> list[tuple[Any, S]]:
        """Return the living objects and their states, in the order of their indices."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.number)
        return [(thing, entry.state) for entry in entries if (thing := entry.ref()) is not None]
