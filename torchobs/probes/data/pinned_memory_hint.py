"""Detect batches in pageable memory while training on a CUDA device, from the batches that ``batch_watch`` looks at."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.probes.core.context import ProbeContext

LEAST_BYTES = 64 * 1024
"""Copies up to this size do not make the host wait, pinned or not (CUDA C++ Programming Guide, "Concurrent
Execution between Host and Device")."""
_MAX_TENSORS = 64
_MAX_DEPTH = 4


class PinningHint:
    """Counts batches in pageable memory, and tells of the first. A part of ``loaders.LoaderProbe``."""

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._reported = context, False

    def look(self, batch: Any) -> None:
        """Inspect a batch, if a CUDA device is in use."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            self.inspect(batch)

    def inspect(self, batch: Any) -> None:
        """Count the batch if it is in pageable memory."""
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
