"""Removal of dead flight files that are old, or that together take too much space.

Trainers clean when they start. A file is removed only if it
belongs to our user and its writer is dead: its lock is free and its heartbeat stopped. Its age is that of the last heartbeat,
because stores through a map do not update mtime. Artifacts are removed with their flight file. Other names are never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from torchobs.config.identity import boot_id
from torchobs.flight import artifacts, files
from torchobs.flight.files import LOCK_SUFFIX, SUFFIX, TEMPORARY, lock_name
from torchobs.flight.layout import BadFlightFileError
from torchobs.flight.reader import is_name, open_file

if TYPE_CHECKING:
    from collections.abc import Iterator

MIN_AGE_S = 24 * 3600.0
MAX_TOTAL_BYTES = 256 * 1024 * 1024
STALE_S = 3600.0
"""Age, by mtime, at which temporary files and orphaned locks are removed; creation takes milliseconds."""
SETTLED_S = 10.0
"""A living rank can lose its lock (a program that closes unknown descriptors), but its heartbeat goes on."""

_TEMPORARY = re.compile(re.escape(TEMPORARY) + "[0-9a-f]{16}")
_ENDINGS = (SUFFIX, LOCK_SUFFIX, *artifacts.ENDINGS.values())


class _File(NamedTuple):
    """A flight file of our user. ``age_s``: seconds since its last heartbeat; 0 while its writer lives."""

    age_s: float
    name: str
    inode: int
    size: int


def clean(
    directory_fd: int,
    *,
    now: int,
    min_age_s: float = MIN_AGE_S,
    max_total_bytes: int = MAX_TOTAL_BYTES,
    budget_s: float = 0.25,
) -> list[str]:
    """Remove files that have become useless and return their names.

    ``now`` is CLOCK_MONOTONIC in nanoseconds. A dead file is removed ``min_age_s`` after its last heartbeat; then the
    oldest until all our files take at most ``max_total_bytes``. The listing stops after ``budget_s``; the remaining files
    wait for the next call.

    Raises ``OSError`` when the directory cannot be read.
    """
    dead, removed, beside = [], [], defaultdict[str, list[str]](list)
    for name in _names(directory_fd, budget_s):
        if (artifact := artifacts.parse(name)) is not None:
            beside[artifact.flight].append(name)
        if not is_name(name):
            removed += _remove_stale(directory_fd, name)
        elif (file := _flight_file(directory_fd, name, now)) is not None:
            dead.append(file)
    sizes = {file.name: file.size + _size(directory_fd, beside[file.name]) for file in dead}
    total = sum(sizes.values())
    for file in sorted(dead, reverse=True):
        unwanted = file.age_s >= min_age_s or total > max_total_bytes
        if file.age_s >= SETTLED_S and unwanted and _remove(directory_fd, file):
            removed += [file.name, *_remove_all(directory_fd, beside[file.name])]
            total -= sizes[file.name]
    return removed


def _names(directory_fd: int, budget_s: float) -> Iterator[str]:
    """Yield names of the kinds that torchobs creates, for at most ``budget_s``."""
    deadline = time.monotonic() + budget_s
    for name in files.names(directory_fd):
        if time.monotonic() > deadline:
            return
        if name.endswith(_ENDINGS) or name.startswith(TEMPORARY):
            yield name


def _ours(directory_fd: int, name: str) -> os.stat_result | None:
    """Return the status of a file; ``None`` when it is not our user's, or gone."""
    with contextlib.suppress(OSError):
        status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
        if files.is_plain(status, os.getuid()):
            return status
    return None


def _flight_file(directory_fd: int, name: str, now: int) -> _File | None:
    """Return the flight file of that name; ``None`` when it is not our user's, or gone."""
    status = _ours(directory_fd, name)
    with contextlib.suppress(OSError):
        if status is not None:
            is_locked = files.is_locked(directory_fd, lock_name(name))
            return _File(0.0 if is_locked else _age_s(directory_fd, name, status, now), name, status.st_ino, status.st_size)
    return None


def _age_s(directory_fd: int, name: str, status: os.stat_result, now: int) -> float:
    """Return the seconds since the last heartbeat, or since creation if the file cannot be parsed. Raises ``OSError``."""
    try:
        with contextlib.closing(open_file(directory_fd, name)) as file:
            header, beat = file.header, file.live().heartbeat_ns or file.header.monotonic_ns
    except BadFlightFileError:
        return max(time.time() - status.st_mtime, 0.0)
    if header.boot_id == boot_id() and beat <= now:
        return (now - beat) / 1e9
    return max(now / 1e9, time.time() - header.wall_s(beat))  # of another boot: at least as old as this one


def _remove(directory_fd: int, file: _File) -> bool:
    """Remove a dead file and its lock, unless another file has replaced it; return whether it was removed."""
    with contextlib.suppress(OSError):
        if not files.is_locked(directory_fd, lock_name(file.name)) and files.inode(directory_fd, file.name) == file.inode:
            os.unlink(file.name, dir_fd=directory_fd)
            files.remove(directory_fd, lock_name(file.name))
            return True
    return False


def _remove_stale(directory_fd: int, name: str) -> list[str]:
    """Remove a leftover that is old enough; return its name."""
    status = _ours(directory_fd, name)
    with contextlib.suppress(OSError):
        if status is not None and time.time() - status.st_mtime >= STALE_S and _is_leftover(directory_fd, name):
            os.unlink(name, dir_fd=directory_fd)
            return [name]
    return []


def _is_leftover(directory_fd: int, name: str) -> bool:
    """Return whether it is a temporary file, or a free lock or an artifact without its flight file. Raises ``OSError``."""
    if name.endswith(LOCK_SUFFIX):
        flight = name.removesuffix(LOCK_SUFFIX) + SUFFIX
        return is_name(flight) and not files.inode(directory_fd, flight) and not files.is_locked(directory_fd, name)
    if (artifact := artifacts.parse(name)) is not None:
        return not files.inode(directory_fd, artifact.flight)
    return _TEMPORARY.fullmatch(name) is not None


def _size(directory_fd: int, names: list[str]) -> int:
    return sum(status.st_size for name in names if (status := _ours(directory_fd, name)) is not None)


def _remove_all(directory_fd: int, names: list[str]) -> list[str]:
    """Remove those of the files that belong to our user; return their names."""
    ours = [name for name in names if _ours(directory_fd, name) is not None]
    for name in ours:
        files.remove(directory_fd, name)
    return ours
