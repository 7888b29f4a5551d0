"""List, read and remove the ranks' artifacts in the flight directory, and say why one could not be written.

They are addressed by id, never by file name.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.diagnosis.text_format import clean
from torchobs.exporter.api.problems import Problem
from torchobs.exporter.api.serializers import instant
from torchobs.flight.files import artifacts, lock
from torchobs.flight.files.artifacts import PROFILE, STUCK
from torchobs.flight.files.create import lock_name
from torchobs.flight.files.location import opened
from torchobs.flight.reader import reader
from torchobs.ranks import labels
from torchobs.ranks.directory import Directory
from torchobs.ranks.rank_file import READ_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torchobs.exporter.api.history import Dated
    from torchobs.exporter.config import ExporterConfig
    from torchobs.flight.files.artifacts import ArtifactName

CHUNK = 1 << 20
_LONGEST_DETAIL = 200
_MEDIA_TYPES = {PROFILE: "application/gzip"}
_FAILURES = {catalog.EVENT_STACKS_FAILED.name, catalog.EVENT_PROFILE_FAILED.name}
_REMEDIES = {
    "no_room": "had no room for it: make room where its flight file is, in its memory limit or `ulimit -f`, and ask again.",
    "not_permitted": "may not write where its flight file is: make that directory writable for its user, and ask again.",
    "temporary_directory": "could not write the trace to its temp directory: make room there, or set TMPDIR for the training.",
    "too_large": "has a trace that is larger than 32 MiB: ask for fewer steps.",
    "profiler_in_use": "has a profiler running, its own or one that was asked for: ask again when that has ended.",
    "no_step": "began no backward pass within 120 s: ask for its stacks, which say what it does.",
}


class StoredArtifact(NamedTuple):
    """An artifact that was found, with what is needed to open it."""

    evidence: ArtifactName
    directory: str
    owner: int | None
    inode: int
    size: int


class _Run(NamedTuple):
    """The run and rank that an artifact belongs to; ``None``: unknown."""

    job_name: str | None
    run_id: str | None


class ArtifactStore:
    """The artifacts of one flight directory. To be used in one thread."""

    def __init__(self, config: ExporterConfig) -> None:
        self._directory = Directory(config)
        self._hidden: set[str] = set()
        self._runs: dict[str, _Run] = {}
        """by flight file; snapshots lack the earlier incarnations of restarted ranks, which left artifacts, too"""

    def listing(self) -> list[dict[str, Any]]:
        """Return descriptions of all artifacts, newest first; none if there is no directory."""
        return [content for _, content in sorted(self._described(), key=lambda pair: pair[0], reverse=True)]

    def find(self, identifier: str) -> StoredArtifact:
        """Return the artifact with that id. Raises ``Problem``."""
        with contextlib.suppress(OSError):  # gone, or not allowed: both are "not found"
            directory_fd, owner = self._open()
            for one in artifacts.names(directory_fd):
                if one.id == identifier:
                    status = artifacts.look(directory_fd, one, owner)
                    return StoredArtifact(one, self._directory.path, owner, status.st_ino, status.st_size)
        raise Problem(
            404, "no-such-evidence", "There is no such evidence, or not yet: GET /api/v1/evidence lists what there is."
        )

    def stuck(self, flight: str) -> ArtifactName | None:
        """Return the stacks that a rank has written itself because it is stuck, if it is stuck now."""
        one = artifacts.named(flight, STUCK, 0)
        return one if self.has(one) else None

    def has(self, one: ArtifactName) -> bool:
        """Return True if that artifact exists."""
        try:
            directory_fd, owner = self._open()
            artifacts.look(directory_fd, one, owner)
        except OSError:
            return False
        return True

    def is_stopped(self, flight: str) -> bool:
        """Return True if the rank's process is known to be stopped (SIGSTOP, Ctrl-Z); it may be in another PID namespace."""
        try:
            directory_fd, _ = self._open()
            pid = lock.holder(directory_fd, lock_name(flight))
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123  # /proc
                return file.read().rpartition(")")[2].split()[0] in {"T", "t"}
        except (OSError, IndexError):
            return False

    def clear(self) -> tuple[int, int]:
        """Remove all artifacts, or hide them if the directory is not writable; return the numbers of removed and hidden."""
        removed = hidden = 0
        for (_, _, one), _ in self._described():
            if one.number == 0:
                continue  # a stuck rank still writes to it
            try:
                os.unlink(one.name, dir_fd=self._directory.fd)
                removed += 1
            except OSError:
                self._hidden.add(one.name)
                hidden += 1
        return removed, hidden

    def close(self) -> None:
        """Close the directory."""
        self._directory.close()

    def _described(self) -> Iterator[tuple[tuple[int, str, ArtifactName], dict[str, Any]]]:
        try:
            directory_fd, owner = self._open()
            present = artifacts.names(directory_fd)
        except OSError:
            return
        self._hidden &= {one.name for one in present}
        self._runs = {one.flight: self._runs[one.flight] for one in present if one.flight in self._runs}
        for one in present:
            with contextlib.suppress(OSError):
                status = artifacts.look(directory_fd, one, owner)
                if one.name not in self._hidden:
                    yield (status.st_mtime_ns, one.name, one), _description(one, status, self._run_of(one))

    def _run_of(self, one: ArtifactName) -> _Run:
        """Return the run and rank in the header of the artifact's flight file, which is opened once for that."""
        if one.flight not in self._runs:
            try:
                with contextlib.closing(reader.open_file(self._directory.fd, one.flight, self._directory.owner)) as file:
                    job_name, run_id, _ = labels.identity(file.header.resource)
            except READ_ERRORS:
                return _Run(None, None)  # gone or unreadable; not cached, as that may change
            self._runs[one.flight] = _Run(job_name, run_id)
        return self._runs[one.flight]

    def _open(self) -> tuple[int, int | None]:
        """Return the directory's descriptor and the user id that files must have. Raises ``OSError``."""
        self._directory.names(time.time_ns())
        return self._directory.fd, self._directory.owner


