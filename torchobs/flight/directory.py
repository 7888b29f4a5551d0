"""Choice of the directory for flight files: private, and on tmpfs where there is one with room.

``TORCHOBS_DIR`` (or ``init(flight_dir=…)``), else the Kubernetes mount, else ``$XDG_RUNTIME_DIR``, else ``/dev/shm`` if it
has 1 GiB, a quarter of it free (a container's default is 64 MiB and shared with NCCL and DataLoader), else the temp
directory. NFS, Lustre and FUSE are refused: a store into their pages can block for as long as a server is away.

In a world-writable directory another user may have taken our name, or put a symbolic link there: that one is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchobs.support import cgroup
from torchobs.support.descriptors import Descriptor

KUBERNETES_MOUNT = "/var/run/torchobs/flight"
KUBERNETES_CONTROL = "/var/run/torchobs/control"
NETWORK = frozenset(
    {
        *("nfs", "nfs4", "lustre", "fuse", "cifs", "smb3", "9p", "ceph", "gpfs", "beegfs", "glusterfs", "afs", "virtiofs"),
        *("orangefs", "panfs", "pvfs2", "wekafs"),
    }
)
"""File systems on which a step could block; other FUSE types begin with ``fuse.``."""
_MEMORY = ("tmpfs", "ramfs")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class NoPlaceError(OSError):
    """No directory for the flight file is usable; the message has a remedy.

    ``of_one_rank``: the other ranks of this node may still have one.
    """

    def __init__(self, message: str, *, of_one_rank: bool = False) -> None:
        super().__init__(message)
        self.of_one_rank = of_one_rank


def remedy(problem: OSError) -> str:
    """Return the advice to a user where a flight file cannot be written."""
    do = {
        **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable for this user"),
        **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    }.get(problem.errno or 0, "make room there")
    return f"{do}, or set TORCHOBS_DIR to a local directory of your own"


@dataclass(frozen=True, slots=True)
class FlightDirectory:
    """An opened directory. ``shared``: a volume of a pod (fsGroup), where the sidecar's user reads files by group."""

    path: str
    directory: Descriptor
    in_memory: bool
    shared: bool
    configured: bool = False
    """set by the user or by Kubernetes: accepted whatever its owner and mode"""

    @property
    def fd(self) -> int:
        """Its descriptor, right before its use. Raises ``OSError`` where the program has closed it and it is not there."""
        return self.directory.number()

    def is_there(self) -> bool:
        """Return whether the directory still exists."""
        try:
            return os.fstat(self.fd).st_nlink > 0
        except OSError:
            return False

    @property
    def file_mode(self) -> int:
        """Mode of the files in it."""
        return 0o640 if self.shared else 0o600


def candidates(flight_dir: str | None, runtime_dir: str | None) -> list[str]:
    """Return the directories to try, best first; only ``flight_dir`` if set."""
    if flight_dir:
        return [flight_dir]
    if Path(KUBERNETES_MOUNT).is_dir():
        return [KUBERNETES_MOUNT]
    folder = f"torchobs-{os.getuid()}"
    paths = []
    if runtime_dir and _is_mine(runtime_dir):
        paths.append(str(Path(runtime_dir) / "torchobs"))
    if _roomy("/dev/shm"):  # noqa: S108  # tmpfs by design; the directory below it is ours alone
        paths.append(f"/dev/shm/{folder}")  # noqa: S108  # as above
    return [*paths, str(Path(_temporary()) / folder)]


def open_place(flight_dir: str | None, runtime_dir: str | None) -> FlightDirectory:
    """Open the best directory; create it with mode 0700 if missing. Raises :class:`NoPlaceError`."""
    problems = []
    for path in candidates(flight_dir, runtime_dir):
        try:
            return _open(path, configured=_is_configured(path, flight_dir))
        except OSError as problem:
            problems.append(f"{path}: {problem.strerror or problem}")
    msg = f"no directory for the flight file: {'; '.join(problems)}. Set TORCHOBS_DIR to a local directory of your own"
    raise NoPlaceError(msg)


