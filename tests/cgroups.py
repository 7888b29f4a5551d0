"""Memory cgroups that tests make, and a session that sees a small tmpfs being filled.

`python -m tests.cgroups FLIGHT_DIRECTORY TMPFS` prints what it says of it, a JSON list of `[size, used, events]`, one for each
filling.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import torchobs
from tests import flights
from tests.support import NEEDS_MEMORY_CGROUP, wait_until
from tests.training import Recording
from torchobs import catalog
from torchobs.flight import reader
from torchobs.probes.process_memory import MemoryProbe

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A memory cgroup with a limit in bytes and no swap; skips the test where none may be made."""
    v1 = Path("/sys/fs/cgroup/memory")
    root = v1 if v1.is_dir() else Path("/sys/fs/cgroup")
    path = root / f"torchobs-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(limit))
    except OSError:
        if path.is_dir():
            path.rmdir()
        pytest.skip(NEEDS_MEMORY_CGROUP)
    with contextlib.suppress(OSError):  # a kernel that does not count swap has no such file
        swap = ("memory.memsw.limit_in_bytes", str(limit)) if v1.is_dir() else ("memory.swap.max", "0")
        (path / swap[0]).write_text(swap[1])
    yield path
    wait_until(lambda: _gone(path))


def inside(cgroup: Path) -> tuple[str, ...]:
    """The prefix of a command that runs in that cgroup."""
    return ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh")


def _gone(path: Path) -> bool:
    with contextlib.suppress(OSError):  # its last process is being torn down
        path.rmdir()
    return not path.exists()


MIB = 1024**2

if __name__ == "__main__":
    session = torchobs.init(flight_dir=sys.argv[1], disable_probes="memory")
    writer, context, told = session.writer, session.context, []
    assert writer is not None
    assert context is not None
    probe = MemoryProbe(shared=sys.argv[2])
    probe.install(context)
    for filled in (0.0, 3.0, 3.75, 3.875, 3.5, 2.0, 3.75):
        (Path(sys.argv[2]) / "x").write_bytes(bytes(int(filled * MIB)))
        probe.observe()
        writer.publish()
        values = Recording(session).values()
        file = reader.open_path(writer.path)
        events = [1 for fields in flights.frames(file) if fields.get("name") == catalog.EVENT_SHARED_MEMORY_FULL.name]
        file.close()
        told.append((values[catalog.MEMORY_SHARED_SIZE.name,], values[catalog.MEMORY_SHARED_USED.name,], len(events)))
    sys.stdout.write(json.dumps(told))
