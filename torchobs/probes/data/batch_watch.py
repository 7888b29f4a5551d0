"""Look at a batch of the data loaders now and then: the first one of every iteration, and one in ten seconds.

An attribute of that one iterator takes the place of its method ``_next_data``; the next fetch removes it and hands on its
batch. Any other fetch costs nothing, and no device is synchronised.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torchobs.support.error_guard import call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.support.error_guard import CircuitBreaker


class BatchWatch:
    """Calls ``look(iterator, batch)`` under the breaker, for batches that :meth:`arm` or :meth:`arm_latest` has asked for."""

    def __init__(self, breaker: CircuitBreaker, look: Callable[[Any, Any], None]) -> None:
        self._breaker, self._look = breaker, look
        self._latest: weakref.ref[Any] | None = None
        self._armed: weakref.WeakSet[Any] = weakref.WeakSet()

    def begun(self, iterator: Any, *, now: bool) -> None:
        """Remember an iterator that was begun. ``now``: look at its first batch."""
        if hasattr(iterator, "_next_data"):
            self._latest = weakref.ref(iterator)
            if now:
                self.arm(iterator)

    def arm_latest(self) -> None:
        """Look at the next batch of the latest iterator."""
        latest = self._latest
        iterator = latest() if latest is not None else None
        if iterator is not None:
            self.arm(iterator)

    def arm(self, iterator: Any) -> None:
        """Look at the iterator's next batch."""
        if not hasattr(iterator, "_next_data") or "_next_data" in vars(iterator):
            return
        known = weakref.ref(iterator)  # a strong reference would keep its workers alive
        self._armed.add(iterator)

        def next_data() -> Any:
            fetching: Any = known()
            vars(fetching).pop("_next_data", None)
            batch = type(fetching)._next_data(fetching)
            call(self._breaker, self._look, fetching, batch)
            return batch

        iterator._next_data = next_data

    def remove(self) -> None:
        """Restore the iterators."""
        self._latest = None
        for iterator in list(self._armed):
            vars(iterator).pop("_next_data", None)
        self._armed.clear()
