"""Commands to ranks through the control directory, and the artifacts that ranks leave in the flight directory.

They are addressed by id, never by file name.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from torchobs import catalog
from torchobs.config.settings import PROBES
from torchobs.exporter import api_schema as schema
from torchobs.exporter.access import Problem
from torchobs.exporter.api_schema import Answer, instant, named
from torchobs.flight import artifacts, control, reader
from torchobs.flight.artifacts import PROFILE, STACKS, STUCK
from torchobs.flight.control import Command
from torchobs.flight.directory import control_directory, find_existing, opened
from torchobs.flight.files import file_name
from torchobs.ranks import labels
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.ranks.scanner import Directory
from torchobs.support.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torchobs.exporter.config import ExporterConfig
    from torchobs.flight.artifacts import ArtifactName
    from torchobs.ranks.snapshot import Rank, Snapshot


CHUNK = 1 << 20
_LONGEST_DETAIL = 200
FAILURES = {catalog.EVENT_STACKS_FAILED.name, catalog.EVENT_PROFILE_FAILED.name}
"""Events by which a rank reports that it could not write an artifact"""
_REMEDIES = {
    "no_room": "had no room for it: make room where its flight file is, in its memory limit or `ulimit -f`, and ask again.",
    "not_permitted": "may not write where its flight file is: make that directory writable for its user, and ask again.",
    "temporary_directory": "could not write the trace to its temp directory: make room there, or set TMPDIR for the training.",
    "too_large": "has a trace that is larger than 32 MiB: ask for fewer steps.",
    "profiler_in_use": "has a profiler running, its own or one that was asked for: ask again when that has ended.",
    "no_step": "began no backward pass within 120 s: ask for its stacks, which say what it does.",
}


class StoredArtifact(NamedTuple):
    """An artifact, opened for reading."""

    evidence: ArtifactName
    file: BinaryIO
    size: int


class ArtifactStore:
    """The artifacts of one flight directory. To be used in one thread."""

    def __init__(self, config: ExporterConfig) -> None:
        self._directory = Directory(config)
        self._hidden: set[str] = set()

    def listing(self) -> list[Answer]:
        """Return descriptions of all artifacts, newest first; none if there is no directory."""
        return [content for _, content in sorted(self._described(), key=lambda pair: pair[0], reverse=True)]

    def find(self, identifier: str) -> StoredArtifact:
        """Return the artifact with that id. Raises ``Problem``."""
        with contextlib.suppress(OSError):  # gone, or not allowed: both are "not found"
            directory_fd, owner = self._open()
            for artifact in artifacts.names(directory_fd):
                if artifact.id == identifier:
                    fd, size = artifacts.open_checked(directory_fd, artifact, owner)
                    return StoredArtifact(artifact, open(fd, "rb"), size)  # noqa: PTH123  # a descriptor, which `read` closes
        detail = "There is no such evidence, or not yet: GET /api/v1/evidence lists what there is."
        raise Problem(404, "no-such-evidence", detail)

    def has(self, artifact: ArtifactName) -> bool:
        """Return whether that artifact exists."""
        try:
            directory_fd, owner = self._open()
            artifacts.read_status(directory_fd, artifact, owner)
        except OSError:
            return False
        return True

    def clear(self) -> tuple[int, int]:
        """Remove all artifacts, or hide them if the directory is not writable; return the numbers of removed and hidden."""
        removed = hidden = 0
        for (_, _, artifact), _ in self._described():
            if artifact.number == 0:
                continue  # a stuck rank still writes to it
            try:
                os.unlink(artifact.name, dir_fd=self._directory.fd)
                removed += 1
            except OSError:
                self._hidden.add(artifact.name)
                hidden += 1
        return removed, hidden

    def close(self) -> None:
        """Close the directory."""
        self._directory.close()

    def _described(self) -> Iterator[tuple[tuple[int, str, ArtifactName], Answer]]:
        try:
            directory_fd, owner = self._open()
            present = artifacts.names(directory_fd)
        except OSError:
            return
        self._hidden &= {artifact.name for artifact in present}
        for artifact in present:
            with contextlib.suppress(OSError):
                status = artifacts.read_status(directory_fd, artifact, owner)
                if artifact.name not in self._hidden:
                    yield (status.st_mtime_ns, artifact.name, artifact), _description(artifact, status, self._run_of(artifact))

    def _run_of(self, artifact: ArtifactName) -> dict[str, str] | dict[str, None]:
        """Return the run in the header of the artifact's flight file, which may be an earlier incarnation's."""
        try:
            with contextlib.closing(reader.open_file(self._directory.fd, artifact.flight, self._directory.owner)) as file:
                job_name, run_id, _ = labels.identity(file.header.resource)
        except READ_ERRORS:
            return {"job_name": None, "run_id": None}  # gone or unreadable
        return {"job_name": job_name, "run_id": run_id}

    def _open(self) -> tuple[int, int | None]:
        """Return the directory's descriptor and the user id that files must have. Raises ``OSError``."""
        self._directory.open()
        return self._directory.fd, self._directory.owner


