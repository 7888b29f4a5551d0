"""Reports on ranks from flight files, damaged ones as far as possible, and the choice of a run among the files."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from torchobs import catalog
from torchobs.config import settings
from torchobs.config.launchers import LAUNCHED_BY
from torchobs.flight import artifacts, endings, reader
from torchobs.flight.artifacts import PROFILE, ArtifactName
from torchobs.flight.directory import find_existing, in_memory, opened
from torchobs.flight.files import file_name, lock_name
from torchobs.flight.layout import HEADER_SIZE, Header, Region, decode_header
from torchobs.flight.reader import FlightFile, View
from torchobs.flight.step_record import StepRecord
from torchobs.flight.throughput import pace
from torchobs.ranks import state as rank_state
from torchobs.ranks.events import events_of
from torchobs.ranks.rank_file import NOW_NS, READ_ERRORS, Now, RankCandidate, RankFile, open_tracked, read_claim, resolve
from torchobs.ranks.rank_view import RankView, Recorded, missing_records, steps_of, view_of
from torchobs.ranks.scanner import system_clock
from torchobs.ranks.snapshot import Readings, readings_of
from torchobs.support import text as text_format

_FEW = 16
_STEPS_OF_MANY = 1024
_SIZE_AT = slice(16, 24)
_SILENT = frozenset({"lost", "out_of_memory", "crashed", "terminated"})
"""Ends before which a rank may have had no time to write"""
_MOST_LISTED = 12


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\(most recent call first\):\n((?:  [^\n]*\n?)*)")
_MAIN = re.compile(r"^# Thread 0x([0-9a-f]+) is 'MainThread'$", re.MULTILINE)


class ReadableFile(NamedTuple):
    """A readable flight file and the rank that it claims to be."""

    path: Path
    header: Header
    claim: RankCandidate
    last_s: float
    """its last sign of life, Unix time"""


class RunFiles(NamedTuple):
    """The readable flight files of one run."""

    job_name: str
    run_id: str
    files: list[ReadableFile]

    @property
    def last_s(self) -> float:
        """Its last sign of life, Unix time."""
        return max(file.last_s for file in self.files)

    @property
    def lives(self) -> bool:
        """Whether one of its processes lives."""
        return any(file.claim.alive_ns == NOW_NS for file in self.files)

    def newest(self, apart: Collection[str] = ()) -> tuple[dict[Path, str], list[Path]]:
        """Return the newest incarnations in order of rank, with their ranks' suffixes, and the earlier ones, oldest first.

        ``apart``: incarnations to leave out.
        """
        files = [file for file in self.files if file.claim.incarnation not in apart]
        last = resolve(file.claim for file in files)
        others = sorted((file for file in files if file.claim.incarnation not in last), key=lambda file: file.header.wall_ns)
        chosen = [(file, last[file.claim.incarnation]) for file in files if file.claim.incarnation in last]
        chosen.sort(key=lambda pair: (len(pair[0].claim.rank[2]), pair[0].claim.rank[2], pair[1]))
        return {file.path: suffix for file, suffix in chosen}, [file.path for file in others if file.claim.alive_ns != NOW_NS]


class Listing(NamedTuple):
    """Contents of a directory: its runs, the latest first, the unreadable files with reasons, and how many are left out."""

    runs: list[RunFiles]
    bad: list[tuple[str, str]]
    left_out: int = 0

    @property
    def notes(self) -> list[str]:
        """A sentence about the files that are not read, if there are any."""
        if not self.left_out:
            return []
        more = text_format.plural(self.left_out, "more flight file")
        return [f"{more} in this directory: {reader.MAX_FILES:,} are read, those of living ranks first, then the newest"]


def listing(directory: Path) -> Listing:
    """Read the headers of all flight files in a directory. Raises ``OSError`` when it cannot be read."""
    runs: dict[tuple[str, ...], RunFiles] = {}
    bad = []
    now = system_clock()
    with opened(directory, link=True) as fd:
        names, left_out = reader.list_names(fd)
        for name in names:
            try:
                with closing(reader.open_file(fd, name)) as file:
                    header, claim = file.header, read_claim(file, fd, name, now)
            except READ_ERRORS as problem:
                bad.append((name, reason(problem)))
                continue
            last_s = header.wall_s(claim.heartbeat_ns or header.monotonic_ns)
            run = runs.setdefault(claim.rank[:2], RunFiles(*claim.rank[:2], []))
            run.files.append(ReadableFile(directory / name, header, claim, last_s))
    return Listing(sorted(runs.values(), key=lambda run: -run.last_s), bad, left_out)


def load(
    paths: Iterable[Path], limit: int | None = None, *, evidence: bool = True
) -> tuple[list[RankView], list[tuple[str, str]]]:
    """Read flight files; ``limit``: most step records per file, ``evidence``: with their artifacts.

    Returns the ranks, and the unreadable files with reasons. Ranks that may just have died are read again together, half a
    second later, when their death is certain.
    """
    reads = {path: _inspect(path, limit) for path in paths}
    fading = [path for path, read in reads.items() if read[1] is True]
    if fading:
        time.sleep(rank_state.FADED_AFTER_S)
        reads |= {path: _inspect(path, limit) for path in fading}
    views = {path: view for path, (view, _) in reads.items() if view is not None}
    if evidence:
        left = {directory: _left(directory) for directory in {path.parent for path in views}}
        views = {path: _with_artifacts(view, path.parent, left[path.parent]) for path, view in views.items()}
    bad = [(path.name, why) for path, (_, why) in reads.items() if isinstance(why, str)]
    return rank_state.with_patience([*views.values()], lambda view: view.phase), bad


def _inspect(path: Path, limit: int | None) -> tuple[RankView | None, bool | str]:
    """Return the view of a file, and whether its rank is probably dead, to be confirmed by another read; or why there is none.

    A copy, a truncated file or one behind a link is read as far as possible; ``problems`` lists the missing parts.
    """
    now = system_clock()
    try:
        with opened(path.parent, link=True) as fd:
            try:
                tracked = open_tracked(fd, path.name, None, now)
            except READ_ERRORS:
                return _salvage(path, limit, now), False
            with closing(tracked.file):
                tracked.observe(fd, now, None)
                view = _view(tracked, path.name, limit, now)
                if view.same_boot and not path.with_name(lock_name(path.name)).exists():  # of `cp`, which keeps its name
                    view = replace(view, copied=True)
                return view, tracked.fading
    except READ_ERRORS as problem:
        return None, reason(problem)


def reason(problem: BaseException) -> str:
    """Return the problem of a file, for people."""
    if isinstance(problem, OSError):
        return text_format.clean(problem.strerror or problem)
    return text_format.clean(problem) or type(problem).__name__


def _salvage(path: Path, limit: int | None, now: Now) -> RankView:
    """Read a private copy, padded with zeros to the size in its header."""
    with path.open("rb") as original:
        raw, there = original.read(HEADER_SIZE), os.fstat(original.fileno()).st_size
        header = decode_header(raw, int.from_bytes(raw[_SIZE_AT], "little"))
        raw += original.read(header.file_size - HEADER_SIZE)
    problems = []
    if cut := there != header.file_size:
        problems.append(f"{there:,} of {header.file_size:,} bytes are there")
    if path.is_symlink() or path.name != file_name(header) or not path.with_name(lock_name(path.name)).exists():
        problems.append("a copy: whether its process still runs cannot be seen from it")
    with closing(FlightFile(_copy(raw.ljust(header.file_size, b"\0")), header)) as file:
        tracked = RankFile(file, path.name, now, None)
        # a copy has no lock: it counts as dead, however recent its heartbeat
        tracked.same_boot = False
        tracked.observe(-1, now, None)
        report = _view(tracked, path.name, limit, now)
        return replace(report, problems=(*problems, *report.problems), copied=bool(problems), partial=cut or report.partial)


def _copy(raw: bytes) -> int:
    """Return the descriptor of an unnamed file with these bytes, in memory, as a pod may have no writable directory."""
    with open(_nameless(), "wb") as copy:
        copy.write(raw)
        copy.flush()
        return os.dup(copy.fileno())


def _nameless() -> int:
    with suppress(OSError, AttributeError):  # not Linux
        return os.memfd_create("torchobs-inspect")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _view(tracked: RankFile, source: str, limit: int | None, now: Now) -> RankView:
    live, header, records = tracked.view.live, tracked.header, tracked.file.steps(limit)
    rank, share = tracked.served("", now), tracked.file.forward_share()
    readings = readings_of(rank)
    recorded = Recorded(steps_of(records, header), pace(records, share), events_of(tracked.file.events()), share)
    problems = () if rank.up else _damage(tracked.view, readings, records, limit)
    end_known = rank.up or live.exit_reason is not None or live.heartbeat_ns is not None
    view = view_of(rank, readings, recorded)
    return replace(
        view,
        reason=rank.reason if end_known else "",
        beat_age_s=0.0,  # as of its last sign of life
        progress_age_s=max(0.0, view.last_s - view.progress_s),
        source=text_format.clean(source),
        problems=problems,
        same_boot=tracked.same_boot,
        rebooted=not tracked.same_boot and tracked.header.resource.get("host") == os.uname().nodename,
        details=tracked.file.details(),
        history=tracked.file.history(),
        partial=bool(problems),
        end_known=end_known,
    )


def _damage(view: View, readings: Readings, records: Sequence[StepRecord], limit: int | None) -> tuple[str, ...]:
    """Return the parts of a dead rank's file that are missing or damaged. A rank writes the first two at its start."""
    problems = []
    if view.live.heartbeat_ns is None:
        problems.append("its last signs of life are damaged or missing")
    if readings.get(catalog.STEPS) is None:
        problems.append("its totals are damaged or missing")
    room = view.header.regions[Region.STEPS].count
    missing = missing_records(records, room if limit is None or len(records) < limit else limit, readings)
    if missing:
        verb = "is" if missing == 1 else "are"
        problems.append(f"{text_format.plural(missing, 'step record')} {verb} damaged or missing")
    return tuple(problems)