def read(stored: StoredArtifact) -> Iterator[bytes]:
    """Yield the file's bytes up to the size found; fewer if the file was replaced.

    The file is reopened for each piece, so that none stays open when the client disconnects.
    """
    offset = 0
    while offset < stored.size and (chunk := _piece(stored, offset)):
        offset += len(chunk)
        yield chunk


def _piece(stored: StoredArtifact, offset: int) -> bytes:
    with contextlib.suppress(OSError), opened(stored.directory) as directory_fd:
        fd, _ = artifacts.open_checked(directory_fd, stored.evidence, stored.owner)
        with open(fd, "rb"):  # noqa: PTH123  # a descriptor, closed at the end
            if os.fstat(fd).st_ino == stored.inode:
                return os.pread(fd, min(CHUNK, stored.size - offset), offset)
    return b""


def media_type(one: ArtifactName) -> str:
    """Return the file's media type."""
    return _MEDIA_TYPES.get(one.kind, "text/plain; charset=utf-8")


def link(one: ArtifactName) -> dict[str, str]:
    """Return the artifact's id and its path in the API."""
    return {"id": one.id, "href": f"/api/v1/evidence/{one.id}"}


def _description(one: ArtifactName, status: os.stat_result, run: _Run) -> dict[str, Any]:
    return {
        **link(one),
        "kind": one.kind,
        "rank": one.rank,
        **run._asdict(),
        "incarnation": one.incarnation,
        "time": instant(status.st_mtime_ns),
        "size_bytes": status.st_size,
        "media_type": media_type(one),
    }


def failure(events: Iterable[Dated], identifier: str) -> Mapping[str, Any] | None:
    """Return the attributes of the event by which a rank reports that it could not write that artifact; if there is one."""
    reports = (dated.event["attributes"] for dated in events if dated.event["name"] in _FAILURES)
    return next((attributes for attributes in reports if attributes.get("evidence") == identifier), None)


def failure_problem(rank: str, failure: Mapping[str, Any]) -> Problem:
    """Return the problem for a request of that artifact. The event's attributes come from a rank and are not trusted."""
    reason = failure.get("reason")
    what = _REMEDIES.get(reason, "failed at it.") if isinstance(reason, str) else "failed at it."
    given = [failure.get(name) for name in ("detail", "exception.type")]
    details = "; ".join(clean(text, _LONGEST_DETAIL) for text in given if isinstance(text, str))
    return Problem(410, "evidence-failed", f"Rank {rank} {what}" + (f" ({details})" if details else ""))
