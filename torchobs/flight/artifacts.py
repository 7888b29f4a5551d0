"""Artifacts: files that a rank writes beside its flight file on command, or when it is stuck. The API calls them evidence.

A file is named ``r<rank>-<incarnation>.<kind>-<number>`` plus a suffix; the number is that of the command that requested it,
a Unix time in milliseconds. It gets this name when it is complete, except for the dump of a rank that is stuck right now,
which has the number 0 and stays empty until there is something to write. The trainer writes, the exporter reads and trusts
nothing; clients of the exporter request an artifact by its :attr:`ArtifactName.id`, never by its file name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from torchobs.flight import files
from torchobs.flight.files import SUFFIX, shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.flight.directory import FlightDirectory
    from torchobs.support.descriptors import Descriptor

KINDS = STACKS, STUCK, PROFILE, LEAK = "stacks", "stuck", "profile", "leak"
"""Requested stacks; stacks of a rank that held the GIL for seconds; a profiler's trace; what grew while memory leaked."""
ENDINGS = {STACKS: ".txt", STUCK: ".txt", PROFILE: ".json.gz", LEAK: ".txt"}
LIMITS = {STACKS: 1 << 20, STUCK: 1 << 20, PROFILE: 32 << 20, LEAK: 1 << 20}
"""Maximum size in bytes: on tmpfs the file is charged to the trainer's memory."""
KEPT = {STACKS: 8, STUCK: 4, PROFILE: 2, LEAK: 3}
"""Files of one kind that are kept per rank; the oldest are removed."""

END = b"\n# end of stacks\n"
"""Last line of a complete dump: ``faulthandler`` reports no error when the disk is full."""

_WHY = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM), "no_room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "not_permitted"),
}

_NAME = re.compile(r"(r([0-9]{1,9})-([0-9a-f]{32}))\.(stacks|stuck|profile|leak)-([0-9]{1,15})(\.txt|\.json\.gz)")
_MAX_FOUND = 4096


class ArtifactName(NamedTuple):
    """A parsed artifact file name."""

    name: str
    flight: str
    """name of the flight file it belongs to"""
    rank: str
    incarnation: str
    """in hexadecimal"""
    kind: str
    number: int

    @property
    def id(self) -> str:
        """Identifier in the API: 16 hexadecimal digits that cannot be guessed without knowing the incarnation."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]


def named(flight: str, kind: str, number: int) -> ArtifactName:
    """Return the artifact name of that kind and number for the rank with that flight file."""
    stem = flight.removesuffix(SUFFIX)
    rank, _, incarnation = stem.removeprefix("r").partition("-")
    return ArtifactName(f"{stem}.{kind}-{number}{ENDINGS[kind]}", flight, rank, incarnation, kind, number)


def parse(name: str) -> ArtifactName | None:
    """Parse a file name; ``None`` if it is not an artifact's."""
    match = _NAME.fullmatch(name)
    if match is None or ENDINGS[match[4]] != match[6]:
        return None
    return ArtifactName(name, match[1] + SUFFIX, match[2], match[3], match[4], int(match[5]))


def names(directory_fd: int) -> list[ArtifactName]:
    """List the artifacts in a directory: at most 4,096, among at most 200,000 entries. Raises ``OSError``."""
    parsed = (parse(name) for name in files.names(directory_fd))
    return list(islice(filter(None, parsed), _MAX_FOUND))


def read_status(directory_fd: int, evidence: ArtifactName, owner: int | None) -> os.stat_result:
    """Return the file's status. ``owner``: the only uid to accept. Raises ``OSError`` when it may not be served."""
    status = os.stat(evidence.name, dir_fd=directory_fd, follow_symlinks=False)
    _check(status, evidence, owner)
    return status


def open_checked(directory_fd: int, evidence: ArtifactName, owner: int | None) -> tuple[int, int]:
    """Open the file for reading; return its descriptor and its size. Raises as :func:`read_status`."""
    fd = os.open(evidence.name, files.READ, dir_fd=directory_fd)
    try:
        status = os.fstat(fd)
        _check(status, evidence, owner)
    except OSError:
        os.close(fd)
        raise
    return fd, status.st_size


def _check(status: os.stat_result, evidence: ArtifactName, owner: int | None) -> None:
    if not files.is_plain(status, owner):
        raise OSError("not a regular file of the right owner")
    if not 0 < status.st_size <= LIMITS[evidence.kind]:
        raise OSError("empty, or larger than any evidence")


def create(place: FlightDirectory, name: str) -> Descriptor:
    """Create a file there, with the mode of a flight file, and open it for appending. Raises ``OSError``."""
    return files.create(place.directory, name, place.file_mode, "evidence", os.O_RDWR | os.O_APPEND)


@contextlib.contextmanager
def new(place: FlightDirectory, evidence: ArtifactName) -> Iterator[Descriptor]:
    """Open a file to append to, which is there under its name only after a block without an exception. Raises ``OSError``."""
    temporary = files.temporary_name()
    with contextlib.ExitStack() as undo:
        undo.callback(remove, place, temporary)
        with contextlib.closing(create(place, temporary)) as file:
            yield file
        finish(place, temporary, evidence)
        undo.pop_all()


def append(file: Descriptor, data: bytes) -> None:
    """Write all of ``data``. Raises ``OSError`` where there is no room, possibly after writing a part."""
    while data:
        data = data[os.write(file.number(), data) :]


def finish(place: FlightDirectory, temporary: str, evidence: ArtifactName) -> None:
    """Give the file its final name and remove the oldest beyond :data:`KEPT`. Raises ``OSError``.

    The directory is listed first: where that fails, no file is added that could not be counted.
    """
    numbered = [other for other in names(place.fd) if other.number]
    alike = [other for other in numbered if (other.flight, other.kind) == (evidence.flight, evidence.kind)]
    os.rename(temporary, evidence.name, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    for artifact in sorted({*alike, evidence}, key=lambda artifact: artifact.number)[: -KEPT[evidence.kind]]:
        remove(place, artifact.name)


def write(
    place: FlightDirectory, evidence: ArtifactName, size: int, fill: Callable[[Descriptor], object]
) -> dict[str, str] | None:
    """Write a file, which ``fill`` writes to, if there are ``size`` bytes; on failure, return why, as :func:`refusal` does."""
    if (lack := shortage(place.fd, size)) is not None:
        return {"reason": "no_room", "detail": lack}
    try:
        with new(place, evidence) as file:
            fill(file)
    except OSError as problem:
        return refusal(problem)
    return None


def refusal(problem: OSError) -> dict[str, str]:
    """Return the reason of a failed write as an event's attributes: a reason code and the system's message, without a path."""
    number = problem.errno or 0
    return {"reason": _WHY.get(number, "error"), "detail": os.strerror(number) if number else type(problem).__name__}


def remove(place: FlightDirectory, name: str) -> None:
    """Remove a file if it is there."""
    files.remove(place.fd, name)
