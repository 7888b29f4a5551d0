"""Stacks of all threads on request, while Python's lock is free: 17 µs in the sampler thread, without locals or values."""

from __future__ import annotations

import faulthandler
import os
import threading
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.files import artifacts
from torchobs.flight.files.artifacts import END, LIMITS, STACKS, named
from torchobs.flight.files.headroom import shortage

if TYPE_CHECKING:
    from torchobs.flight.files.artifacts import ArtifactName
    from torchobs.flight.files.location import FlightDirectory
    from torchobs.probes.core.context import ProbeContext

ROOM = 64 << 10
"""Bytes that must be free: of a hundred threads, which is all that ``faulthandler`` shows, it takes less."""


def write_stacks(context: ProbeContext, number: int) -> None:
    """Write them down as the evidence of that number; where that cannot be done, an event and the log say why."""
    writer, place = context.writer, context.writer.place
    if place is None:
        return
    done = named(writer.name, STACKS, number)
    refused = _write(context, place, done)
    event = catalog.EVENT_STACKS if refused is None else catalog.EVENT_STACKS_FAILED
    writer.event(event.name, {"cause": "asked", **(refused or {}), "evidence": done.id}, context.recorder.step)
    if refused is not None and context.warn_limited is not None:
        context.warn_limited("stacks", f"stacks could not be written to {place.path}: {refused['detail']}", own=True)


def _write(context: ProbeContext, place: FlightDirectory, done: ArtifactName) -> dict[str, str] | None:
    """Return why there are none, as an event's attributes."""
    if (lack := shortage(place.fd, ROOM)) is not None:
        return {"reason": "no_room", "detail": lack}
    temporary = None
    try:
        temporary, fd = artifacts.create_unfinished(place)
        try:
            _fill(fd, _head(context).encode())
        finally:
            os.close(fd)
        artifacts.finish(place, temporary, done)
    except OSError as problem:
        if temporary is not None:
            artifacts.remove(place, temporary)
        return artifacts.refusal(problem)
    return None


def _fill(fd: int, head: bytes) -> None:
    """Write it all, to its last line. Raises ``OSError``."""
    artifacts.append(fd, head)
    faulthandler.dump_traceback(file=fd, all_threads=True)
    os.ftruncate(fd, min(os.fstat(fd).st_size, LIMITS[STACKS] - len(END)))
    artifacts.append(fd, END)


def _head(context: ProbeContext) -> str:
    """Return what ``faulthandler`` does not say: whose stacks these are, when, and what the threads are called."""
    threads = "".join(f"# Thread 0x{thread.ident or 0:016x} is {thread.name!r}\n" for thread in threading.enumerate())
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return f"# rank {context.writer.header.resource.get('rank', 0)} after step {context.recorder.step}, {now}\n{threads}\n"
