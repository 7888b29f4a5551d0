"""Where flight files go: a private directory, on tmpfs where there is one with room.

``TORCHOBS_DIR`` (or ``init(flight_dir=…)``), else the Kubernetes mount, else ``$XDG_RUNTIME_DIR``, else ``/dev/shm`` if it
has 1 GiB and a quarter of it free (a container's default is 64 MiB and shared with NCCL and DataLoader), else the temp
directory. NFS, Lustre and FUSE are refused: a store into their pages can block for as long as a server is away.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

KUBERNETES_MOUNT = "/var/run/torchobs/flight"
KUBERNETES_CONTROL = "/var/run/torchobs/control"
_REFUSED = ("nfs", "nfs4", "lustre", "fuse", "cifs", "smb3", "9p", "ceph", "gpfs", "beegfs", "glusterfs", "afs", "virtiofs")
_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


class NoPlaceError(OSError):
    """No directory for the flight file can be had; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """An opened directory. ``shared``: a volume of a pod (fsGroup), whose files the sidecar's user reads by group."""

    path: str
    fd: int
    in_memory: bool
    shared: bool


def candidates(flight_dir: str | None, runtime_dir: str | None) -> list[str]:
    """Return the directories to try, best first; only ``flight_dir`` when it was given."""
    if flight_dir:
        return [flight_dir]
    if Path(KUBERNETES_MOUNT).is_dir():
        return [KUBERNETES_MOUNT]
    own = f"torchobs-{os.getuid()}"
    found = []
    if runtime_dir and _is_mine(runtime_dir):
        found.append(str(Path(runtime_dir) / "torchobs"))
    if _roomy("/dev/shm"):  # noqa: S108  # tmpfs by design; the directory below it is ours alone
        found.append(f"/dev/shm/{own}")  # noqa: S108  # as above
    return [*found, str(Path(tempfile.gettempdir()) / own)]


def open_place(flight_dir: str | None, runtime_dir: str | None) -> Place:
    """Open the best directory, made 0700 if it is not there. Raises :class:`NoPlaceError`."""
    problems = []
    for path in candidates(flight_dir, runtime_dir):
        try:
            return _open(path, given=flight_dir is not None)
        except OSError as problem:
            problems.append(f"{path}: {problem.strerror or problem}")
    msg = f"no directory for the flight file: {'; '.join(problems)}. Set TORCHOBS_DIR to a local directory of your own"
    raise NoPlaceError(msg)


def find_existing(flight_dir: str | None, runtime_dir: str | None) -> str | None:
    """Return the directory that trainers of this user would use, for readers; ``None`` if none is there yet."""
    return next((path for path in candidates(flight_dir, runtime_dir) if Path(path).is_dir()), None)


def open_directory(path: str) -> int:
    """Open a directory for reading its flight files; a symbolic link is refused. Raises ``OSError``."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _open(path: str, *, given: bool) -> Place:
    shared = path == KUBERNETES_MOUNT
    if given:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    elif not shared:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)  # noqa: PTH102  # as os.open below: no parents, the mode as it is
    fd = open_directory(path)
    try:
        status = os.fstat(fd)
        foreign = status.st_uid != os.getuid() or bool(stat.S_IMODE(status.st_mode) & 0o077)
        if foreign and not given and not shared:
            os.close(fd)
            return _open_fresh(path)
        kind = filesystem_type(_mountinfo(), os.path.realpath(path))
        if kind.partition(".")[0] in _REFUSED:
            msg = f"{kind} is a network or FUSE file system, on which a training step could block"
            raise NoPlaceError(msg)
    except OSError:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    # A directory that was given is taken as it is (a pod's volume belongs to root, its mode is 3777); ours alone is 0700.
    return Place(path, fd, kind in _MEMORY, shared or foreign)


def _open_fresh(path: str) -> Place:
    """Open a directory beside one that another user could have prepared for us."""
    fresh = f"{path}-{token_hex(8)}"
    os.mkdir(fresh, 0o700)  # noqa: PTH102  # see _open
    return _open(fresh, given=False)


def _is_mine(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _roomy(path: str) -> bool:
    try:
        usage = os.statvfs(path)
    except OSError:
        return False
    return usage.f_blocks * usage.f_frsize >= 1 << 30 and usage.f_bavail * 4 >= usage.f_blocks


def _mountinfo() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""  # not Linux


def filesystem_type(mountinfo: str, path: str) -> str:
    """Return the type of the file system that ``path`` (resolved) is on, from the text of ``/proc/self/mountinfo``; "" if unknown."""
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        fields = line.split()
        if "-" not in fields[6:]:
            continue
        mount = fields[4].replace("\\040", " ")
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:  # the last of equals is mounted over the others
            best, kind = len(mount), fields[fields.index("-", 6) + 1]
    return kind