def read(stored: StoredArtifact) -> Iterator[bytes]:
    """Yield the file's bytes up to the size found, and close it."""
    with stored.file as file:
        left = stored.size
        while left and (chunk := file.read(min(CHUNK, left))):
            left -= len(chunk)
            yield chunk


def media_type(artifact: ArtifactName) -> str:
    """Return the file's media type."""
    return "application/gzip" if artifact.kind == PROFILE else "text/plain; charset=utf-8"


def link(artifact: ArtifactName) -> Answer:
    """Return the artifact's id and its path in the API."""
    return schema.Link(artifact.id, f"/api/v1/evidence/{artifact.id}")


def _description(artifact: ArtifactName, status: os.stat_result, run: dict[str, str] | dict[str, None]) -> Answer:
    return schema.Evidence(
        id=artifact.id,
        href=link(artifact).href,
        kind=artifact.kind,
        rank=artifact.rank,
        **run,
        incarnation=artifact.incarnation,
        time=instant(status.st_mtime_ns),
        size_bytes=status.st_size,
        media_type=media_type(artifact),
    )


def failure_problem(rank: str, failure: Mapping[str, Any]) -> Problem:
    """Return the problem for a request of that artifact. The event's attributes come from a rank: they are not trusted."""
    reason = failure.get("reason")
    what = _REMEDIES.get(reason, "failed at it.") if isinstance(reason, str) else "failed at it."
    texts = [failure.get(name) for name in ("detail", "exception.type")]
    details = "; ".join(clean(text, _LONGEST_DETAIL) for text in texts if isinstance(text, str))
    return Problem(410, "evidence-failed", f"Rank {rank} {what}" + (f" ({details})" if details else ""))


_log = logging.getLogger(__name__)


