"""Assigns each GPU to one rank: the first to lock its byte of a file that all ranks of the node share.

Ranks often see every GPU of the node (torchrun) and sometimes only their own (Slurm's ``--gpus-per-task``), and a rank cannot
tell which. The kernel releases the lock of a rank that dies, so another one takes over. POSIX locks: see
:mod:`torchobs.flight.files.lock`.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from zlib import crc32


class GpuOwnership:
    """GPUs that this process owns in one run, until :meth:`close`."""

    def __init__(self, directory: str, run_id: str) -> None:
        """``directory``: of the flight files; the lock file is created on the first :meth:`take`."""
        self._path = Path(directory) / f"gpus-{os.getuid()}.lock"
        self._run_id = run_id
        self._fd: int | None = None

    def take(self, uuid: str) -> bool:
        """Return True if this process owns the device now. Without a lock file it owns every device."""
        fd = self._fd = self._open() if self._fd is None else self._fd
        if fd is None:
            return True
        byte = crc32(f"{self._run_id}/{uuid}".encode())  # on a collision, 1 in 2^32, one of the GPUs is not sampled
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Release all locks. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _open(self) -> int | None:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
