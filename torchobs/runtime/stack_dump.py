"""Writes the stacks of all threads, on request or early in a stall, when the GIL is free.

17 µs in the sampler thread, and some 30 µs for each worker of a data loader; no locals or values.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from datetime import datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.files import artifacts
from torchobs.flight.files.artifacts import END, LIMITS, STACKS, named
from torchobs.flight.files.create import shortage
from torchobs.probes.data.worker_states import state_of
from torchobs.runtime import worker_stacks
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchobs.flight.files.artifacts import ArtifactName
    from torchobs.flight.files.location import FlightDirectory
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.data.worker_states import LoaderWorker
    from torchobs.support.descriptors import Descriptor

_MAX_WORKERS = 8
MIN_FREE = 64 << 10
"""Bytes that must be free; the stacks of a hundred threads, ``faulthandler``'s limit, take less."""


def write_stacks(
    context: ProbeContext, number: int, cause: str = "asked", more: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Write the stacks as the artifact of that number; on failure, an event and the log say why.

    ``cause``, ``more``: attributes of the event. Only who has asked for them is told of a failure in the log. Stacks of a data
    loader's workers take seconds to get: who asks waits for them, others' are added later.
    """
    writer, place = context.writer, context.writer.place
    if place is None:
        return
    workers = [worker for find in context.loader_workers for worker in find()][:_MAX_WORKERS]
    dump = _Dump(context, place, named(writer.name, STACKS, number), cause, more, workers)
    if not workers or cause != "asked":
        dump.write()
    if workers:
        thread = threading.Thread(target=dump.write_workers, name="torchobs-stacks", daemon=True)
        call(CircuitBreaker("stacks"), thread.start)


class _Dump:
    """One artifact."""

    def __init__(
        self, context: ProbeContext, place: FlightDirectory, evidence: ArtifactName, cause: str,
        more: Mapping[str, object], workers: Sequence[LoaderWorker],
    ) -> None:  # fmt: skip
        self._context, self._place, self._evidence, self._cause = context, place, evidence, cause
        self._workers = workers
        self._states = [f"{worker.name}: {state_of(worker.pid)}" for worker in workers]
        awaited = [worker.name for worker in workers[:1] if worker.awaited]
        self._more = {**more, **({"workers": self._states} if workers else {}), **({"awaited": awaited[0]} if awaited else {})}

    def write(self, stacks: str = "") -> None:
        """Write it, with the workers' ``stacks``, and record an event."""
        context, evidence, cause = self._context, self._evidence, self._cause
        refused = _write(context, self._place, evidence, self._states, stacks)
        event = catalog.EVENT_STACKS if refused is None else catalog.EVENT_STACKS_FAILED
        attributes = {"cause": cause, **(self._more if refused is None else refused), "evidence": evidence.id}
        context.event(event, attributes)
        if refused is not None and cause == "asked":
            context.warn_limited("stacks", f"stacks could not be written to {self._place.path}: {refused['detail']}", own=True)

    def write_workers(self) -> None:
        """Write it, or add to it, with the workers' stacks. In a thread of its own."""
        call(CircuitBreaker("stacks"), self._write_workers)

    def _write_workers(self) -> None:
        stacks = worker_stacks.stacks(self._workers)
        if self._cause == "asked":
            self.write(stacks)
        elif stacks and shortage(self._place.fd, MIN_FREE) is None:
            with contextlib.suppress(OSError):  # a disk that is full, or a run that has ended: what is written stays
                artifacts.extend(self._place, self._evidence, f"\n{stacks}".encode())


def _write(
    context: ProbeContext, place: FlightDirectory, done: ArtifactName, states: Sequence[str], stacks: str
) -> dict[str, str] | None:
    """Write the artifact; on failure, return the event's attributes that say why."""
    if (lack := shortage(place.fd, MIN_FREE)) is not None:
        return {"reason": "no_room", "detail": lack}
    try:
        with artifacts.new(place, done) as file:
            _write_content(file, _header(context, states).encode(), f"\n{stacks}".encode() if stacks else b"")
    except OSError as problem:
        return artifacts.refusal(problem)
    return None


def _write_content(file: Descriptor, header: bytes, workers: bytes) -> None:
    """Write header, stacks, those of ``workers``, and the end marker. Raises ``OSError``."""
    artifacts.append(file, header)
    faulthandler.dump_traceback(file=file.number(), all_threads=True)
    size = os.fstat(file.number()).st_size
    os.ftruncate(file.number(), min(size, LIMITS[STACKS] - len(END) - len(workers)))
    artifacts.append(file, workers)
    artifacts.append(file, END)


def _header(context: ProbeContext, states: Sequence[str]) -> str:
    """Return what ``faulthandler`` does not write: rank, step, time, names of threads, and the states of a loader's workers."""
    threads = "".join(f"# Thread 0x{thread.ident or 0:016x} is {thread.name!r}\n" for thread in threading.enumerate())
    workers = "".join(f"# {state}\n" for state in states)
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    rank = context.writer.header.resource.get("rank", 0)
    return f"# rank {rank} after step {context.recorder.step}, {now}\n{threads}{workers}\n"
