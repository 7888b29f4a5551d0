"""Scanner: reads every flight file in the directory into one snapshot.

Files that appear, grow, vanish, are replaced, of another version, half-written or garbage are served or counted as bad; a scan
never fails. Not thread-safe: one thread scans (``exporter.snapshot_cache``); any thread may use a snapshot.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.config.identity import boot_id
from torchobs.flight import files, reader
from torchobs.flight.directory import KUBERNETES_MOUNT, find_existing, open_directory
from torchobs.flight.files import lock_name
from torchobs.flight.reader import MAX_FILES
from torchobs.ranks import rank_file
from torchobs.ranks.comparison import RankComparator
from torchobs.ranks.rank_file import READ_ERRORS, Now, RankFile, is_passing, open_tracked, resolve
from torchobs.ranks.snapshot import REASONS, STATUSES, Rank, Snapshot
from torchobs.ranks.state import with_patience
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torchobs.exporter.config import ExporterConfig
    from torchobs.flight.reader import FlightFile
    from torchobs.ranks.rank_file import RankCandidate


class ForeignDirectoryError(OSError):
    """The directory belongs to another user, and this process is root."""


def accepted_owner(config: ExporterConfig, path: str, uid: int) -> int | None:
    """Return the uid that owns all files that are read, or ``None`` for any.

    A pod's volume holds files of any uid that the trainer has. Elsewhere root reads its own files only, and so does a node's
    exporter; for another user the file system's permissions decide.
    """
    if config.allow_foreign_owner or path == KUBERNETES_MOUNT:
        return None
    return uid if uid == 0 or config.mode == "node" else None


class Directory:
    """The present flight directory. ``fd`` is -1 while there is none."""

    def __init__(self, config: ExporterConfig, uid: int | None = None) -> None:
        self._config = config
        self._uid = os.geteuid() if uid is None else uid
        self.fd = -1
        self.path = ""
        self.owner: int | None = None
        self.left_out = 0
        """number of flight files beyond those that are listed"""

    def names(self) -> list[str]:
        """Return the names of the flight files (``reader.list_names``). Raises ``OSError`` if there is no directory to read."""
        self.open()
        try:
            names, self.left_out = reader.list_names(self.fd)
        except OSError as problem:
            problem.filename = self.path
            raise
        return names

    def close(self) -> None:
        """Close the directory. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def open(self) -> None:
        """Open the directory, again if its path leads to another one by now. Raises ``OSError``."""
        path = find_existing(self._config.flight_dir, self._config.runtime_dir)
        if path is None:
            self.close()
            hint = "" if self._config.flight_dir else f" (in a pod: a volume at {KUBERNETES_MOUNT})"
            raise FileNotFoundError(f"{self._config.flight_dir or 'the flight directory'} is not there yet{hint}")
        if self.fd >= 0 and path == self.path and os.path.samestat(Path(path).lstat(), os.fstat(self.fd)):
            return
        self.close()
        fd = open_directory(path)
        status = os.fstat(fd)
        owner = accepted_owner(self._config, path, self._uid)
        if self._uid == 0 and owner == 0 and status.st_uid != 0:
            os.close(fd)
            msg = (
                f"{path} belongs to uid {status.st_uid} and this exporter is root, which needs --allow-foreign-owner to read it"
            )
            raise ForeignDirectoryError(msg)
        self.fd, self.path, self.owner = fd, path, owner


END_S = 5.0
"""Seconds by which a pod's grace is longer than its exporter's drain timeout, as the injection sets it"""
_LATE_KILL_S = 30.0
"""Seconds after the grace in which a busy node kills the rest of a pod"""

OPENING_S = 1.0
"""Limit on the CPU time for new files per scan: the rest waits for the next, so that no scrape waits for all of them."""
_RETRY_NS = 5_000_000_000
_CLAIMS_NS = 60_000_000_000
_log = logging.getLogger(__name__)


def system_clock() -> Now:
    """Return the machine's clocks."""
    return Now(time.monotonic_ns(), time.time_ns(), _BOOT_ID)


_BOOT_ID = boot_id()