def _left(directory: Path) -> dict[str, list[ArtifactName]]:
    """Return the non-empty artifacts in a directory by flight file."""
    left: dict[str, list[ArtifactName]] = {}
    with suppress(OSError), opened(directory, link=True) as fd:  # artifacts are optional
        for artifact in artifacts.names(fd):
            with suppress(OSError):
                artifacts.read_status(fd, artifact, None)
                left.setdefault(artifact.flight, []).append(artifact)
    return left


def _with_artifacts(report: RankView, directory: Path, left: Mapping[str, Sequence[ArtifactName]]) -> RankView:
    names = sorted(left.get(file_name(report.header), ()), key=lambda name: (name.kind, name.number))
    dump = _stacks(directory, names, report)
    silent = report.reason in _SILENT and not report.events_named(catalog.EVENT_RUN_END)
    # where the file lies now, perhaps as a copy, counts only if its header does not say where it was
    unwritten = silent and not (in_memory(directory) if report.header.in_memory is None else report.header.in_memory)
    return replace(report, left=tuple(names), frames=main_frames(dump), unwritten=unwritten)


def _stacks(directory: Path, left: Sequence[ArtifactName], report: RankView) -> str:
    """Return the latest stacks written after the rank's last step; empty if there are none."""
    since_ms = 1e3 * report.progress_s
    dumps = [name for name in left if name.kind != PROFILE and (not name.number or name.number >= since_ms)]
    with suppress(OSError):  # artifacts are optional
        if dumps:
            newest = max(dumps, key=lambda name: name.number or inf)
            with opened(directory, link=True) as directory_fd:
                fd, size = artifacts.open_checked(directory_fd, newest, None)
            with os.fdopen(fd, "rb") as file:
                return file.read(size).decode(errors="replace")
    return ""


