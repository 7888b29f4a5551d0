"""Commit and state of the git checkout that a script was started from, read from its files: no process is started for it.

A process with RDMA memory registered must not fork, and ``git`` is missing in most images.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import time
from pathlib import Path
from typing import NamedTuple

_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SHA1 = 40
_MOST_FILES = 20_000
_MOST_INDEX = 16 << 20
_MOST_HASHED, _MOST_HASHED_IN_ALL = 8 << 20, 64 << 20
LONGEST_S = 2.0
"""For a network file system, on which the status of a file takes milliseconds"""
_ENTRY = struct.Struct(">10I20sH")
_ASSUMED, _EXTENDED, _SKIPPED = 0x8000, 0x4000, 0x4000
"""Flags: assume-valid and extended; of the extended ones skip-worktree"""
_SUBMODULE = 0o160000


class Checkout(NamedTuple):
    """A checkout. ``dirty``: a tracked file differs from the index; ``None``: not determined (see :func:`changed`)."""

    commit: str
    branch: str | None
    dirty: bool | None


def checkout(start: Path) -> Checkout | None:
    """Return the checkout that a directory belongs to; ``None`` if there is none, or no commit yet. May raise ``OSError``."""
    root = _root(start.resolve())
    if root is None:
        return None
    git = _git_directory(root)
    head = _text(git / "HEAD")
    name = head.removeprefix("ref: ") if head.startswith("ref: ") else None
    common = (git / _text(git / "commondir")).resolve() if (git / "commondir").is_file() else git
    commit = _reference(git, common, name) if name else head
    if _HASH.fullmatch(commit) is None:
        return None
    dirty = changed(git / "index", root) if len(commit) == _SHA1 else None
    return Checkout(commit, name.removeprefix("refs/heads/") if name else None, dirty)


def changed(index: Path, root: Path) -> bool | None:
    """Return True if a tracked file was changed or removed since it was added to the index, as ``git diff --quiet`` does.

    Changes that are staged and not committed are not seen. ``None``: more than 20,000 files, more than 64 MiB of files with a
    new time (a copied checkout) that would have to be read, more than two seconds, an index of version 4, of a SHA-256
    repository or with submodules.
    """
    raw = index.read_bytes() if index.stat().st_size <= _MOST_INDEX else b""
    if raw[:4] != b"DIRC" or int.from_bytes(raw[4:8], "big") not in {2, 3}:
        return None
    count, at, hashed = int.from_bytes(raw[8:12], "big"), 12, 0
    if count > _MOST_FILES:
        return None
    deadline_s = time.monotonic() + LONGEST_S
    for _ in range(count):
        fields = _ENTRY.unpack_from(raw, at)
        flags, begin = fields[11], at + _ENTRY.size
        skipped = bool(flags & _ASSUMED)
        if flags & _EXTENDED:
            skipped |= bool(int.from_bytes(raw[begin : begin + 2], "big") & _SKIPPED)
            begin += 2
        end = raw.index(b"\0", begin)
        if stat.S_IFMT(fields[6]) == _SUBMODULE:
            return None
        if hashed > _MOST_HASHED_IN_ALL or time.monotonic() > deadline_s:
            return None
        if not skipped:
            differs, read = _differs(root / os.fsdecode(raw[begin:end]), fields)
            hashed += read
            if differs:
                return True
        at += (end - at) // 8 * 8 + 8
    return False


def _differs(path: Path, fields: tuple[int | bytes, ...]) -> tuple[bool, int]:
    """Compare one file by its time and size, and where only the time differs, by its contents; return the bytes read, too."""
    try:
        now = path.lstat()
    except OSError:
        return True, 0
    if not stat.S_ISREG(now.st_mode) and not stat.S_ISLNK(now.st_mode):
        return True, 0  # a directory, or a pipe, from which nothing may ever come
    seconds, nanoseconds, size, name = fields[2], fields[3], fields[9], fields[10]
    same_time = (now.st_mtime_ns // 10**9 & 0xFFFFFFFF, now.st_mtime_ns % 10**9) == (seconds, nanoseconds)
    if now.st_size & 0xFFFFFFFF != size:
        return size != 0 or not same_time, 0  # 0: git itself was not sure of the file when it wrote the entry
    if same_time or now.st_size > _MOST_HASHED:
        return not same_time, 0
    data = os.fsencode(path.readlink()) if stat.S_ISLNK(now.st_mode) else path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).digest() != name, len(data)


def _root(start: Path) -> Path | None:
    return next((path for path in (start, *start.parents) if (path / ".git").exists()), None)


def _git_directory(root: Path) -> Path:
    """Return the directory, which a worktree and a submodule have elsewhere."""
    found = root / ".git"
    return (root / _text(found).removeprefix("gitdir: ")).resolve() if found.is_file() else found


def _reference(git: Path, common: Path, name: str) -> str:
    for directory in (git, common):
        if (directory / name).is_file():
            return _text(directory / name)
    packed = common / "packed-refs"
    lines = _text(packed).splitlines() if packed.is_file() else []
    return next((line.split(" ", 1)[0] for line in lines if line.endswith(f" {name}")), "")


def _text(path: Path) -> str:
    return path.read_text(errors="replace").strip()
