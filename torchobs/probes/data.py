"""Waiting for data: ``DataLoader`` iterators, and their start.

``_BaseDataLoaderIter.__next__`` is where every built-in loader fetches; only the outermost counts (an IterableDataset over a
loader fetched twice). A fetch in another thread (a prefetcher's) is not the training thread's time.
"""

from __future__ import annotations

import functools
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.probes.patching import Patch
from torchobs.probes.trace import EXHAUSTED, EXHAUSTED_NO_GRAD, FETCH, FETCHED, FETCHED_NO_GRAD, LOADER_STARTS, STEP_ENDS

if TYPE_CHECKING:
    from torchobs.probes.host import Host


class DataProbe:
    """Times the fetches."""

    name = "data"

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._depth = 0

    def install(self, host: Host) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        import torch
        from torch.utils.data import dataloader

        self._host, self._grad_enabled = host, torch.is_grad_enabled
        base, loader = dataloader._BaseDataLoaderIter, dataloader.DataLoader
        self._patches = [
            Patch(base, "__next__", self._watched_next(base.__next__)),
            Patch(loader, "__iter__", self._watched_iter(loader.__iter__)),
        ]

    def remove(self) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        for patch in self._patches:
            patch.undo()

    def _watched_next(self, original: Any) -> Any:
        fuse, host = self._host.fuse(self.name), self._host
        begin, end = fuse.guard(self._begin), fuse.guard(self._end)

        @functools.wraps(original)
        def watched(iterator: Any) -> Any:
            if self._depth or get_ident() != host.thread:
                return original(iterator)
            self._depth = 1
            begin(iterator)
            exhausted = True
            try:
                batch = original(iterator)
                exhausted = False
            finally:
                self._depth = 0
                end(exhausted)
            return batch

        return watched

    def _watched_iter(self, original: Any) -> Any:
        fuse, host = self._host.fuse(self.name), self._host
        mark = fuse.guard(self._mark)

        @functools.wraps(original)
        def watched(loader: Any) -> Any:
            if self._depth or get_ident() != host.thread:
                return original(loader)
            mark(LOADER_STARTS)
            try:
                return original(loader)
            finally:
                mark(STEP_ENDS)

        return watched

    def _begin(self, iterator: Any) -> None:
        now_ns, cycle = monotonic_ns(), self._host.cycle
        # the sampler belongs to the loader, so that it is the same in every epoch
        cycle.mark(FETCH, now_ns, id(iterator._index_sampler))

    def _end(self, exhausted: bool) -> None:  # noqa: FBT001  # called by position
        now_ns, cycle = monotonic_ns(), self._host.cycle
        gradients = self._grad_enabled()
        if exhausted:
            cycle.mark(EXHAUSTED if gradients else EXHAUSTED_NO_GRAD, now_ns)
        else:
            cycle.trace.append(now_ns << 4 | (FETCHED if gradients else FETCHED_NO_GRAD))
        if cycle.metered:
            self._host.spend(self.name, 2 * (monotonic_ns() - now_ns))  # _begin is as long

    def _mark(self, code: int) -> None:
        self._host.cycle.mark(code, monotonic_ns())
