"""Measure the waiting for data: fetches from ``DataLoader`` iterators (``loaders`` has their start)."""

from __future__ import annotations

import functools
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.detect.speed import DataCounters, Starvation
from torchobs.flight.metrics.totals import Word
from torchobs.flight.writer.native import ELSEWHERE, make_hook
from torchobs.probes.core.boundaries import EXHAUSTED, FETCH, FETCHED, LONG_TRACE
from torchobs.probes.core.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker


_PHASES = slice(Word.PHASE_TIME, Word.PHASE_TIME + len(catalog.PHASES))
_DATA = Word.PHASE_TIME + catalog.PHASES.index("data")


class DataProbe:
    """Times the fetches."""

    name = "data"
    __slots__ = ("__dict__", "_depth")  # the compiled part has it in place

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
        context, recorder, training = self._context, self._context.recorder, self._context.training
        breaker, grad_enabled = context.breaker(self.name), self._grad_enabled
        trace, note, note_argument = recorder.trace, recorder.trace.append, recorder.arguments.append
        relieve, thread_id, clock = breaker.guard(recorder.relieve), get_ident, monotonic_ns
        run = self._compiled(original, breaker)

        @functools.wraps(original)
        def watched(iterator: Any) -> Any:
            if run is not None and (batch := run(iterator)) is not ELSEWHERE:
                return batch
            if self._depth or breaker.is_open or thread_id() != training.thread:
                return original(iterator)
            # inline, since a call would cost more than its body; nothing here can raise
            if trace and len(trace) > LONG_TRACE:  # empty where a plain step begins
                relieve()
            # the sampler belongs to the loader, so it is the same in every epoch
            note_argument(id(getattr(iterator, "_index_sampler", None)))
            note(clock() << 4 | FETCH)
            self._depth = 1
            code = EXHAUSTED
            try:
                batch = original(iterator)
                code = FETCHED
            finally:
                self._depth = 0
                if not grad_enabled():
                    code += 1
                note(clock() << 4 | code)
                if recorder.metered:
                    context.record_overhead("data", 2 * (clock() - (trace[-1] >> 4)))  # the part before the fetch is as long
            return batch

        return watched

    def _compiled(self, original: Any, breaker: CircuitBreaker) -> Callable[[Any], Any] | None:
        """Return what calls ``original`` and records nearly every fetch, or says ``ELSEWHERE``; if it is compiled."""
        recorder, training = self._context.recorder, self._context.training
        held = recorder.trace, recorder.arguments, self._grad_enabled, original, ELSEWHERE
        made = make_hook(self._context.writer.native, "PlainFetch", (recorder, training, self, breaker), held)
        return made.run if made is not None else None


class StarvationWatch:
    """Reports training that waits for its data, from the fold's phase times. In the sampler thread; a part of ``DataProbe``."""

    def __init__(self, context: ProbeContext, clock: Callable[[], float] = monotonic) -> None:
        self._context, self._clock, self._judge = context, clock, Starvation()
        context.set_gauge(catalog.DATA_STARVED, 0.0)

    def sample(self) -> None:
        """Judge the counters; record a changed verdict."""
        totals, before = self._context.writer.table.core.totals, self._judge.starved
        seen = DataCounters(self._clock(), totals.ints[Word.STEPS], totals.floats[_DATA], sum(totals.floats[_PHASES]))
        if not self._judge.judge(seen):
            return
        self._context.set_gauge(catalog.DATA_STARVED, self._judge.starved)
        if self._judge.starved and not before:
            self._context.event(catalog.EVENT_STARVED, {"share": round(self._judge.share, 3)})
