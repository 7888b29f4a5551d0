"""The flight directory as readers see it: opened, checked and listed; reopened when replaced, awaited when missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.flight.files.location import KUBERNETES_MOUNT, find_existing, open_directory
from torchobs.flight.reader import reader

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig

_SETTLED_NS = 1_000_000_000
"""Age from which a ctime is trusted: it has the resolution of a clock tick, and a younger one may hide a later change."""

_LIST_ANYWAY = 30
"""Scans after which the names are read again regardless of ctime: a wall clock that jumps could repeat one."""


class ForeignDirectoryError(OSError):
    """The directory belongs to another user, and this process is root."""


def accepted_owner(config: ExporterConfig, path: str, uid: int) -> int | None:
    """Return the only uid whose files are read, or ``None`` for any.

    A pod's volume holds files of whatever uid the trainer has. Elsewhere root reads its own files only, and so does a node's
    exporter; another user may read what the file system lets it read.
    """
    if config.allow_foreign_owner or path == KUBERNETES_MOUNT:
        return None
    return uid if uid == 0 or config.mode == "node" else None


class Directory:
    """The present flight directory. ``fd`` is -1 while there is none."""

    def __init__(self, config: ExporterConfig, uid: int | None = None) -> None:
        self._config = config
        self._uid = os.geteuid() if uid is None else uid
        self.fd = -1
        self.path = ""
        self.owner: int | None = None
        self._names: list[str] = []
        self.left_out = 0
        """number of flight files beyond those that are listed"""
        self._listed_ns = -1
        self._scans = 0

    def names(self, wall_ns: int) -> list[str]:
        """Return the names of the flight files (``reader.list_names``). Raises ``OSError`` when there is no directory to read.

        A listing of 10^5 names takes 50 ms, so it is repeated only when the directory has changed.
        """
        self._open()
        changed_ns = os.fstat(self.fd).st_ctime_ns  # changes with mtime and with the permissions
        self._scans += 1
        settled = abs(wall_ns - changed_ns) > _SETTLED_NS
        if not settled or changed_ns != self._listed_ns or self._scans >= _LIST_ANYWAY:
            self._names, self.left_out = self._listed()
            self._listed_ns = changed_ns if settled else -1
            self._scans = 0
        return self._names

    def close(self) -> None:
        """Close the directory. Idempotent."""
        fd, self.fd = self.fd, -1
        self._listed_ns = -1
        if fd >= 0:
            os.close(fd)

    def _listed(self) -> reader.Names:
        try:
            return reader.list_names(self.fd)
        except OSError as problem:
            problem.filename = self.path
            raise

    def _open(self) -> None:
        path = find_existing(self._config.flight_dir, self._config.runtime_dir)
        if path is None:
            self.close()
            hint = "" if self._config.flight_dir else f" (in a pod: a volume at {KUBERNETES_MOUNT})"
            raise FileNotFoundError(f"{self._config.flight_dir or 'the flight directory'} is not there yet{hint}")
        if self.fd >= 0 and self._is_still(path):
            return
        self.close()
        fd = open_directory(path)
        status = os.fstat(fd)
        owner = accepted_owner(self._config, path, self._uid)
        if self._uid == 0 and owner == 0 and status.st_uid != 0:
            os.close(fd)
            msg = (
                f"{path} belongs to uid {status.st_uid} and this exporter is root, which needs --allow-foreign-owner to read it"
            )
            raise ForeignDirectoryError(msg)
        self.fd, self.path, self.owner = fd, path, owner

    def _is_still(self, path: str) -> bool:
        return path == self.path and os.path.samestat(Path(path).lstat(), os.fstat(self.fd))