class Scanner:
    """Follows one flight directory."""

    def __init__(self, config: ExporterConfig, clock: Callable[[], Now] = system_clock, series_limit: float = inf) -> None:
        """``series_limit``: once the open files have so many series together, no further one is opened."""
        self._config, self._clock, self._series_limit = config, clock, series_limit
        self._directory = Directory(config)
        self._tracked: dict[str, RankFile] = {}
        self._by_incarnation: dict[str, RankFile] = {}
        self._past: dict[str, RankCandidate] = {}
        """files that are served no more, of dead ranks: they stay candidates, so that no older incarnation is served instead"""
        self._bad: dict[str, int] = {}
        self._errors = Counter(dict.fromkeys(REASONS, 0))
        self._duplicates: set[str] = set()
        self._number = self._opened = self._left_out = 0
        self._claims = RateLimiter(_CLAIMS_NS)
        self._comparator = RankComparator()

    def scan(self) -> Snapshot:
        """Scan the directory and return a snapshot."""
        began, now = time.perf_counter(), self._clock()
        self._number += 1
        names, problems = self._names()
        if names is not None:
            self._warn_left_out(self._directory.left_out)
            self._forget(names)
            self._open_new(names, now)
        for tracked in self._tracked.values():
            self._observe(tracked, now)
        ranks, left, files = self._select(now)
        self._by_incarnation = {tracked.incarnation: tracked for tracked in self._tracked.values()}
        standings, runs = self._comparator.compare(ranks, now.monotonic_ns)
        return Snapshot(
            number=self._number,
            taken_ns=now.monotonic_ns,
            ranks=tuple(replace(rank, standing=standings.get(rank.incarnation)) for rank in ranks),
            files=files,
            errors=dict(self._errors),
            duplicates=len(self._duplicates),
            problems=problems,
            fading=any(tracked.fading for tracked in self._tracked.values()),
            duration_s=time.perf_counter() - began,
            runs=runs,
            left=left,
        )

    @contextmanager
    def flight_file(self, incarnation: str) -> Iterator[FlightFile]:
        """Give access to the file of a served rank: the open one, or the file reopened if the rank is dead.

        Raises one of :data:`READ_ERRORS` if it is unreadable or gone.
        """
        tracked = self._by_incarnation.get(incarnation)
        if tracked is None:
            raise FileNotFoundError(incarnation)
        with tracked.access(self._directory.fd) as file:
            yield file

    def close(self) -> None:
        """Close every file and the directory. Idempotent."""
        self._forget([])
        self._directory.close()

    def _names(self) -> tuple[list[str] | None, tuple[str, ...]]:
        """Return the names and the problems; ``None``: the directory cannot be listed now, and known ranks are kept."""
        try:
            return self._directory.names(), self._config.problems
        except (OSError, MemoryError) as problem:
            _log.error("flight directory: %s", _text(problem))
            return None if is_passing(problem) else [], (*self._config.problems, _text(problem))

    def _forget(self, names: list[str]) -> None:
        for name in self._tracked.keys() - set(names):
            self._tracked.pop(name).release()
        for name in self._past.keys() - set(names):
            del self._past[name]
        for name in self._bad.keys() - set(names):
            del self._bad[name]

    def _open_new(self, names: list[str], now: Now) -> None:
        for name, tracked in list(self._tracked.items()):
            try:
                tracked.follow(self._directory.fd)
            except READ_ERRORS as problem:
                if not is_passing(problem):
                    self._tracked.pop(name).release()  # reopened below and then served or counted as bad
        until_s = time.thread_time() + OPENING_S
        new = [name for name in names if not (name in self._tracked or name in self._past or name in self._bad)]
        new.sort(key=lambda name: not rank_file.is_held(self._directory.fd, lock_name(name)))  # those of living ranks first
        due = [name for name, retry_ns in self._bad.items() if retry_ns <= now.monotonic_ns]
        series = sum(tracked.file.size for tracked in self._tracked.values())
        for name in chain(new, due):
            series += self._open(name, series, now)
            if time.thread_time() > until_s:
                break

    def _warn_left_out(self, left_out: int) -> None:
        if left_out and not self._left_out:
            _log.warning(
                "flight directory: %d flight files are left out: %d are read, those of living ranks first, then the newest",
                left_out,
                MAX_FILES,
            )
        self._left_out = left_out

    def _open(self, name: str, series: int, now: Now) -> int:
        """Open a file beside others of so many series; return how many it has, 0 if it cannot be served."""
        directory = self._directory
        try:
            if series >= self._series_limit:
                msg = f"no memory for more than the {series} series of the files that are open"
                raise MemoryError(msg)
            tracked = open_tracked(directory.fd, name, directory.owner, now)
            self._opened += 1
            self._tracked[name], tracked.opened = tracked, self._opened
            self._bad.pop(name, None)
        except READ_ERRORS as problem:
            self._refuse(name, problem, now)
            return 0
        return tracked.file.size

    def _refuse(self, name: str, problem: BaseException, now: Now) -> None:
        """Count a file as bad, unless it was removed since the listing."""
        if isinstance(problem, FileNotFoundError):
            self._bad.pop(name, None)
            return
        self._bad[name] = now.monotonic_ns + _RETRY_NS
        self._errors[_reason(problem, self._directory.fd, name, self._directory.owner)] += 1
        _log.warning("flight file not served: %s: %s", name, _text(problem))

    def _observe(self, tracked: RankFile, now: Now) -> None:
        try:
            killed_by_s = self._config.drain_timeout_s + END_S + _LATE_KILL_S
            tracked.observe(self._directory.fd, now, self._config.hang_timeout_s, killed_by_s)
        except READ_ERRORS as problem:
            self._errors[_kind(problem)] += 1
            _log.warning("flight file could not be read again: %s: %s", tracked.name, _text(problem))
        if tracked.up:
            tracked.ended_in = None
        elif tracked.ended_in is None:
            tracked.ended_in = self._number
        if tracked.certainly_dead(now):
            tracked.release()

    def _select(self, now: Now) -> tuple[tuple[Rank, ...], tuple[Rank, ...], dict[str, int]]:
        suffixes = resolve(chain((tracked.candidate() for tracked in self._tracked.values()), self._past.values()))
        files = dict.fromkeys(STATUSES, 0) | {"bad": len(self._bad), "left_out": self._left_out}
        for candidate in self._past.values():
            files["expired" if candidate.incarnation in suffixes else "superseded"] += 1
        ranks, left = [], []
        for name, tracked in [*self._tracked.items()]:
            status = self._status(tracked, suffixes, now)
            files[status] += 1
            if status == "served":
                tracked.suffix = suffixes[tracked.incarnation]
                tracked.displaced = tracked.suffix != ""
                ranks.append(self._rank(tracked, tracked.suffix, now))
                continue
            tracked.displaced = tracked.suffix is not None
            if status == "superseded" and (suffix := tracked.final_suffix(now)) is not None:
                left.append(self._rank(tracked, suffix, now))
            elif tracked.certainly_dead(now):
                self._tracked.pop(name).release()
                self._past[name] = tracked.candidate()
        waited = with_patience(ranks, lambda rank: rank.view.live.phase)
        in_order = sorted(waited, key=lambda rank: (rank.job_name, rank.run_id, len(rank.rank), rank.rank))
        return tuple(in_order), tuple(left), files

    def _status(self, tracked: RankFile, suffixes: Mapping[str, str], now: Now) -> str:
        if tracked.incarnation not in suffixes:
            return "superseded"
        return "expired" if not tracked.up and tracked.beat_age_s(now) > self._config.grace_s else "served"

    def _rank(self, tracked: RankFile, suffix: str, now: Now) -> Rank:
        if suffix and tracked.incarnation not in self._duplicates:
            self._duplicates.add(tracked.incarnation)
            if self._claims.take(now.monotonic_ns, tracked.rank):  # one that fails and is restarted again and again
                twice = "two living processes claim one rank: job %s, run %s, rank %s; the younger is rank %s"
                _log.warning(twice, *tracked.rank, tracked.rank[2] + suffix)
        return tracked.served(suffix, now)


def _reason(problem: BaseException, directory_fd: int, name: str, owner: int | None) -> str:
    """Return the matching one of :data:`REASONS`; the reader's message is for people."""
    try:
        status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except OSError:
        return "io"
    if not files.is_plain(status, owner):
        return "kind"
    return _kind(problem)


def _kind(problem: BaseException) -> str:
    if isinstance(problem, MemoryError):
        return "memory"
    return "io" if isinstance(problem, OSError) else "header"


def _text(problem: BaseException) -> str:
    if isinstance(problem, OSError):
        return f"{problem.strerror or problem}" if problem.filename is None else f"{problem.strerror}: {problem.filename}"
    return f"{problem}" or "out of memory"
