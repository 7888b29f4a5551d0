"""Creation of a flight file: ``.tmp-random`` → allocate → header → lock → rename.

This order makes every published file complete, and a published file with a free lock the file of a dead writer.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
import weakref
from dataclasses import dataclass, replace
from pickle import PickleBuffer
from secrets import token_bytes, token_hex
from typing import TYPE_CHECKING

from torchobs.flight.files import entries, lock
from torchobs.flight.files.headroom import shortage
from torchobs.flight.format.layout import Header, encode_header, plan
from torchobs.identity.process import boot_id
from torchobs.support.descriptors import Descriptor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchobs.flight.files.location import FlightDirectory

SUFFIX, LOCK_SUFFIX, TEMPORARY = ".flight", ".lock", ".tmp-"
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
    raw, name, temporary = encode_header(header), file_name(header), TEMPORARY + token_hex(8)
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
