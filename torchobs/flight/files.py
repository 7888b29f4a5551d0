"""Creation of a flight file: is there room? → ``.tmp-random`` → allocate → header → lock → rename.

This order makes every published file complete, and a published file with a free lock the file of a dead writer. Room is checked
before: in a full memory cgroup the allocation gets the trainer killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import time
import weakref
from dataclasses import dataclass, replace
from pickle import PickleBuffer
from secrets import token_bytes
from typing import TYPE_CHECKING

from torchobs.config.identity import boot_id
from torchobs.flight import entries, lock
from torchobs.flight.layout import Header, encode_header, plan
from torchobs.support.cgroup import Memory, memory_of, of_process
from torchobs.support.descriptors import Descriptor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchobs.flight.directory import FlightDirectory

SUFFIX, LOCK_SUFFIX = ".flight", ".lock"
HEADROOM = 16
"""Multiple of the file's size that must be free in the memory cgroup: allocation at its limit got the trainer OOM-killed."""
_PAGE = 4096
_MMAP = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)


class NoRoomError(OSError):
    """The file system or the memory cgroup lacks space for a flight file; the message says which."""


@dataclass(frozen=True, slots=True)
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


def create(place: FlightDirectory, header: Header, content: bytes | None = None) -> CreatedFile:
    """Create and publish the file; ``content``: what a deleted file of the same incarnation held.

    Raises :class:`NoRoomError`, ``OSError``, or ``ValueError`` for a resource that is too long. Nothing is left behind then,
    nor after an interrupt.
    """
    raw, name, temporary = encode_header(header), file_name(header), entries.temporary_name()
    why = shortage(place.fd, header.file_size)
    if why is not None:
        raise NoRoomError(why)
    with contextlib.ExitStack() as undo:
        undo.callback(entries.remove, place.fd, temporary)
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
    return replace(created, lock=taken)


def _take_lock(place: FlightDirectory, name: str, undo: contextlib.ExitStack) -> Descriptor:
    file = entries.create(place.directory, lock_name(name), place.file_mode, "lock")
    undo.callback(lock.release, file)
    undo.callback(entries.remove, place.fd, lock_name(name))
    lock.take(file)
    return file


def _allocate(place: FlightDirectory, name: str, size: int) -> tuple[int, memoryview]:
    file = entries.create(place.directory, name, place.file_mode)
    try:
        # storing into a page that a full tmpfs cannot back raises SIGBUS; allocating beforehand turns that into ENOSPC
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.number(), 0, size)
        else:
            os.pwrite(file.number(), bytes(size), 0)
        return file.identity.inode, _mapped(file.number(), size)
    finally:
        file.close()


def _mapped(fd: int, size: int) -> memoryview:
    """Map the file until nobody uses the view any longer. Raises ``OSError``.

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
    """Return why a file of ``size`` bytes should not be allocated there; ``None`` when there is room."""
    if deadly_limit(size):
        return f"files of this process may have {_size_limit()} bytes, and the signal that would tell it of more ends it"
    usage = os.fstatvfs(directory_fd)
    if usage.f_bavail * usage.f_frsize < size:
        return f"the file system has {usage.f_bavail * usage.f_frsize} bytes left, {size} are needed"
    free = cgroup_headroom()
    if free is not None and free < HEADROOM * size:
        return f"the memory cgroup has {free} bytes left, {HEADROOM * size} must be free before {size} are taken"
    return None


def deadly_limit(size: int) -> bool:
    """Return True if writing ``size`` bytes would kill this process by SIGXFSZ (``ulimit -f``).

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
    found = [memory_of(level, v2=groups.v2, root=root) for level in groups.levels] if groups else []
    return [(memory.limit, memory) for memory in found if memory is not None and memory.limit is not None]
