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

from torchobs.support.descriptors import Descriptor


class GpuOwnership:
    """GPUs that this process owns in one run, until :meth:`close`."""

    def __init__(self, directory: str, run_id: str) -> None:
        """``directory``: of the flight files; the lock file is created on the first :meth:`take`."""
        self._path = Path(directory).absolute() / f"gpus-{os.getuid()}.lock"
        self._run_id = run_id
        self._file: Descriptor | None = None
        self._owned: set[str] = set()

    def take(self, uuid: str) -> bool:
        """Return True if this process owns the device now. Without a lock file it owns every device."""
        file = self._file = self._open() if self._file is None else self._file
        if file is None:
            return True
        byte = crc32(f"{self._run_id}/{uuid}".encode())  # on a collision, 1 in 2^32, one of the GPUs is not sampled
        try:
            fcntl.lockf(file.number(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        self._owned.add(uuid)
        return True

    def restore(self) -> set[str]:
        """Lock all again if the program has closed the file; return the devices that another process has locked meanwhile."""
        try:
            lost = self._file is not None and self._file.restore()
        except OSError:
            self._file, lost = None, True  # deleted, and made anew by the next one
        left = {uuid for uuid in self._owned if not self.take(uuid)} if lost else set()
        self._owned -= left
        return left

    def close(self) -> None:
        """Release all locks. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> Descriptor | None:
        try:
            return Descriptor("locks of GPUs", str(self._path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError:
            return None
