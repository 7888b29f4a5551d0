"""Small numbers for objects that come and go: labels of what has no name of its own (scalers, optimizers)."""

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
    """The first ``limit`` living objects, each with an index and a state. A dead one's index is free again.

    Nothing is kept alive. Entered by the training thread, read by any.
    """

    def __init__(self, limit: int, make: Callable[[int], S]) -> None:
        self._limit, self._make = limit, make
        self._entries: dict[int, _Entry] = {}

    def of(self, thing: object) -> S | None:
        """Return the state of ``thing``, made at first sight; ``None`` beyond the limit."""
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
        """Return the objects that are alive and their states, in the order of their indices."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.number)
        return [(thing, entry.state) for entry in entries if (thing := entry.ref()) is not None]
