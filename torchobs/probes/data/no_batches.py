"""Detect a loader without a batch: fewer samples than the batch size, of which ``drop_last`` leaves the only batch out.

A run that trains has its batches, and one more loader without any is on purpose (a replay buffer that fills, a class of few
samples): only before the first step is it looked for, and a step that comes after all is known when the event is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

_SAMPLERS = frozenset({"RandomSampler", "SequentialSampler", "DistributedSampler"})
"""Those of torch, which have asked the data set for its length when they are iterated"""


class NoBatches:
    """A part of ``loaders.LoaderProbe``. Told once."""

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._told = context, False

    def look(self, loader: Any) -> None:
        """Look at a loader that has begun an iteration."""
        batches: Any = getattr(loader, "batch_sampler", None)
        if self._told or self._context.recorder.ended or type(batches).__name__ != "BatchSampler" or not batches.drop_last:
            return
        samples, size = batches.sampler, batches.batch_size
        if type(samples).__name__ not in _SAMPLERS or not 0 < (count := len(samples)) < size:
            return
        self._told = True
        self._context.event(catalog.EVENT_LOOP_MISTAKE, {"kind": "no_batches", "samples": count, "batch_size": size})
        text = (
            f"a data loader has no batch: {count} samples are fewer than the batch size, {size}, and drop_last leaves them out"
        )
        self._context.warn_limited("loop no_batches", text)
