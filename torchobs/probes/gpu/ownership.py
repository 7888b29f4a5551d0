"""Which rank samples which GPU: the first to lock its byte of a file that all of the node's ranks have.

Ranks often see every GPU of the node (torchrun) and sometimes only their own (Slurm's ``--gpus-per-task``), and a rank cannot
tell which. The kernel drops the lock of a rank that dies, so that another one goes on. POSIX locks: see ``flight.files.lock``.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from zlib import crc32


class GpuOwnership:
    """What this process has claimed of one run, until :meth:`close`."""

    def __init__(self, directory: str, run_id: str) -> None:
        """``directory`` is that of the flight files; the file is made when something is claimed."""
        self._path = Path(directory) / f"gpus-{os.getuid()}.lock"
        self._run_id = run_id
        self._fd: int | None = None

    def take(self, uuid: str) -> bool:
        """Return True if the device is ours from now on. Where the file cannot be had, everything is."""
        fd = self._fd = self._open() if self._fd is None else self._fd
        if fd is None:
            return True
        byte = crc32(f"{self._run_id}/{uuid}".encode())  # two GPUs that share one in 2^32: one of them goes unsampled
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _open(self) -> int | None:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