def renew(place: FlightDirectory) -> None:
    """Recreate a deleted directory and open it in place of the deleted one. Raises ``OSError``."""
    place.directory.replace(_open(place.path, configured=place.configured).directory)


def find_existing(flight_dir: str | None, runtime_dir: str | None) -> str | None:
    """Return the existing directory that trainers of this user would choose, for readers; ``None`` if there is none."""
    for path in candidates(flight_dir, runtime_dir):
        if _is_configured(path, flight_dir):
            return path if Path(path).is_dir() else None
        if _is_private(path):
            return path
    return None


def control_directory(chosen: str | None, flight_dir: str) -> str:
    """Return the directory of control files: as set, or the pod's control volume, or a subdirectory of the flight directory."""
    if chosen is not None:
        return chosen
    return KUBERNETES_CONTROL if flight_dir == KUBERNETES_MOUNT else str(Path(flight_dir) / "control")


def open_directory(path: str) -> int:
    """Open a directory for reading its flight files; a symbolic link is refused. Raises ``OSError``."""
    return os.open(path, _DIRECTORY | os.O_CLOEXEC)


@contextlib.contextmanager
def opened(path: str | Path, *, link: bool = False) -> Iterator[int]:
    """Open a directory in a ``with`` block; a symbolic link is refused, unless with ``link``. Raises ``OSError``."""
    flags = os.O_RDONLY | os.O_DIRECTORY if link else _DIRECTORY
    with contextlib.closing(Descriptor("", str(path), flags)) as directory:
        yield directory.number()


def mount_of(path: str, mounts: str | None = None) -> tuple[str, str]:
    """Return mount point and type of the file system that a resolved path is on; empty if unknown.

    By the mounts of this process (the text of ``/proc/self/mountinfo``): without access to the path, as its server may be dead.
    """
    point, kind = "", ""
    for line in (cgroup.read("/proc/self/mountinfo") if mounts is None else mounts).splitlines():
        fields = line.split(" ")
        if "-" not in fields[6:-1]:
            continue
        mount = cgroup.unescaped(fields[4])
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(point):  # of equal mount points the last one is on top
            point, kind = mount, fields[fields.index("-", 6) + 1]
    return point, kind


def in_memory(path: str | Path) -> bool:
    """Return whether files there are in memory, so that stores into a mapped one survive the process's end."""
    return mount_of(os.path.realpath(path))[1] in _MEMORY


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return "/tmp"  # noqa: S108  # no usable temporary directory (read-only root): opening this one raises an error with a known path


def _is_configured(path: str, flight_dir: str | None) -> bool:
    return bool(flight_dir) or path == KUBERNETES_MOUNT


def _open(path: str, *, configured: bool) -> FlightDirectory:
    if path != KUBERNETES_MOUNT:
        _make(path, parents=configured)
    lasting = str(Path(path).absolute())  # the script may go to another directory
    directory = Descriptor("flight directory", lasting, _DIRECTORY)
    try:
        status = os.fstat(directory.number())
        kind = _check(path, status, configured=configured)
    except OSError:
        directory.close()
        raise
    # A directory that was set is accepted as it is (a pod's volume belongs to root with mode 3777); a default one is 0700.
    shared = path == KUBERNETES_MOUNT or status.st_uid != os.getuid() or bool(status.st_mode & stat.S_ISGID)
    return FlightDirectory(lasting, directory, kind in _MEMORY, shared, configured)


def _make(path: str, *, parents: bool) -> None:
    if parents:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def _check(path: str, status: os.stat_result, *, configured: bool) -> str:
    """Return the type of the file system. Raises :class:`NoPlaceError` for a directory that must not be used."""
    if not configured and not _is_ours_alone(status):
        raise NoPlaceError("belongs to another user, or others may use it")
    kind = mount_of(os.path.realpath(path))[1]
    if kind.partition(".")[0] in NETWORK:
        msg = f"{kind} is a network or FUSE file system, on which a training step could block"
        raise NoPlaceError(msg)
    return kind


def _is_ours_alone(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077


def _is_private(path: str) -> bool:
    try:
        return _is_ours_alone(os.lstat(path))
    except OSError:
        return False


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
