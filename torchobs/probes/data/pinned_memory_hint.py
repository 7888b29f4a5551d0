"""Detect batches in pageable memory while training on a CUDA device, from one batch in ten seconds.

The sampler thread replaces the iterator's ``_next_data`` by an attribute of that one object; the next fetch removes it and
inspects its batch. Any other fetch costs nothing, and no device is synchronised.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.support.error_guard import call

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.probes.core.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

LEAST_BYTES = 64 * 1024
"""Copies up to this size do not make the host wait, pinned or not (CUDA C++ Programming Guide, "Concurrent
Execution between Host and Device")."""
_MAX_TENSORS = 64
_MAX_DEPTH = 4


class PinningWatch:
    """Inspects a batch now and then. A part of :class:`~torchobs.probes.data.loaders.LoaderProbe`."""

    def __init__(self) -> None:
        self._iterator: weakref.ref[Any] | None = None
        self._armed: weakref.ref[Any] | None = None
        self._reported = False

    def install(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        """Store the context and the breaker; nothing is patched yet."""
        self._context, self._breaker = context, breaker

    def remove(self) -> None:
        """Restore the iterator."""
        self._iterator = None
        armed = self._armed() if self._armed is not None else None
        if armed is not None:
            vars(armed).pop("_next_data", None)

    def begun(self, iterator: Any) -> None:
        """Remember the latest iterator."""
        if hasattr(iterator, "_next_data"):
            self._iterator = weakref.ref(iterator)

    def observe(self) -> None:
        """Inspect the next batch if a CUDA device is in use."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        iterator = self._iterator() if self._iterator is not None else None
        if cuda is not None and cuda.is_initialized() and iterator is not None:
            self.arm(iterator)

    def arm(self, iterator: Any) -> None:
        """Look at the iterator's next batch."""
        if "_next_data" in vars(iterator):
            return
        self._armed = known = weakref.ref(iterator)  # a strong reference would keep its workers alive

        def inspect_batch() -> Any:
            fetching: Any = known()
            vars(fetching).pop("_next_data", None)
            batch = type(fetching)._next_data(fetching)
            call(self._breaker, self._inspect, batch)
            return batch

        iterator._next_data = inspect_batch

    def _inspect(self, batch: Any) -> None:
        size = pageable_bytes(batch)
        self._context.count(catalog.DATA_UNPINNED_BATCHES, size > LEAST_BYTES)
        if size > LEAST_BYTES and not self._reported:
            self._reported = True
            self._context.event(catalog.EVENT_UNPINNED, {"size": size})


def pageable_bytes(batch: Any) -> int:
    """Return the bytes of a batch's CPU tensors that are not in pinned memory: nested containers, the first 64 tensors."""
    found = 0
    for number, tensor in enumerate(_tensors(batch, _MAX_DEPTH)):
        if number == _MAX_TENSORS:
            break
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            found += tensor.numel() * tensor.element_size()
    return found


def _tensors(batch: Any, depth: int) -> Iterator[Any]:
    if hasattr(batch, "is_pinned") and hasattr(batch, "element_size"):
        yield batch
    elif depth:
        items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
        for item in items:
            yield from _tensors(item, depth - 1)
