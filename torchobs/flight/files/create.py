"""Creation of a flight file: ``.tmp-random`` → allocate → header → lock → rename.

This order makes every published file complete, and a published file with a free lock the file of a dead writer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from dataclasses import dataclass, replace
from secrets import token_bytes, token_hex
from typing import TYPE_CHECKING

from torchobs.flight.files import entries, lock
from torchobs.flight.files.headroom import shortage
from torchobs.flight.format.layout import Header, encode_header, plan
from torchobs.identity.process import boot_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchobs.flight.files.location import FlightDirectory

SUFFIX, LOCK_SUFFIX, TEMPORARY = ".flight", ".lock", ".tmp-"
_PAGE = 4096


class NoRoomError(OSError):
    """The file system or the memory cgroup lacks space for a flight file; the message says which."""


@dataclass(frozen=True, slots=True)
class CreatedFile:
    """A published flight file: its map, its name in ``place``, and the lock's descriptor, which stays open until the end."""

    place: FlightDirectory
    name: str
    inode: int
    header: Header
    map: mmap.mmap
    lock_fd: int
    lock_inode: int


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
        lock_fd, lock_inode = _take_lock(place, name, undo)
        os.rename(temporary, name, src_dir_fd=place.fd, dst_dir_fd=place.fd)
        undo.pop_all()
    return CreatedFile(place, name, inode, header, mapped, lock_fd, lock_inode)


def open_again(created: CreatedFile) -> int:
    """Open a published file for writing, refusing any other file of that name. Raises ``OSError``."""
    fd = os.open(created.name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=created.place.fd)
    if os.fstat(fd).st_ino != created.inode:
        os.close(fd)
        raise FileNotFoundError(created.name)
    return fd


def relock(created: CreatedFile) -> CreatedFile:
    """Create a new lock file after the old one was deleted. Raises ``OSError``; the old lock stays in force then."""
    with contextlib.ExitStack() as undo:
        lock_fd, lock_inode = _take_lock(created.place, created.name, undo)
        undo.pop_all()
    return replace(created, lock_fd=lock_fd, lock_inode=lock_inode)


def _take_lock(place: FlightDirectory, name: str, undo: contextlib.ExitStack) -> tuple[int, int]:
    lock_fd = entries.create(place.fd, lock_name(name), place.file_mode)
    undo.callback(lock.release, lock_fd)
    undo.callback(entries.remove, place.fd, lock_name(name))
    lock.take(lock_fd)
    return lock_fd, os.fstat(lock_fd).st_ino


def _allocate(place: FlightDirectory, name: str, size: int) -> tuple[int, mmap.mmap]:
    fd = entries.create(place.fd, name, place.file_mode)
    try:
        # storing into a page that a full tmpfs cannot back raises SIGBUS; allocating beforehand turns that into ENOSPC
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.pwrite(fd, bytes(size), 0)
        populate = getattr(mmap, "MAP_POPULATE", 0)
        return os.fstat(fd).st_ino, mmap.mmap(fd, size, flags=mmap.MAP_SHARED | populate)
    finally:
        os.close(fd)