class CommandService:
    """Writes commands. To be used in one thread, except ``due``."""

    def __init__(self, config: ExporterConfig, store: ArtifactStore) -> None:
        self._config, self._store = config, store
        self._commanded: set[str] = set()
        """incarnations that got a command, and have not ended since"""
        self._cleared: set[str] = set()
        """incarnations that have ended and have no control file of this or an earlier exporter"""
        self._hung: dict[str, int | None] = {}
        """time of the last step of each rank of a hung run; their stacks are asked for"""
        self.failures = 0
        """number of commands that could not be written"""

    def level(self, ranks: Iterable[Rank], level: int) -> Answer:
        """Set the ranks' observability level. Raises ``Problem``."""
        return schema.LevelSet(control.LEVELS[level], self._send(ranks, Command(level=level)))

    def probes_off(self, ranks: Iterable[Rank], off: list[str]) -> Answer:
        """Switch exactly these probes off, and all others on. Raises ``Problem``."""
        mask = sum(1 << PROBES.index(name) for name in off)
        return schema.ProbesSet(off, self._send(ranks, Command(probes_off=mask)))

    def profile(self, rank: Rank, steps: int) -> Answer:
        """Request a profile of that many steps of a rank. Raises ``Problem``."""
        if rank.state == "unresponsive":
            raise Problem(409, "rank-unresponsive", f"Rank {rank.rank} does not respond: ask for its stacks instead.")
        if rank.view.live.level == 0:
            raise Problem(409, "rank-off", f"Rank {rank.rank} is at the level off: POST /api/v1/debug/level/basic first.")
        with contextlib.suppress(OSError), self._directory() as directory_fd:
            unread = _requested(directory_fd, rank, PROFILE)
            if unread.number > rank.view.live.command:
                detail = (
                    f"Rank {rank.rank} has yet to read a request for one, which will be evidence {unread.id}: ask again then."
                )
                raise Problem(409, "profile-asked", detail, Retry_After="1")
        (sent,) = self._send([rank], Command(profile_steps=steps))
        evidence = link(artifacts.named(_flight(rank), PROFILE, sent.command))
        return schema.ProfileAsked(**named(rank), command=sent.command, steps=steps, evidence=evidence)

    def stacks(self, ranks: list[Rank]) -> Answer:
        """Request the ranks' stacks; for a stuck rank return those it has written itself. Raises ``Problem``.

        While the rank has yet to read an earlier request, its artifact is returned instead: those stacks will be as recent.
        """
        able = [rank for rank in ranks if rank.state != "unresponsive"]
        sent = {answer.incarnation: answer.command for answer in self._send(able, Command(stacks=True))} if able else {}
        answers = [self._stacks(rank, sent.get(rank.incarnation)) for rank in ranks]
        if all(answer.evidence is None for answer in answers):
            raise Problem(409, "rank-unresponsive", answers[0].refused, Retry_After="1")
        return schema.StacksAsked(answers)

    def clear(self) -> tuple[int, int]:
        """Remove all artifacts; return the numbers of removed and hidden."""
        return self._store.clear()

    def review(self, snapshot: Snapshot) -> None:
        """Request the stacks of all ranks of a run once one begins to hang; remove commands of ended ranks."""
        runs = {(rank.job_name, rank.run_id) for rank in snapshot.ranks if rank.state == "hung"}
        hung = {rank.incarnation: rank for rank in snapshot.ranks if rank.up and (rank.job_name, rank.run_id) in runs}
        for incarnation, rank in hung.items():
            if self._hung.get(incarnation, 0) != rank.view.last_step_ns:
                with contextlib.suppress(Problem):
                    self._send([rank], Command(stacks=True))
                    _log.warning("rank %s is hung, or a peer: its stacks are asked for", rank.rank)
        self._hung = {incarnation: rank.view.last_step_ns for incarnation, rank in hung.items()}
        stale = self._stale(snapshot)
        with contextlib.suppress(OSError), self._directory() as directory_fd:
            for incarnation in stale:
                control.remove(directory_fd, bytes.fromhex(incarnation))
        self._commanded -= stale
        self._cleared = {rank.incarnation for rank in snapshot.ranks if not rank.up}

    def due(self, snapshot: Snapshot) -> bool:
        """Return whether :meth:`review` has anything to do."""
        return any(rank.state == "hung" for rank in snapshot.ranks) or bool(self._stale(snapshot))

    def _stale(self, snapshot: Snapshot) -> set[str]:
        """Return the incarnations that may have a control file, and have ended or been replaced."""
        ended = {rank.incarnation for rank in snapshot.ranks if not rank.up}
        return (self._commanded - {rank.incarnation for rank in snapshot.ranks if rank.up}) | (ended - self._cleared)

    def asked(self, ranks: Iterable[Rank], identifier: str) -> Rank | None:
        """Return the rank with that artifact as its newest request of a kind."""
        with contextlib.suppress(OSError), self._directory() as directory_fd:
            for rank in ranks:
                if identifier in {_requested(directory_fd, rank, kind).id for kind in (STACKS, PROFILE)}:
                    return rank
        return None

    def _stacks(self, rank: Rank, command: int | None) -> Answer:
        flight, evidence, refused = _flight(rank), None, None
        if command is not None:
            evidence = link(artifacts.named(flight, STACKS, command))
        elif self._store.has(stuck := artifacts.named(flight, STUCK, 0)):  # written by itself, as it is stuck
            evidence = link(stuck)
        else:
            refused = (
                f"Rank {rank.rank} does not respond and has written no stacks down. If it holds Python's lock it does so "
                "within 3 s: ask again. Else it is stopped (send it SIGCONT), waits for a device without end, or is being torn "
                "down."
            )
        return schema.StacksOf(**named(rank), command=command, evidence=evidence, refused=refused)

    def _send(self, ranks: Iterable[Rank], command: Command) -> list[Answer]:
        try:
            with self._directory(create=True) as directory_fd:
                return [self._write(directory_fd, rank, command) for rank in ranks]
        except OSError as problem:
            self.failures += 1
            reason = problem.strerror or str(problem)
            _log.error("a command could not be written: %s", reason)
            detail = f"The control directory cannot be written ({reason}): set --control.dir to one that trainers read as well."
            raise Problem(503, "no-control-directory", detail) from problem

    def _write(self, directory_fd: int, rank: Rank, command: Command) -> Answer:
        if command.stacks and (unread := _requested(directory_fd, rank, STACKS)).number > rank.view.live.command:
            return schema.Told(**named(rank), command=unread.number)
        number = control.write_command(directory_fd, bytes.fromhex(rank.incarnation), command)
        self._commanded.add(rank.incarnation)
        return schema.Told(**named(rank), command=number)

    @contextlib.contextmanager
    def _directory(self, *, create: bool = False) -> Iterator[int]:
        """Open the control directory. Raises ``OSError``."""
        flight_dir = find_existing(self._config.flight_dir, self._config.runtime_dir)
        if flight_dir is None:
            raise FileNotFoundError("the flight directory is not there yet")
        path = Path(control_directory(self._config.control_dir, flight_dir))
        if create:
            path.mkdir(mode=0o755, exist_ok=True)
        with opened(path) as directory_fd:
            yield directory_fd


def _requested(directory_fd: int, rank: Rank, kind: str) -> ArtifactName:
    """Return the artifact of the rank's newest request of a kind; its number is 0 if there is none. Raises ``OSError``."""
    record = control.read_command(directory_fd, bytes.fromhex(rank.incarnation)) or Command()
    return artifacts.named(_flight(rank), kind, record.stacks_seq if kind == STACKS else record.profile_seq)


def _flight(rank: Rank) -> str:
    return file_name(rank.view.header)