class NoRunError(ValueError):
    """There is no such run; the message lists the others."""


class Chosen(NamedTuple):
    """A run's ranks, unreadable files, launchers, and notes on other runs."""

    ranks: list[RankView]
    bad: list[tuple[str, str]]
    notes: list[str]
    launchers: list[RankView]
    """processes that only started the ranks"""
    before: Mapping[str, RankView] = MappingProxyType({})
    """the attempt before of ranks that failed, by rank"""


def choose(paths: Sequence[Path], run: str | None) -> Chosen:
    """Read the files; of a directory with several runs the requested one, by default the latest.

    ``run``: a run_id, a job's name, or the beginning of a run_id; of several that match the latest is read.
    Raises :class:`NoRunError`, or ``OSError`` for a directory that cannot be read.
    """
    ranks, bad = load(path for path in paths if not path.is_dir())
    notes: list[str] = []
    launchers: list[RankView] = []
    before: dict[str, RankView] = {}
    others: list[RunFiles] = []
    for path in paths:
        if path.is_dir():
            listed = listing(path)
            bad += listed.bad
            wanted = listed.runs[at] if (at := named([item[:2] for item in listed.runs], run)) is not None else None
            others = [item for item in listed.runs if item is not wanted]
            if wanted is not None:
                more = _read(wanted)
                before |= more.before
                ranks, bad, launchers, notes = (
                    ranks + more.ranks,
                    bad + more.bad,
                    launchers + more.launchers,
                    notes + more.notes,
                )
            names = ", ".join(text_format.clean(other.run_id, 60) for other in others[2::-1])
            notes += [f"{text_format.plural(len(others), 'other run')} in this directory: --run {names}"] if others else []
            notes += listed.notes
    if not ranks:
        raise NoRunError(_nothing(paths, bad, run, others))
    return Chosen(ranks, bad, notes, launchers, before)


