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
from torchobs.probes.segments import DATA, OTHER

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.host import Host


class DataProbe:
    """Times the fetches."""

    name = "data"

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._depth = 0

    def install(self, host: Host) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        import torch  # torch is optional until training begins
        from torch.utils.data import dataloader  # as above

        self._host, self._gradients = host, torch.is_grad_enabled
        base, loader = dataloader._BaseDataLoaderIter, dataloader.DataLoader  # no public hook exists
        self._patches = [
            Patch(base, "__next__", self._watched(base.__next__, self._begin, self._end)),
            Patch(loader, "__iter__", self._watched(loader.__iter__, self._start_begins, self._start_ends)),
        ]

    def remove(self) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        for patch in self._patches:
            patch.undo()

    def _watched(self, original: Any, begin: Callable[[Any], None], end: Callable[[bool], None]) -> Any:
        fuse = self._host.fuse(self.name)
        guarded_begin, guarded_end, host = fuse.guard(begin), fuse.guard(end), self._host

        @functools.wraps(original)
        def watched(self_: Any) -> Any:
            if self._depth or get_ident() != host.thread:
                return original(self_)
            self._depth = 1
            guarded_begin(self_)
            exhausted = True
            try:
                result = original(self_)
                exhausted = False
            finally:
                self._depth = 0
                guarded_end(exhausted)
            return result

        return watched

    def _begin(self, iterator: Any) -> None:
        now_ns = monotonic_ns()
        # the sampler belongs to the loader, so that it is the same in every epoch
        self._host.cycle.fetch_begins(id(iterator._index_sampler), now_ns)  # no public name
        self._host.spend(self.name, monotonic_ns() - now_ns)

    def _end(self, exhausted: bool) -> None:  # noqa: FBT001  # called by position
        now_ns = monotonic_ns()
        self._host.cycle.fetch_ends(now_ns, exhausted=exhausted, gradients=self._gradients())
        self._host.spend(self.name, monotonic_ns() - now_ns)

    def _start_begins(self, loader: Any) -> None:
        del loader
        self._host.cycle.turn(DATA, monotonic_ns())

    def _start_ends(self, failed: bool) -> None:  # noqa: FBT001  # called by position
        del failed
        self._host.cycle.turn(OTHER, monotonic_ns())
