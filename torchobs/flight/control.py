"""Commands to a rank: one small file per incarnation, written by the exporter and only read by the trainer.

``<incarnation>.control`` is one record of 72 bytes, little-endian: ``magic[8] major:u16 minor:u16 level:u32 target[16]
seq:u64 profile_seq:u64 stacks_seq:u64 probes_off:u64 profile_steps:u32 crc:u32``. The CRC covers what is before it and is
seeded with the low 32 bits of the target's incarnation, so that a record for another rank does not validate.

``level`` and ``probes_off`` (one bit per name in ``settings.PROBES``, in a fixed order) are states, all ones until a command
sets them. Profiles and stacks are requests, each identified by the number of its command, so that a later command which
replaces the record before it was read does not lose them. Numbers increase, even after a record was deleted: they are Unix
times in milliseconds, or one more than the last.

The file is replaced atomically by rename; the trainer reads it by ``pread``, for a map could be truncated by another process.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from torchobs.flight import files
from torchobs.support.after_fork import renew_in_child
from torchobs.support.descriptors import Descriptor

SUFFIX = ".control"
LEVELS = ("off", "basic", "advanced", "extreme")
"""Names of the debug levels; a level is an index into it."""
MAX_PROFILE_STEPS = 1000

_MAGIC = b"TORCHCMD"
_MAJOR, _MINOR = 1, 0
_BODY = struct.Struct("<8sHHI16sQQQQI")
_CRC = struct.Struct("<I")
SIZE = _BODY.size + _CRC.size
_NO_LEVEL, _NO_PROBES = 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF
_mutex = Lock()
renew_in_child(sys.modules[__name__], _mutex=Lock)


@dataclass(frozen=True, slots=True)
class Command:
    """A command to a rank, and the record of all so far. As an argument of :func:`write_command`, ``None`` changes nothing."""

    level: int | None = None
    """index into ``LEVELS``; ``None``: not set by a command"""
    profile_steps: int = 0
    """number of steps to profile, from the next one on"""
    stacks: bool = False
    """dump the stacks of all threads"""
    seq: int = 0
    """the command's number, assigned by :func:`write_command`"""
    probes_off: int | None = None
    """one bit per probe to switch off; ``None``: not set by a command"""
    profile_seq: int = 0
    """when read: number of the command that requested the profile"""
    stacks_seq: int = 0
    """when read: number of the command that requested the stacks"""


def file_name(incarnation: bytes) -> str:
    """Return the name of the control file of that incarnation."""
    return incarnation.hex() + SUFFIX


def write_command(directory_fd: int, incarnation: bytes, command: Command) -> int:
    """Merge a command into the rank's control file; return its number. Only one process may write to a directory.

    Its values are the API's, which has checked them. Raises ``OSError``.
    """
    with _mutex:
        before = read_command(directory_fd, incarnation) or Command()
        seq = max(before.seq + 1, time.time_ns() // 1_000_000)
        record = Command(
            before.level if command.level is None else command.level,
            command.profile_steps or before.profile_steps,
            seq=seq,
            probes_off=before.probes_off if command.probes_off is None else command.probes_off,
            profile_seq=seq if command.profile_steps else before.profile_seq,
            stacks_seq=seq if command.stacks else before.stacks_seq,
        )
        # the trainer may be another user
        files.replace(directory_fd, file_name(incarnation), _encode(record, incarnation), 0o644)
    return seq


def remove(directory_fd: int, incarnation: bytes) -> None:
    """Remove the control file of a rank that has ended. Raises ``OSError`` unless the file is already gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file_name(incarnation), dir_fd=directory_fd)


class ControlReader:
    """Polls for commands in the trainer, every 100 ms, at the cost of one ``stat`` while nothing is new."""

    def __init__(self, path: str, incarnation: bytes) -> None:
        """``path``: the directory, which may not exist yet."""
        self._path, self._incarnation = str(Path(path).absolute()), incarnation
        self._name = file_name(incarnation)
        self._directory: Descriptor | None = None
        self._version: tuple[int, int, int] | None = None
        self._acknowledged = Command()

    def poll(self) -> Command | None:
        """Return the command if it is newer than the last one returned; each request is returned once. Never raises."""
        try:
            record = self._newer()
        except OSError:
            return None  # no directory yet, or a file that may not be opened
        if record is None or record.seq <= self._acknowledged.seq:
            return None
        last, self._acknowledged = self._acknowledged, record
        steps = record.profile_steps if record.profile_seq > last.profile_seq else 0
        stacks_seq = record.stacks_seq if record.stacks_seq > last.stacks_seq else 0
        profile_seq = record.profile_seq if steps else 0
        return replace(record, profile_steps=steps, profile_seq=profile_seq, stacks=stacks_seq > 0, stacks_seq=stacks_seq)

    def close(self) -> None:
        """Close the directory; :meth:`poll` opens it again. Idempotent."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

    def _newer(self) -> Command | None:
        if self._directory is None:
            self._directory = Descriptor("control directory", self._path, files.READ | os.O_DIRECTORY)
        try:
            status = os.stat(self._name, dir_fd=self._directory.number(), follow_symlinks=False)
        except FileNotFoundError:
            if not (self._directory.is_intact() and os.fstat(self._directory.number()).st_nlink):
                self.close()  # deleted, and perhaps made anew
            return None
        version = status.st_ino, status.st_mtime_ns, status.st_ctime_ns
        if version == self._version:
            return None
        record = read_command(self._directory.number(), self._incarnation)
        self._version = version  # after reading: a file that could not be opened is tried again
        return record


def read_command(directory_fd: int, incarnation: bytes) -> Command | None:
    """Return the record; ``None`` if missing or invalid. Raises ``OSError`` unless the file is gone."""
    with contextlib.suppress(FileNotFoundError), files.reading(directory_fd, file_name(incarnation)) as fd:
        status = os.fstat(fd)
        if files.is_plain(status, None) and status.st_size == SIZE:
            return _decode(os.pread(fd, SIZE, 0), incarnation)
    return None


def _encode(record: Command, incarnation: bytes) -> bytes:
    level = _NO_LEVEL if record.level is None else record.level
    probes = _NO_PROBES if record.probes_off is None else record.probes_off
    requests = record.seq, record.profile_seq, record.stacks_seq, probes, record.profile_steps
    body = _BODY.pack(_MAGIC, _MAJOR, _MINOR, level, incarnation, *requests)
    return body + _CRC.pack(zlib.crc32(body, _seed(incarnation)))


def _decode(raw: bytes, incarnation: bytes) -> Command | None:
    if len(raw) != SIZE or _CRC.unpack_from(raw, _BODY.size)[0] != zlib.crc32(raw[: _BODY.size], _seed(incarnation)):
        return None
    magic, major, _, level, target, seq, profile_seq, stacks_seq, probes, profile_steps = _BODY.unpack_from(raw)
    if magic != _MAGIC or major != _MAJOR or target != incarnation:
        return None
    states = None if level == _NO_LEVEL else level, None if probes == _NO_PROBES else probes
    return Command(states[0], profile_steps, seq=seq, probes_off=states[1], profile_seq=profile_seq, stacks_seq=stacks_seq)


def _seed(incarnation: bytes) -> int:
    return int.from_bytes(incarnation[:4], "little")
