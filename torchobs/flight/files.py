"""The files of one rank: the flight file, created and named, its lock, and small files replaced as a whole.

**Creation**: is there room? → ``.tmp-random`` → allocate → header → lock → rename. So every published file is complete, and one
with a free lock is that of a dead writer. Room is checked first: in a full memory cgroup the allocation kills the trainer.

**Liveness**: a POSIX record lock on a sibling ``.lock`` file, which the kernel releases when the process ends. It is dropped by
ANY close of the locked file in its process, so this process must not open that file again (:func:`is_locked_here` checks that).
A program that closes our descriptor drops it, too: it is taken again within a round of the sampler, and a rank that beats is
alive meanwhile. It is not inherited by fork, unlike an OFD lock, which survives in forked workers. It is probed by ``F_GETLK``
through a read-only descriptor, which works across containers, users and PID namespaces.

A mutex makes check and open atomic: a thread that found the lock not held here, and opened the file after another thread
had taken it, would drop it by closing. It is reentrant, for a signal handler may check too; no training step takes it.

No symbolic link is followed and no FIFO or lease blocks, for others may be able to write to the directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import mmap
import os
import resource
import signal
import stat
import struct
import sys
import time
import weakref
from pickle import PickleBuffer
from secrets import token_bytes, token_hex
from threading import RLock
from typing import TYPE_CHECKING

from torchobs.config.identity import boot_id
from torchobs.flight.layout import Header, encode_header, plan
from torchobs.support.after_fork import renew_in_child
from torchobs.support.cgroup import Memory, memory_of, of_process
from torchobs.support.descriptors import Descriptor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchobs.flight.directory import FlightDirectory

SUFFIX, LOCK_SUFFIX = ".flight", ".lock"
HEADROOM = 16
"""Multiple of the file's size that must be free in the memory cgroup: allocation at its limit got the trainer OOM-killed."""
_PAGE = 4096
_MMAP = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for reading a file that another process wrote."""
TEMPORARY = ".tmp-"
"""Begin of a name that a file has until it is complete; the rest is random."""

_LINUX = sys.platform == "linux"
# struct flock: Linux 64-bit has type, whence, start, len, pid; macOS has start, len, pid, type, whence.
_FLOCK = struct.Struct("@hhqqi4x" if _LINUX else "@qqihh")
_locked: set[tuple[int, int]] = set()
_mutex = RLock()


class NoRoomError(OSError):
    """The file system or the memory cgroup lacks space for a flight file; the message names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class CreatedFile:
    """A published flight file: its map, its name in ``place``, and its lock, which stays open until the end."""

    place: FlightDirectory
    name: str
    inode: int
    header: Header
    map: memoryview
    lock: Descriptor


def new_header(resource: Mapping[str, str | int], size: int, *, in_memory: bool | None = None) -> Header:
    """Return the header of a new incarnation with the present times; ``size`` in bytes is rounded down to whole pages.

    Raises ``ValueError`` for a size out of range.
    """
    size -= size % _PAGE
    # wall clock before and after the monotonic one, averaged: a preemption in between would shift the offset
    before, monotonic_ns, after = time.time_ns(), time.monotonic_ns(), time.time_ns()
    wall_ns = (before + after) // 2
    return Header(
        size, token_bytes(16), boot_id(), monotonic_ns, wall_ns, os.getpid(), os.getuid(), plan(size), resource,
        in_memory=in_memory,
    )  # fmt: skip


def file_name(header: Header) -> str:
    """Return the published name: rank and incarnation."""
    return f"r{header.resource.get('rank', 0)}-{header.incarnation.hex()}{SUFFIX}"


def lock_name(name: str) -> str:
    """Return the name of the lock beside a flight file."""
    return name.removesuffix(SUFFIX) + LOCK_SUFFIX


def create_flight_file(place: FlightDirectory, header: Header, content: bytes | None = None) -> CreatedFile:
    """Create and publish the file; ``content``: that of a deleted file of the same incarnation.

    Raises :class:`NoRoomError`, ``OSError``, or ``ValueError`` for a resource that is too long. Nothing is left behind then,
    nor after an interrupt.
    """
    raw, name, temporary = encode_header(header), file_name(header), temporary_name()
    why = shortage(place.fd, header.file_size)
    if why is not None:
        raise NoRoomError(why)
    with contextlib.ExitStack() as undo:
        undo.callback(remove, place.fd, temporary)
        inode, mapped = _allocate(place, temporary, header.file_size)
        if content is not None:
            mapped[:] = content
        mapped[: len(raw)] = raw
        taken = _take_lock(place, name, undo)
        os.rename(temporary, name, src_dir_fd=place.fd, dst_dir_fd=place.fd)
        undo.pop_all()
    return CreatedFile(place, name, inode, header, mapped, taken)


