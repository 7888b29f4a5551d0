"""Reads the kernel's files, below roots that a container may have mounted elsewhere; nothing in them is trusted."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILS = (OSError, ValueError, LookupError, ArithmeticError)
"""What reading files of an unknown kernel can raise; the collector has failed then, and the others go on."""

MOST_DEVICES = 64
"""Disks, interfaces, ports of which there are series: a machine with 1,000 virtual functions is not to fill the page."""

_MOST_BYTES = 1 << 20
_CHUNK = 1 << 16
_MOST_DIGITS = 19
_BEYOND = 1 << 63
# not to wait where something else than the kernel's file is, a FIFO for instance
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Tree(NamedTuple):
    """Where the kernel's files are."""

    procfs: str = "/proc"
    sysfs: str = "/sys"


def read(path: str) -> str:
    """Return a file's text, at most 1 MiB of it. Raises ``OSError``."""
    # descriptors, not a Path or a file object: an InfiniBand port has twenty files, each of which would cost three times more
    fd = os.open(path, _FLAGS)
    try:
        parts, left = [], _MOST_BYTES
        while left > 0 and (part := os.read(fd, min(_CHUNK, left))):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(fd)
    return b"".join(parts).decode("utf-8", "replace")


def number_in(path: str) -> int | None:
    """Return the only number of a file, from 0 to 2^63 - 1; ``None`` if there is no such file, or no such number in it."""
    try:
        return count(read(path).strip())
    except (OSError, ValueError):
        return None  # drivers have some and not others, and say things like "N/A (no PMA)"


def count(word: str) -> int:
    """Return a number as the kernel writes it, from 0 to 2^63 - 1, which is what OTLP holds. Raises ``ValueError``."""
    if not (word.isascii() and word.isdigit()) or len(word) > _MOST_DIGITS or (number := int(word)) >= _BEYOND:
        raise ValueError(f"no count: {word[:40]!r}")
    return number


def names_in(path: str) -> list[str]:
    """Return what a directory holds, sorted; nothing if there is none."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries)
    except FileNotFoundError:
        return []


def is_physical(link: str) -> bool:
    """Return True if an entry of sysfs (``/sys/block/X``, ``/sys/class/net/X``) leads to a device of the machine's own.

    Loop devices, RAM disks, bonds, bridges and containers' interfaces live below ``devices/virtual``, and so does the head of
    a multipath NVMe disk, whose paths (``nvme0c0n1``) are counted. Only NVMe over a fabric is there and is a device.
    """
    try:
        target = f"{os.readlink(link)}/"
    except OSError:
        return False
    return "/virtual/" not in target or "/virtual/nvme-fabrics/" in target


def bounded(things: Sequence[T], what: str) -> Sequence[T]:
    """Return the first of them, as many as there are to have series; say so if that are not all."""
    if len(things) > MOST_DEVICES:
        _log.warning("host: %d %s, of which the first %d are shown", len(things), what, MOST_DEVICES)
    return things[:MOST_DEVICES]
