"""Archives that would do harm when they are unpacked: they grow without measure, or write beside their directory."""

from __future__ import annotations

import stat
import struct
import tarfile
import zipfile
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

MOST_RATIO = 200
"""Growth from which an archive is a bomb. Deflate reaches 1,032 on zeros (zlib's technical details); weights hardly become
smaller, and torch stores them as they are."""
LEAST_BOMB = 64 * 1024 * 1024
"""Smaller contents do no harm, however much they grow"""
MOST_ENTRIES = 1_000_000
_MOST_TAIL = 1 << 17
"""Length of the longest end of an archive, with its comment, and more"""
_ZIP64 = 0xFFFFFFFF


def zip_problems(archive: zipfile.ZipFile) -> list[str]:
    """Return what is wrong with a zip file, by its directory; nothing is unpacked."""
    if not _is_where_it_says(archive):
        return ["its directory is not where its end says: readers take it for different archives"]
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    problems = [f"{name!r} leads out of the archive" for name in names if _leads_out(name)]
    problems += [f"{entry.filename!r} is a symbolic link" for entry in entries if stat.S_ISLNK(entry.external_attr >> 16)]
    duplicates = len(names) - len(set(names))
    if duplicates:
        problems.append(f"{duplicates} of its entries have the name of another")
    size, packed = sum(entry.file_size for entry in entries), sum(entry.compress_size for entry in entries)
    spans = sorted((entry.header_offset, entry.header_offset + entry.compress_size) for entry in entries)
    if any(before[1] > after[0] for before, after in pairwise(spans)):
        problems.append("its entries overlap, as those of a zip bomb")  # Fifield 2019, "A better zip bomb"
    if len(entries) > MOST_ENTRIES or (size > LEAST_BOMB and size > MOST_RATIO * max(packed, 1)):
        problems.append(f"{packed:,} bytes would become {size:,} in {len(entries):,} entries")
    return problems


def damaged_entry(archive: zipfile.ZipFile) -> str | None:
    """Return the name of the first entry whose contents have another checksum than was written; None if there is none.

    torch does not compare them. Where all are 0 none was computed: ``torch.serialization.set_crc32_options(False)``.

    Raises:
        zipfile.BadZipFile, zlib.error, EOFError, RuntimeError: an entry cannot be read.
    """
    return archive.testzip() if any(entry.CRC for entry in archive.infolist()) else None


def _is_where_it_says(archive: zipfile.ZipFile) -> bool:
    """Return True if the directory ends where the archive's end record begins, and begins where that says.

    Python shifts all offsets by what stands before an archive; torch's reader does not, and would read another directory.
    """
    file = archive.fp
    if file is None:
        return False
    file.seek(0, 2)
    tail = min(file.tell(), _MOST_TAIL)
    file.seek(-tail, 2)
    begin, end = file.tell(), file.read(tail)
    at = end.rfind(b"PK\x05\x06")
    size, offset = struct.unpack_from("<II", end, at + 12)
    if end[at - 20 : at - 16] != b"PK\x06\x07":
        return bool(offset + size == begin + at)
    wide = at - 76  # the record of large archives, which torch always writes, stands before its locator
    if wide < 0 or end[wide : wide + 4] != b"PK\x06\x06":
        return False
    large = sum(struct.unpack_from("<QQ", end, wide + 40))
    return bool(large == begin + wide) and (_ZIP64 in {size, offset} or offset + size == large)


def tar_problems(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with an uncompressed tar file, by its headers; nothing is unpacked."""
    with tarfile.open(path, "r:") as archive:
        return entry_problems(archive, max(Path(path).stat().st_size, 1))


def entry_problems(archive: tarfile.TarFile, packed: int) -> list[str]:
    """Return what is wrong with the entries of a tar file of that many bytes."""
    problems, size = [], 0
    for number, entry in enumerate(archive):
        size += entry.size
        if _leads_out(entry.name) or ((entry.issym() or entry.islnk()) and _leads_out(entry.linkname)):
            problems.append(f"{entry.name!r} leads out of the archive")
        if entry.isdev():
            problems.append(f"{entry.name!r} is a device")
        if number > MOST_ENTRIES:
            return [*problems, f"more than {MOST_ENTRIES:,} entries"]
        if size > LEAST_BOMB and size > MOST_RATIO * packed:
            return [*problems, f"{packed:,} bytes would become more than {size:,}"]
    return problems


def _leads_out(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or name[1:2] == ":"
