"""Send commands to ranks through the control directory, which their sampler threads read ten times a second."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.exporter.api.artifacts import link
from torchobs.exporter.api.problems import Problem
from torchobs.exporter.api.serializers import named
from torchobs.flight.files import artifacts, control, location
from torchobs.flight.files.artifacts import PROFILE, STACKS
from torchobs.flight.files.control import Command
from torchobs.flight.files.create import file_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchobs.exporter.api.artifacts import ArtifactStore
    from torchobs.exporter.config import ExporterConfig
    from torchobs.flight.files.artifacts import ArtifactName
    from torchobs.ranks.snapshot import Rank, Snapshot

_FORGOTTEN_S = 3600.0
"""Age, in seconds, at which commands of an earlier exporter are removed."""

UNREAD_NS = 200_000_000
"""A request younger than this may be unread, twice the ranks' polling interval; a later one would replace it."""

MOST_OWNERS = 1000
"""Most requested artifacts for which the rank is remembered."""

_log = logging.getLogger(__name__)


class _Request(NamedTuple):
    """A rank's last request of a kind: the artifact expected from it, and when the request was written."""

    evidence: ArtifactName
    sent_ns: int


class CommandService:
    """Writes commands. To be used in one thread, except ``due``."""

    def __init__(self, config: ExporterConfig, store: ArtifactStore) -> None:
        self._config, self._store = config, store
        self._commanded: set[str] = set()
        """incarnations with a command in the control directory"""
        self._hung: dict[str, int | None] = {}
        """time of the last step of each rank of a hung run, whose stacks are asked for"""
        self._owners: dict[str, str] = {}
        """incarnation asked for each artifact"""
        self._requests: dict[tuple[str, str], _Request] = {}
        self._cleaned = False
        self.failures = 0
        """number of commands that could not be written"""

    def level(self, ranks: Iterable[Rank], level: int) -> dict[str, Any]:
        """Set the ranks' observability level. Raises ``Problem``."""
        return {"level": control.LEVELS[level], "ranks": self._send(ranks, Command(level=level))}

    def probes_off(self, ranks: Iterable[Rank], mask: int, off: list[str]) -> dict[str, Any]:
        """Switch exactly these probes off, and all others on. Raises ``Problem``."""
        return {"off": off, "ranks": self._send(ranks, Command(probes_off=mask))}

    def profile(self, rank: Rank, steps: int) -> dict[str, Any]:
        """Request a profile of that many steps of a rank. Raises ``Problem``."""
        if rank.state == "unresponsive":
            raise Problem(409, "rank-unresponsive", f"Rank {rank.rank} does not respond: ask for its stacks instead.")
        if rank.view.live.level == 0:
            raise Problem(409, "rank-off", f"Rank {rank.rank} is at the level off: POST /api/v1/debug/level/basic first.")
        if (unread := self._unread(rank, PROFILE)) is not None:
            detail = f"Rank {rank.rank} was asked for one a moment ago, which will be evidence {unread.id}: ask again after it."
            raise Problem(409, "profile-asked", detail, Retry_After="1")
        (sent,) = self._send([rank], Command(profile_steps=steps))
        return {"steps": steps, **sent, "evidence": self._expect(rank, PROFILE, sent["command"])}

    def stacks(self, ranks: list[Rank]) -> dict[str, Any]:
        """Request the ranks' stacks; for a stuck rank return those it has written itself. Raises ``Problem``.

        While an earlier request may be unread, its artifact is returned instead: those stacks will be as recent.
        """
        able = [rank for rank in ranks if rank.state != "unresponsive"]
        sent = {one["incarnation"]: one for one in self._send(able, Command(stacks=True))} if able else {}
        answers = [self._stacks(rank, sent.get(rank.incarnation)) for rank in ranks]
        if all(answer["evidence"] is None for answer in answers):
            raise Problem(409, "rank-unresponsive", answers[0]["refused"], Retry_After="1")
        return {"ranks": answers}

    def clear(self) -> tuple[int, int]:
        """Remove all artifacts; return the numbers of removed and hidden."""
        self._requests = {key: sent for key, sent in self._requests.items() if not self._store.has(sent.evidence)}
        return self._store.clear()

    def look(self, snapshot: Snapshot) -> None:
        """Request the stacks of all ranks of runs in which one has just begun to hang; remove commands of ended ranks."""
        runs = {(rank.job_name, rank.run_id) for rank in snapshot.ranks if rank.state == "hung"}
        hung = {rank.incarnation: rank for rank in snapshot.ranks if rank.up and (rank.job_name, rank.run_id) in runs}
        for incarnation, rank in hung.items():
            if self._hung.get(incarnation, 0) != rank.view.last_step_ns:
                with contextlib.suppress(Problem):
                    self._send([rank], Command(stacks=True))
                    _log.warning("rank %s is hung, or a peer: its stacks are asked for", rank.rank)
        self._hung = {incarnation: rank.view.last_step_ns for incarnation, rank in hung.items()}
        for rank in snapshot.ranks:
            if not rank.up and rank.incarnation in self._commanded:
                self._commanded.discard(rank.incarnation)
                for kind in (STACKS, PROFILE):
                    self._requests.pop((rank.incarnation, kind), None)
                with contextlib.suppress(OSError), self._directory() as directory_fd:
                    control.remove(directory_fd, bytes.fromhex(rank.incarnation))

    def due(self, snapshot: Snapshot) -> bool:
        """Return True if :meth:`look` has anything to do."""
        return any(rank.state == "hung" or (not rank.up and rank.incarnation in self._commanded) for rank in snapshot.ranks)

    def owner_of(self, identifier: str) -> str | None:
        """Return the incarnation asked for that artifact, if this exporter did so recently."""
        return self._owners.get(identifier)

    def _expect(self, rank: Rank, kind: str, number: int) -> dict[str, str]:
        expected = artifacts.named(_flight(rank), kind, number)
        self._owners[expected.id] = rank.incarnation
        while len(self._owners) > MOST_OWNERS:
            del self._owners[next(iter(self._owners))]
        return link(expected)

    def _unread(self, rank: Rank, kind: str) -> ArtifactName | None:
        """Return the artifact expected from a request that the rank may not have read yet."""
        request = self._requests.get((rank.incarnation, kind))
        if request is None or self._store.has(request.evidence):
            return None
        is_young = time.monotonic_ns() - request.sent_ns < UNREAD_NS
        # A rank reads commands after each heartbeat, which is late while another thread holds the GIL.
        return request.evidence if is_young or (rank.view.live.heartbeat_ns or 0) < request.sent_ns else None

    def _stacks(self, rank: Rank, sent: dict[str, Any] | None) -> dict[str, Any]:
        flight = _flight(rank)
        if sent is not None:
            return {**sent, "evidence": self._expect(rank, STACKS, sent["command"]), "refused": None}
        answer = {**named(rank), "command": None, "refused": None}
        if (stuck := self._store.stuck(flight)) is not None:
            return {**answer, "evidence": link(stuck)}
        if self._store.is_stopped(flight):
            why = f"Rank {rank.rank} is stopped (SIGSTOP): send it SIGCONT, and ask again."
        else:
            why = (
                f"Rank {rank.rank} does not respond and has written no stacks down. If it holds Python's lock it does so "
                "within 3 s: ask again. Else its process is stopped, waits for a device without end, or is being torn down."
            )
        return {**answer, "evidence": None, "refused": why}

    def _send(self, ranks: Iterable[Rank], command: Command) -> list[dict[str, Any]]:
        try:
            with self._directory() as directory_fd:
                self._clean(directory_fd)
                return [self._write(directory_fd, rank, command) for rank in ranks]
        except OSError as problem:
            raise self._unwritable(problem) from problem

    def _unwritable(self, problem: OSError) -> Problem:
        self.failures += 1
        reason = problem.strerror or str(problem)
        _log.error("a command could not be written: %s", reason)
        detail = f"The control directory cannot be written ({reason}): set --control.dir to one that trainers read as well."
        return Problem(503, "no-control-directory", detail)

    def _write(self, directory_fd: int, rank: Rank, command: Command) -> dict[str, Any]:
        if command.stacks and (unread := self._unread(rank, STACKS)) is not None:
            return {**named(rank), "command": unread.number}
        number = control.write_command(directory_fd, bytes.fromhex(rank.incarnation), command)
        self._commanded.add(rank.incarnation)
        for kind, wanted in ((STACKS, command.stacks), (PROFILE, command.profile_steps)):
            if wanted:
                request = _Request(artifacts.named(_flight(rank), kind, number), time.monotonic_ns())
                self._requests[rank.incarnation, kind] = request
        return {**named(rank), "command": number}

    @contextlib.contextmanager
    def _directory(self) -> Iterator[int]:
        """Open the control directory, created if missing. Raises ``OSError``."""
        flight_dir = location.find_existing(self._config.flight_dir, self._config.runtime_dir)
        if flight_dir is None:
            raise FileNotFoundError("the flight directory is not there yet")
        path = Path(location.control_directory(self._config.control_dir, flight_dir))
        path.mkdir(mode=0o755, exist_ok=True)
        with location.opened(path) as directory_fd:
            yield directory_fd

    def _clean(self, directory_fd: int) -> None:
        """Remove, once, the commands of an earlier exporter to ranks that have ended since."""
        if self._cleaned:
            return
        self._cleaned = True
        for name in os.listdir(directory_fd):
            if name.endswith(control.SUFFIX) or name.startswith(control.TEMPORARY):
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
                    if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _FORGOTTEN_S:
                        os.unlink(name, dir_fd=directory_fd)  # a living rank has read it long ago


def _flight(rank: Rank) -> str:
    return file_name(rank.view.header)