def open_again(created: CreatedFile) -> Descriptor:
    """Open a published file for writing, refusing any other file of that name. Raises ``OSError``."""
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    file = Descriptor("flight file", created.name, flags, directory=created.place.directory)
    if file.identity.inode != created.inode:
        file.close()
        raise FileNotFoundError(created.name)
    return file


def relock(created: CreatedFile) -> CreatedFile:
    """Create a new lock file after the old one was deleted. Raises ``OSError``; the old lock stays in force then."""
    with contextlib.ExitStack() as undo:
        taken = _take_lock(created.place, created.name, undo)
        undo.pop_all()
    return dataclasses.replace(created, lock=taken)


def _take_lock(place: FlightDirectory, name: str, undo: contextlib.ExitStack) -> Descriptor:
    file = create(place.directory, lock_name(name), place.file_mode, "lock")
    undo.callback(unlock, file)
    undo.callback(remove, place.fd, lock_name(name))
    lock(file)
    return file


def _allocate(place: FlightDirectory, name: str, size: int) -> tuple[int, memoryview]:
    with contextlib.closing(create(place.directory, name, place.file_mode)) as file:
        # storing into a page that a full tmpfs cannot back raises SIGBUS; allocating beforehand turns that into ENOSPC
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.number(), 0, size)
        else:
            os.pwrite(file.number(), bytes(size), 0)
        return file.identity.inode, _mapped(file.number(), size)


def _mapped(fd: int, size: int) -> memoryview:
    """Map the file for as long as the view is used. Raises ``OSError``.

    ``mmap.mmap`` keeps a descriptor of its own, and closes that number at its end whatever file it is by then.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, _MMAP
    libc.munmap.argtypes = _MMAP[:2]
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    array = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(array, libc.munmap, address, size).atexit = False
    return PickleBuffer(array).raw()  # in the plain format, which a view of the array itself has not


def shortage(directory_fd: int, size: int) -> str | None:
    """Return the reason not to allocate a file of ``size`` bytes there; ``None`` when there is room."""
    if deadly_limit(size):
        return f"files of this process may have {_size_limit()} bytes, and the signal at more ends it"
    usage = os.fstatvfs(directory_fd)
    if usage.f_bavail * usage.f_frsize < size:
        return f"the file system has {usage.f_bavail * usage.f_frsize} bytes left, {size} are needed"
    free = cgroup_headroom()
    if free is not None and free < HEADROOM * size:
        return f"the memory cgroup has {free} bytes left, {HEADROOM * size} must be free before {size} are taken"
    return None


def deadly_limit(size: int) -> bool:
    """Return whether writing ``size`` bytes would kill this process by SIGXFSZ (``ulimit -f``).

    Python ignores the signal, so that the write fails with an error; an application may have restored the default.
    """
    return size > _size_limit() and signal.getsignal(signal.SIGXFSZ) == signal.SIG_DFL


def survive_limits() -> None:
    """Block SIGXFSZ in this thread, so that exceeding ``ulimit -f`` is an error whatever handler the application sets.

    The kernel sends the signal to the writing thread, where it then stays pending.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXFSZ])


def _size_limit() -> float:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def cgroup_headroom(root: str = "") -> int | None:
    """Return the bytes left in the tightest memory cgroup, v1 or v2; ``None`` without a limit.

    That is the limit minus the working set as the kubelet counts it: usage without inactive file pages. Reading a data set
    larger than the limit fills the cgroup with those, and the kernel reclaims them before it kills a process.
    ``root`` is prefixed to every path.
    """
    return min((max(limit - memory.working_set, 0) for limit, memory in _limited(root)), default=None)


def cgroup_limit(root: str = "") -> int | None:
    """Return the bytes that the tightest memory cgroup of this process may take, v1 or v2; ``None`` without a limit."""
    return min((limit for limit, _ in _limited(root)), default=None)


def _limited(root: str) -> list[tuple[int, Memory]]:
    """Return limit and memory use of each group with a limit."""
    groups = of_process("memory", root)
    memories = [memory_of(level, v2=groups.v2, root=root) for level in groups.levels] if groups else []
    return [(memory.limit, memory) for memory in memories if memory is not None and memory.limit is not None]


