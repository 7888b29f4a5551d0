"""Data loaders: waits for their batches, iterations, start-up time of workers, living workers, ready batches.

``DataLoader.__iter__`` is rare, so other probes are notified of iterations from here (``Hooks.iterated``). A loader
iterated inside another one's fetch (an IterableDataset over a loader), or in another thread, is not the training's.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import weakref
from contextlib import suppress
from math import nan
from threading import Lock, get_ident
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from torchobs import catalog
from torchobs.detect.speed import DataCounters, Starvation
from torchobs.flight.totals import Word
from torchobs.probes.replicas import ReplicaBatches, Replicas
from torchobs.probes.timeline import EXHAUSTED, FETCH, FETCHED, LOADER_STARTS, STEP_ENDS
from torchobs.support import error_guard
from torchobs.support.after_fork import renew_in_child
from torchobs.support.cgroup import read
from torchobs.support.error_guard import call
from torchobs.support.import_hooks import after_import, cancel
from torchobs.taps import taps
from torchobs.taps.patch import Patch
from torchobs.tensors.batches import batch_sizes

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.abc import MetaPathFinder

    from torchobs.probes.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

_PHASES = slice(Word.PHASE_TIME, Word.PHASE_TIME + len(catalog.PHASES))
_DATA = Word.PHASE_TIME + catalog.PHASES.index("data")
STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_LONGEST = 200
_ROUNDS = 10
"""Workers are checked once a second: a system call for each"""


class DataProbe:
    """Times the fetches."""

    name = "data"

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        import torch

        self._context, self._starvation = context, StarvationWatch(context)
        plain = context.recorder.plain
        plain.data_breaker, plain.grad_enabled = context.breaker(self.name), torch.is_grad_enabled
        self._relieve, plain.slow_fetch = plain.data_breaker.guard(context.recorder.relieve), self._any_fetch
        taps.FETCH.lead_shared(self._watched_next, self.name)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        taps.FETCH.leave()

    def sample(self) -> None:
        """Update the starvation verdict."""
        self._starvation.sample()

    def _watched_next(self, original: Any, busy: Any, divert: Any) -> Any:
        recorded = self._context.recorder.plain.fetch

        @functools.wraps(original)
        def watched(iterator: Any) -> Any:
            return divert(iterator) if busy else recorded(original, iterator)

        return watched

    def _any_fetch(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        """Record a fetch outside of a plain step; return the result of ``original``."""
        plain = self._context.recorder.plain
        if plain.fetching or plain.data_breaker.is_open or get_ident() != plain.thread:
            return original(iterator)
        self._relieve()
        plain.arguments.append(id(getattr(iterator, "_index_sampler", None)))
        plain.trace.append(monotonic_ns() << 4 | FETCH)
        plain.fetching, code = True, EXHAUSTED
        try:
            batch = original(iterator)
            code = FETCHED
        finally:
            plain.fetching = False
            if not plain.grad_enabled():
                code += 1
            plain.trace.append(monotonic_ns() << 4 | code)
            if plain.metered:
                # the part before the fetch is as long
                self._context.record_overhead("data", 2 * (monotonic_ns() - (plain.trace[-1] >> 4)))
        return batch


class StarvationWatch:
    """Reports training that waits for its data, by the fold's phase times. In the sampler thread; a part of ``DataProbe``."""

    def __init__(self, context: ProbeContext, clock: Callable[[], float] = monotonic) -> None:
        self._context, self._clock, self._judge = context, clock, Starvation()
        context.set_gauge(catalog.DATA_STARVED, 0.0)

    def sample(self) -> None:
        """Judge the counters; record a changed verdict."""
        totals, before = self._context.writer.table.core.totals, self._judge.starved
        counters = DataCounters(self._clock(), totals.ints[Word.STEPS], totals.floats[_DATA], sum(totals.floats[_PHASES]))
        if not self._judge.judge(counters):
            return
        self._context.set_gauge(catalog.DATA_STARVED, self._judge.starved)
        if self._judge.starved and not before:
            self._context.event(catalog.EVENT_STARVED, {"share": round(self._judge.share, 3)})


class _Pool(NamedTuple):
    """The workers of one iterator, kept longer than it, to learn the cause of its end."""

    iterator: weakref.ref[Any]
    workers: list[Any]


