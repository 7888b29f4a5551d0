"""Stacks of all threads on request, while Python's lock is free: 17 µs in the sampler thread, without locals or values."""

from __future__ import annotations

import faulthandler
import os
import threading
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight import evidence
from torchobs.flight.evidence import STACKS, named

if TYPE_CHECKING:
    from torchobs.probes.host import Host


def write_stacks(host: Host, number: int) -> None:
    """Write them down as the evidence of that number. Raises ``OSError`` when there is no room."""
    writer, place = host.writer, host.writer.place
    if place is None:
        return
    done = named(writer.name, STACKS, number)
    temporary, fd = evidence.create_unfinished(place)
    try:
        os.write(fd, _head(host).encode())
        faulthandler.dump_traceback(file=fd, all_threads=True)
        os.ftruncate(fd, min(os.fstat(fd).st_size, evidence.LIMITS[STACKS]))
    except OSError:
        evidence.remove(place, temporary)
        raise
    finally:
        os.close(fd)
    evidence.finish(place, temporary, done)
    writer.event(catalog.EVENT_STACKS.name, {"cause": "asked", "evidence": done.id}, host.cycle.step)


def _head(host: Host) -> str:
    """Return what ``faulthandler`` does not say: whose stacks these are, when, and what the threads are called."""
    threads = "".join(f"# Thread 0x{thread.ident or 0:016x} is {thread.name!r}\n" for thread in threading.enumerate())
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return f"# rank {host.writer.header.resource.get('rank', 0)} after step {host.cycle.step}, {now}\n{threads}\n"
