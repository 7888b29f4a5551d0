"""Memory cgroups that tests make."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import NEEDS_MEMORY_CGROUP, wait_until

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