class BatchWatch:
    """Looks at a batch now and then: the first one of every iteration, and one in ten seconds.

    An attribute of that one iterator takes the place of its method ``_next_data``; the next fetch removes it and hands on its
    batch. Any other fetch costs nothing, and no device is synchronised. ``examine(iterator, batch)`` is called in the breaker,
    for batches that :meth:`arm` or :meth:`arm_latest` has asked for.
    """

    def __init__(self, breaker: CircuitBreaker, examine: Callable[[Any, Any], None]) -> None:
        self._breaker, self._examine = breaker, examine
        self._latest: weakref.ref[Any] | None = None
        self._armed: weakref.WeakSet[Any] = weakref.WeakSet()

    def begun(self, iterator: Any, *, now: bool) -> None:
        """Keep a new iterator. ``now``: look at its first batch."""
        if hasattr(iterator, "_next_data"):
            self._latest = weakref.ref(iterator)
            if now:
                self.arm(iterator)

    def arm_latest(self) -> None:
        """Have the next batch of the latest iterator examined."""
        latest = self._latest
        iterator = latest() if latest is not None else None
        if iterator is not None:
            self.arm(iterator)

    def arm(self, iterator: Any) -> None:
        """Have the iterator's next batch examined."""
        if not hasattr(iterator, "_next_data") or "_next_data" in vars(iterator):
            return
        reference = weakref.ref(iterator)  # a strong reference would keep its workers alive
        self._armed.add(iterator)

        def next_data() -> Any:
            fetching: Any = reference()
            vars(fetching).pop("_next_data", None)
            batch = type(fetching)._next_data(fetching)
            call(self._breaker, self._examine, fetching, batch)
            return batch

        iterator._next_data = next_data

    def remove(self) -> None:
        """Restore the iterators."""
        self._latest = None
        for iterator in list(self._armed):
            vars(iterator).pop("_next_data", None)
        self._armed.clear()


class LoaderWorker(NamedTuple):
    """A worker process of a data loader that is being iterated."""

    number: int
    pid: int
    awaited: bool
    """whether the next batch is its"""

    @property
    def name(self) -> str:
        """As it is shown."""
        return f"worker {self.number} (pid {self.pid})"


def state_of(pid: int) -> str:
    """Return the activity of a worker's process, as far as it may be read: ``sleeping in futex_do_wait``.

    It may wait for a lock that was held at its fork, for a file system, or compute. Its state and the kernel's function where
    it waits are files (proc(5)), for which no privileges are needed; its stack is another process's to read.
    """
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return "unknown"
    channel = read(f"/proc/{pid}/wchan").strip()  # 0 where it may not be read
    return f"{state} in {channel}"[:_LONGEST] if channel not in {"", "0"} and state != psutil.STATUS_RUNNING else state


