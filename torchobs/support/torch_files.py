"""Damaged files of ``torch.save``."""

from __future__ import annotations

import struct
import zipfile
import zlib

_OF_ARCHIVES = (struct.error, zlib.error, zipfile.BadZipFile)
DAMAGE = (RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError, AssertionError, *_OF_ARCHIVES)
"""What ``torch.load`` and ``zipfile`` raise for a damaged file, besides ``pickle.UnpicklingError``"""


def damaged_entry(archive: zipfile.ZipFile) -> str | None:
    """Return an entry with another checksum than it says, which torch does not compare; nothing of an archive without any."""
    return archive.testzip() if any(entry.CRC for entry in archive.infolist()) else None
