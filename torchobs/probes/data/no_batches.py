"""Detect a loader without a batch: fewer samples than the batch size, of which ``drop_last`` leaves the only batch out.

A run that trains has its batches, and one more loader without any is on purpose (a replay buffer that fills, a class of few
samples): only before the first step is it looked for, and a step that comes after all is known when the event is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torchobs import catalog

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

_BATCHES = frozenset({"BatchSampler"})
_SAMPLERS = frozenset({"RandomSampler", "SequentialSampler", "DistributedSampler"})
"""Those of torch, which have asked the data set for its length when they are iterated"""
_LIBRARIES = frozenset({"torch", "torchdata"})
"""Of a class of the script's that has such a name nothing is known"""


class NoBatches:
    """A part of ``loaders.LoaderProbe``. Told once."""

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._told = context, False
        self._latest: ref[Any] | None = None

    def look(self, loader: Any) -> None:
        """Look at a loader that has begun an iteration."""
        if self._told or self._context.recorder.ended or (self._latest is not None and self._latest() is loader):
            return
        self._latest = ref(loader)
        batches: Any = getattr(loader, "batch_sampler", None)
        if not _is_one_of(batches, _BATCHES) or not batches.drop_last or not _is_one_of(batches.sampler, _SAMPLERS):
            return
        count, size = len(batches.sampler), batches.batch_size
        if not 0 < count < size:
            return
        self._told = True
        self._context.event(catalog.EVENT_LOOP_MISTAKE, {"kind": "no_batches", "samples": count, "batch_size": size})
        text = (
            f"a data loader has no batch: {count} samples are fewer than the batch size, {size}, and drop_last leaves them out"
        )
        self._context.warn_limited("loop no_batches", text)


def _is_one_of(sampler: Any, names: frozenset[str]) -> bool:
    """Return True if its class is one of these of torch's."""
    kind = type(sampler)
    return kind.__name__ in names and kind.__module__.partition(".")[0] in _LIBRARIES