class LoaderProbe:
    """Watches loaders and their workers."""

    name = "loaders"

    def __init__(self, replicas: Replicas | None = None) -> None:
        self._replicas = replicas or Replicas()
        self._patches: list[Patch] = []
        self._import: MetaPathFinder | None = None
        self._pools: list[_Pool] = []
        self._started: weakref.WeakSet[Any] = weakref.WeakSet()
        self._rounds = 0
        self._checking = Lock()
        renew_in_child(self, _checking=Lock)
        self._batches: BatchWatch | None = None

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        from torch.utils.data import DataLoader

        self._context, self._breaker = context, context.breaker(self.name)
        for metric in (catalog.DATA_WORKER_START_TIME, catalog.DATA_WORKERS_DIED):
            context.count(metric, 0)
        self._infers = context.settings.infer_throughput
        self._batches, self._replica_batches = BatchWatch(self._breaker, self._examine), ReplicaBatches(context, self._replicas)
        context.hooks.loader_workers.register(self._breaker, self._workers)
        self._watch(DataLoader)
        # it overrides __iter__ without calling DataLoader's
        self._import = after_import(STATEFUL, lambda: self._watch(sys.modules[STATEFUL].StatefulDataLoader))

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        cancel(self._import)
        for patch in self._patches:
            patch.undo()
        if self._batches is not None:
            self._batches.remove()
            self._context.recorder.forget_sizes()
        self.sample()  # a worker that has just died may have ended the run
        self._check_workers()

    def _watch(self, loader: Any) -> None:
        self._patches.append(Patch(loader, "__iter__", self._watched, probe=self.name))

    def _watched(self, original: Any) -> Any:
        training, recorder, breaker = self._context.training, self._context.recorder, self._breaker
        mark, begun = breaker.guard(recorder.mark), breaker.guard(self._begun)

        @functools.wraps(original)
        def watched(loader: Any) -> Any:
            if breaker.is_open or get_ident() != training.thread or recorder.in_fetch():
                return original(loader)
            begun_ns = monotonic_ns()
            mark(LOADER_STARTS, begun_ns)
            try:
                iterator = original(loader)
            finally:
                mark(STEP_ENDS, monotonic_ns())
            begun(loader, iterator, begun_ns)
            return iterator

        return watched

    def _begun(self, loader: Any, iterator: Any, begun_ns: int) -> None:
        if self._batches is not None:
            self._batches.begun(iterator, now=self._infers_now() or self._replica_batches.wants())
        workers = getattr(iterator, "_workers", None)
        if workers and iterator not in self._started:  # persistent workers are started once
            self._started.add(iterator)
            self._pools.append(_Pool(weakref.ref(iterator), list(workers)))
            self._context.count(catalog.DATA_WORKER_START_TIME, (monotonic_ns() - begun_ns) / 1e9)
        self._context.hooks.iterated.notify(loader, iterator)

    def sample(self) -> None:
        """Update the number of ready batches; check the workers once a second."""
        if not self._pools:
            return
        ready = next((count for pool in self._pools[::-1] if (count := _ready(pool.iterator())) is not None), nan)
        self._context.set_gauge(catalog.DATA_BATCHES_READY, ready)
        self._rounds += 1
        if not self._rounds % _ROUNDS:
            self._check_workers()

    def _workers(self) -> list[LoaderWorker]:
        """Return the living workers of iterators in use; first those that the next batch is expected from."""
        workers: list[LoaderWorker] = []
        for iterator in [pool.iterator() for pool in self._pools.copy()]:
            if iterator is not None and not iterator._shutdown:
                awaited = _awaited(iterator)
                alive = [(index, worker.pid) for index, worker in enumerate(iterator._workers) if exit_code(worker) is None]
                workers += [LoaderWorker(index, pid, index == awaited) for index, pid in alive]
        return sorted(workers, key=lambda worker: not worker.awaited)

    def observe(self) -> None:
        """Look at a batch."""
        if self._batches is not None and self._infers_now():
            self._batches.arm_latest()

    def _infers_now(self) -> bool:
        """Return whether sizes of batches are inferred because the script does not give them."""
        return self._infers and len(self._context.recorder.logged) < 2  # noqa: PLR2004  # tokens, samples

    def _examine(self, iterator: Any, batch: Any) -> None:
        """Record the features that distinguish a batch from others, and infer its sizes. In the thread that fetches it."""
        if self._replica_batches.observe_batch(iterator, batch) and self._batches is not None:
            self._batches.arm(iterator)
        if self._infers_now():
            # the id that the data probe records for fetches
            self._context.recorder.learn_sizes(id(getattr(iterator, "_index_sampler", None)), *batch_sizes(batch))

    def _check_workers(self) -> None:
        """Count the workers, and those that died."""
        if self._pools and self._checking.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._checking.release()

    def _count(self) -> None:
        configured = alive = 0
        for pool in self._pools.copy():
            iterator = pool.iterator()
            leaving = iterator is None or iterator._shutdown
            for worker in list(pool.workers):
                if (code := exit_code(worker)) is not None:
                    pool.workers.remove(worker)
                    self._report_exit(worker.pid, code, leaving=leaving)
            if iterator is not None and not leaving:
                alive += len(pool.workers)
                configured += iterator._num_workers
            elif not pool.workers and iterator is None:
                self._pools.remove(pool)
        self._context.set_gauge(catalog.DATA_WORKERS, configured, {"state": "configured"})
        self._context.set_gauge(catalog.DATA_WORKERS, alive, {"state": "alive"})

    def _report_exit(self, pid: int, code: int, *, leaving: bool) -> None:
        """Record a worker's failure. A loader that shuts down terminates slow workers; other signals are not its own."""
        if code == 0 or (leaving and code == -signal.SIGTERM):
            return
        self._context.count(catalog.DATA_WORKERS_DIED, 1)
        attributes: dict[str, object] = {"pid": pid, "code": max(code, 0)}
        if code < 0:
            attributes["signal"] = error_guard.name(-code)
        self._context.event(catalog.EVENT_WORKER_DIED, attributes)


def exit_code(worker: Any) -> int | None:
    """Return a process's exit code, negative for a signal, like ``Process.exitcode``; ``None`` while it runs.

    That property reaps the process: then torch's own handler of SIGCHLD would find nothing, and not notify the training loop
    that a worker was killed. Where that cannot be avoided (forkserver, macOS), the code is known once its parent has reaped it.
    """
    popen = worker._popen
    if popen is None or popen.returncode is not None or not hasattr(os, "waitid"):
        return getattr(popen, "returncode", 0)
    with suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return int(ended.si_status) if ended.si_code == os.CLD_EXITED else -int(ended.si_status)
    return None


def _awaited(iterator: Any) -> int | None:
    """Return the index of the worker that the next batch is expected of; ``None`` if it is there, or may be anybody's."""
    task = iterator._task_info.get(iterator._rcvd_idx) if getattr(iterator, "_in_order", True) else None
    return task[0] if task is not None and len(task) == 1 else None


def _ready(iterator: Any) -> float | None:
    """Return the number of finished batches that the loop has not taken yet; ``None`` if unknown."""
    if iterator is None or iterator._shutdown:
        return None
    ahead = sum(1 for task in list(iterator._task_info.values()) if len(task) > 1)  # arrived out of order
    try:
        return float(iterator._data_queue.qsize() + ahead)
    except NotImplementedError:  # macOS cannot return the length of a multiprocessing queue
        return None