def names(directory_fd: int) -> Iterator[str]:
    """Yield the names in the directory. Raises ``OSError``."""
    # a descriptor of its own: concurrent scrapes would share the read position of one
    opened = Descriptor("", ".", os.O_RDONLY | os.O_DIRECTORY, directory=directory_fd)
    with contextlib.closing(opened) as directory, os.scandir(directory.number()) as entries:
        for entry in entries:
            yield entry.name


def create(directory: Descriptor | int, name: str, mode: int, what: str = "", flags: int = os.O_RDWR) -> Descriptor:
    """Create a file with that mode and open it; ``what``: for the log. Raises ``OSError``; nothing is left behind then."""
    file = Descriptor(what, name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode=mode, directory=directory)
    try:
        os.fchmod(file.number(), mode)  # regardless of the umask: its reader may be another user, or read by group
    except OSError:
        file.close()
        remove(directory if isinstance(directory, int) else directory.number(), name)
        raise
    return file


def temporary_name() -> str:
    """Return a name that no other file has."""
    return TEMPORARY + token_hex(8)


def replace(directory_fd: int, name: str, content: bytes, mode: int) -> None:
    """Write a small file that has its name once it is complete. Raises ``OSError``; nothing is left behind then."""
    temporary = temporary_name()
    with contextlib.ExitStack() as undo:
        undo.callback(remove, directory_fd, temporary)
        with contextlib.closing(create(directory_fd, temporary, mode)) as file:
            os.write(file.number(), content)
        os.rename(temporary, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        undo.pop_all()


@contextlib.contextmanager
def reading(directory_fd: int, name: str) -> Iterator[int]:
    """Open a file that another process wrote, for a ``with`` block. Raises ``OSError``."""
    fd = os.open(name, READ, dir_fd=directory_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def remove(directory_fd: int, name: str) -> None:
    """Remove a file if it is there and may be removed."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory_fd)


def inode(directory_fd: int, name: str) -> int:
    """Return the inode that has this name; 0 if there is none. Raises ``OSError``."""
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return 0


def is_plain(status: os.stat_result, owner: int | None) -> bool:
    """Return whether it is a regular file with one name. ``owner``: the only uid to accept."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and (owner is None or status.st_uid == owner)


def _forget() -> None:
    """In a forked child: it holds no lock."""
    _locked.clear()


os.register_at_fork(after_in_child=_forget)
renew_in_child(sys.modules[__name__], _mutex=RLock)


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0) if _LINUX else _FLOCK.pack(0, 0, 0, kind, os.SEEK_SET)


def _kind(raw: bytes) -> int:
    fields = _FLOCK.unpack(raw)
    return int(fields[0] if _LINUX else fields[3])


def lock(file: Descriptor) -> None:
    """Lock the writable file until it is closed. Raises ``OSError`` when another process has it.

    A program that closes our descriptor drops the lock: then it is to be taken again (:meth:`Descriptor.restore`).
    """
    with _mutex:
        fcntl.fcntl(file.number(), fcntl.F_SETLK, _flock(fcntl.F_WRLCK))
        _locked.add(file.identity[:2])


def unlock(file: Descriptor) -> None:
    """Close the file and so drop its lock."""
    with _mutex:
        _locked.discard(file.identity[:2])
        file.close()


def is_locked_here(directory_fd: int, name: str) -> bool:
    """Return whether this process holds the lock on that name, without opening it. Raises ``OSError`` if it is gone."""
    status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    return (status.st_dev, status.st_ino) in _locked


def is_locked(directory_fd: int, name: str) -> bool:
    """Return whether a living process, this one or another, holds the lock on that name; without a file none does.

    Raises ``OSError`` if it cannot be opened.
    """
    with _mutex, contextlib.suppress(FileNotFoundError):
        return is_locked_here(directory_fd, name) or _kind(_probe(directory_fd, name)) != fcntl.F_UNLCK
    return False


def lock_content(directory_fd: int, name: str, size: int) -> bytes:
    """Return the first bytes of a lock file; empty if this process holds the lock, which reading would drop.

    Raises ``OSError`` if it cannot be opened.
    """
    with _mutex:
        if is_locked_here(directory_fd, name):
            return b""
        with reading(directory_fd, name) as fd:
            return os.read(fd, size)


def _probe(directory_fd: int, name: str) -> bytes:
    """Query the lock of a file that this process has not locked (closing it would drop it). Call with the mutex held."""
    with reading(directory_fd, name) as fd:
        return fcntl.fcntl(fd, fcntl.F_GETLK, _flock(fcntl.F_WRLCK))
