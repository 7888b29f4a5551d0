"""Writes the stacks of all threads, on request or early in a stall, when the GIL is free.

17 µs in the sampler thread; no locals or values.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from datetime import datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.files import artifacts
from torchobs.flight.files.artifacts import END, LIMITS, STACKS, named
from torchobs.flight.files.headroom import shortage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchobs.flight.files.artifacts import ArtifactName
    from torchobs.flight.files.location import FlightDirectory
    from torchobs.probes.core.context import ProbeContext

MIN_FREE = 64 << 10
"""Bytes that must be free; the stacks of a hundred threads, ``faulthandler``'s limit, take less."""


def write_stacks(
    context: ProbeContext, number: int, cause: str = "asked", more: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Write the stacks as the artifact of that number; on failure, an event and the log say why.

    ``cause``, ``more``: attributes of the event. Only who has asked for them is told of a failure in the log.
    """
    writer, place = context.writer, context.writer.place
    if place is None:
        return
    done = named(writer.name, STACKS, number)
    refused = _write(context, place, done)
    event = catalog.EVENT_STACKS if refused is None else catalog.EVENT_STACKS_FAILED
    attributes = {"cause": cause, **(more if refused is None else refused), "evidence": done.id}
    context.event(event, attributes)
    if refused is not None and cause == "asked":
        context.warn_limited("stacks", f"stacks could not be written to {place.path}: {refused['detail']}", own=True)


def _write(context: ProbeContext, place: FlightDirectory, done: ArtifactName) -> dict[str, str] | None:
    """Write the artifact; on failure, return the event's attributes that say why."""
    if (lack := shortage(place.fd, MIN_FREE)) is not None:
        return {"reason": "no_room", "detail": lack}
    try:
        with artifacts.new(place, done) as fd:
            _write_content(fd, _header(context).encode())
    except OSError as problem:
        return artifacts.refusal(problem)
    return None


def _write_content(fd: int, header: bytes) -> None:
    """Write header, stacks and end marker. Raises ``OSError``."""
    artifacts.append(fd, header)
    faulthandler.dump_traceback(file=fd, all_threads=True)
    os.ftruncate(fd, min(os.fstat(fd).st_size, LIMITS[STACKS] - len(END)))
    artifacts.append(fd, END)


def _header(context: ProbeContext) -> str:
    """Return what ``faulthandler`` does not write: rank, step, time and thread names."""
    threads = "".join(f"# Thread 0x{thread.ident or 0:016x} is {thread.name!r}\n" for thread in threading.enumerate())
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return f"# rank {context.writer.header.resource.get('rank', 0)} after step {context.recorder.step}, {now}\n{threads}\n"
