"""Measure the waiting for data: fetches from ``DataLoader`` iterators (``loaders`` has their start)."""

from __future__ import annotations

import functools
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.probes.core.boundaries import EXHAUSTED, FETCH, FETCHED, LONG_TRACE
from torchobs.probes.core.patch import Patch
from torchobs.probes.data.starvation import StarvationWatch

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext


class DataProbe:
    """Times the fetches."""

    name = "data"

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._depth = 0

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        import torch
        from torch.utils.data import dataloader

        self._context, self._grad_enabled = context, torch.is_grad_enabled
        self._starvation = StarvationWatch(context)
        base = dataloader._BaseDataLoaderIter
        self._patches = [Patch(base, "__next__", self._watched_next, probe=self.name, nests=True)]

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        for patch in self._patches:
            patch.undo()

    def sample(self) -> None:
        """Update the starvation verdict."""
        self._starvation.sample()

    def _watched_next(self, original: Any) -> Any:
        breaker, context, recorder, grad_enabled = (
            self._context.breaker(self.name),
            self._context,
            self._context.recorder,
            self._grad_enabled,
        )
        trace, note, note_argument = recorder.trace, recorder.trace.append, recorder.arguments.append
        relieve = breaker.guard(recorder.relieve)

        @functools.wraps(original)
        def watched(iterator: Any) -> Any:
            if self._depth or breaker.is_open or get_ident() != context.thread:
                return original(iterator)
            # inline, since a call would cost more than its body; nothing here can raise
            begun_ns = monotonic_ns()
            if trace and len(trace) > LONG_TRACE:  # empty where a plain step begins
                relieve()
            # the sampler belongs to the loader, so it is the same in every epoch
            note_argument(id(getattr(iterator, "_index_sampler", None)))
            note(begun_ns << 4 | FETCH)
            self._depth = 1
            code = EXHAUSTED
            try:
                batch = original(iterator)
                code = FETCHED
            finally:
                self._depth = 0
                ended_ns = monotonic_ns()
                note(ended_ns << 4 | code if grad_enabled() else ended_ns << 4 | code + 1)
                if recorder.metered:
                    context.record_overhead("data", 2 * (monotonic_ns() - ended_ns))  # the part before the fetch is as long
            return batch

        return watched