def _read(run: RunFiles) -> Chosen:
    """Read the newest attempt of a run's ranks, and the processes that only started ranks."""
    starters = {file.header.resource.get(LAUNCHED_BY) for file in run.files}
    read, _ = load(file.path for file in run.files if file.claim.incarnation in starters)
    launchers = [view for view in read if not view.last_step and not view.partial]
    suffixes, earlier = run.newest({view.incarnation for view in launchers})
    ranks, bad = load(suffixes, _STEPS_OF_MANY if len(suffixes) > _FEW else None)
    by_name = {path.name: suffix for path, suffix in suffixes.items()}
    ranks = [replace(view, rank=view.rank + by_name.get(view.source, "")) for view in ranks]
    names = ", ".join(path.name for path in earlier[-3:])
    notes = [f"{text_format.plural(len(earlier), 'earlier attempt')} of these ranks: inspect {names}"] if earlier else []
    rank_of = {file.path: file.claim.rank[2] for file in run.files}
    last = {rank_of[path]: path for path in earlier}
    failed = sorted((view for view in ranks if view.state not in {"alive", "finished"}), key=lambda view: view.last_s)
    attempts, _ = load([last[view.rank] for view in failed if view.rank in last][:_FEW], _FEW)
    return Chosen(ranks, bad, notes, launchers, {view.rank: view for view in attempts})


def named(names: Sequence[tuple[str, str]], wanted: str | None) -> int | None:
    """Return the index of the ``wanted`` run; ``names``: each run's job and run_id, the latest first. ``None``: there is none.

    The first with that run_id, else of a job of that name, else with a run_id that begins so.
    """
    if wanted is None:
        return 0 if names else None
    tests = (
        [at for at, (_, run_id) in enumerate(names) if run_id == wanted],
        [at for at, (job_name, _) in enumerate(names) if job_name == wanted],
        [at for at, (_, run_id) in enumerate(names) if run_id.startswith(wanted)],
    )
    return next((indices[0] for indices in tests if indices), None)


def default_directory() -> Path:
    """Return the directory that this user's trainings write to. Raises :class:`NoRunError` when there is none."""
    chosen, _ = settings.resolve({})
    path = find_existing(str(chosen.flight_dir) if chosen.flight_dir else None, settings.environment().get("XDG_RUNTIME_DIR"))
    if path is None:
        raise NoRunError("there is no flight directory yet: `torchobs run train.py` creates one, `torchobs doctor` shows where")
    return Path(path)


def _nothing(paths: Sequence[Path], bad: Sequence[tuple[str, str]], wanted: str | None, runs: Sequence[RunFiles]) -> str:
    if bad:
        return f"nothing readable: {'; '.join(f'{text_format.clean(name)}: {why}' for name, why in bad[:5])}"
    where = text_format.joined([text_format.clean(path) for path in paths])
    if wanted is None:
        return f"no flight files in {where}: a training writes them with torchobs.init() or `torchobs run train.py`"
    lines = [
        f"  {text_format.clean(run.run_id)}  {text_format.clean(run.job_name)}  last seen {text_format.moment(run.last_s)}"
        for run in runs[:_MOST_LISTED]
    ]
    lines += [f"  and {len(runs) - _MOST_LISTED:,} more: torchobs runs"] if len(runs) > _MOST_LISTED else []
    there = "; these are there:\n" + "\n".join(lines) if runs else ""
    return f"no run {text_format.clean(wanted)!r} in {where}{there}"


def main_frames(dump: str) -> tuple[str, ...]:
    """Return the main thread's frames as ``file:line in function``, the innermost first; at most 64.

    Without the header, as in stacks of a rank that held the GIL, the main thread is the last: ``faulthandler`` ends with it.
    """
    threads = [(int(match[1], 16), match[2]) for match in _THREAD.finditer(dump)]
    if not threads:
        return ()
    named = _MAIN.search(dump)
    main = next((body for number, body in threads if named and number == int(named[1], 16)), threads[-1][1])
    return endings.frames_of(main)
