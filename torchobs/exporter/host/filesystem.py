"""File systems that hold what matters: room and inodes. Source: statvfs(3) and proc(5), /proc/self/mountinfo."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.exporter.exporter_metrics import Sample
from torchobs.exporter.host.tree import read

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOUNTINFO = "/proc/self/mountinfo"
"""Our own, whatever the tree is: statvfs follows a path in our own mount namespace."""
_ESCAPE = re.compile(r"\\([0-7]{3})", re.ASCII)


class Mount(NamedTuple):
    """Where a file system is mounted, and its type."""

    point: str
    kind: str


def mount_of(mountinfo: str, path: str) -> Mount | None:
    """Return what an absolute path without links is on; ``None`` if the text of /proc/self/mountinfo does not say."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if "-" not in fields[6:-1]:
            continue
        point = _ESCAPE.sub(lambda escape: chr(int(escape[1], 8)), fields[4])
        inside = path == point or path.startswith(f"{point.rstrip('/')}/")
        if inside and (best is None or len(point) >= len(best.point)):  # the last of equals is mounted over the others
            best = Mount(point, fields[fields.index("-", 6) + 1])
    return best


def mountpoint(path: str) -> str:
    """Return the mount point that a path seems to be on, without asking the file system, which may not answer."""
    try:
        found = mount_of(read(_MOUNTINFO), os.path.abspath(path))
    except OSError:
        return ""
    return found.point if found else ""


def said(mount: Mount, status: os.statvfs_result) -> Iterator[Sample]:
    """Yield what there is to say of a file system. Space that only root may use is reserved."""
    own = {catalog.MOUNTPOINT.name: mount.point, catalog.FILESYSTEM_TYPE.name: mount.kind}
    size, free, available = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bfree, status.f_bavail))
    yield Sample(catalog.SYSTEM_FILESYSTEM_LIMIT, own, size)
    space = (max(0, size - free), available, max(0, free - available))
    for state, number in zip(catalog.FILESYSTEM_STATES, space, strict=True):
        yield Sample(catalog.SYSTEM_FILESYSTEM_USAGE, {**own, catalog.FILESYSTEM_STATE.name: state}, number)
    if status.f_files:  # 0 where inodes are made as they are needed
        inodes = (max(0, status.f_files - status.f_ffree), status.f_ffree)
        for state, number in zip(catalog.INODE_STATES, inodes, strict=True):
            yield Sample(catalog.SYSTEM_FILESYSTEM_INODES, {**own, catalog.INODE_STATE.name: state}, number)
    yield Sample(catalog.HOST_FILESYSTEM_READONLY, own, float(bool(status.f_flag & os.ST_RDONLY)))


def collect(path: str) -> Iterator[Sample]:
    """Yield what there is to say of the file system that a directory is on. Raises ``OSError``; may never return.

    A network file system whose server is gone answers no call, not even the one for the path: to be called where it can wait.
    """
    real = os.path.realpath(path, strict=True)
    status = os.statvfs(real)
    mount = mount_of(read(_MOUNTINFO), real)
    yield from said(mount or Mount("", ""), status)
