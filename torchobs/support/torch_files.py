"""Damaged files of ``torch.save``: what reading one raises, and which of its records is not what was written."""

from __future__ import annotations

import struct
import zipfile
import zlib

_OF_ARCHIVES = (struct.error, zlib.error, zipfile.BadZipFile)
DAMAGE = (RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError, AssertionError, *_OF_ARCHIVES)
"""What ``torch.load`` and ``zipfile`` raise for one, besides ``pickle.UnpicklingError``"""


def damaged_record(archive: zipfile.ZipFile) -> str | None:
    """Return a record with another checksum than it says; of an archive without checksums (torch can write none) nothing.

    Torch reads records without comparing them.
    """
    return archive.testzip() if any(entry.CRC for entry in archive.infolist()) else None
