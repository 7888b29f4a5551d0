"""Reports on ranks from flight files, damaged ones as far as possible, and the choice of a run among the files."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import groupby
from math import inf
from pathlib import Path
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
from torchobs.ranks.rank_file import READ_ERRORS, Now, RankCandidate, RankFile, look_at, open_tracked, resolve
from torchobs.ranks.rank_view import RankView, Recorded, missing_records, steps_of, view_of
from torchobs.ranks.scanner import system_clock
from torchobs.ranks.snapshot import Readings, readings_of
from torchobs.ranks.state import last_memory
from torchobs.support import text as text_format

_FEW = 16
_STEPS_OF_MANY = 1024
_SIZE_AT = slice(16, 24)
_SILENT = frozenset({"lost", "out_of_memory", "crashed", "terminated"})
"""Ends before which a rank may have written nothing any more"""
_MOST_LISTED = 12


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\(most recent call first\):\n((?:  [^\n]*\n?)*)")
_FRAME = re.compile(r'  File "([^"\n]*)", line ([0-9]+|\?\?\?) in ([^\n]*)')
_MAIN = re.compile(r"^# Thread 0x([0-9a-f]+) is 'MainThread'$", re.MULTILINE)
_STACK = "Stack (most recent call first):\n"
_MOST = 64


class LoadedFlight(NamedTuple):
    """A readable flight file and the run it belongs to."""

    path: Path
    header: Header
    claim: RankCandidate
    last_ns: int
    """its last sign of life, Unix time in ns"""
    suffix: str = ""
    """what is appended to its rank, if another living process has that"""


class Listing(NamedTuple):
    """Contents of a directory: readable files, the others with the reason, and how many more are not read."""

    found: tuple[LoadedFlight, ...]
    bad: tuple[tuple[str, str], ...]
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
    found, bad = [], []
    now = system_clock()
    with opened(directory, link=True) as fd:
        names, left_out = reader.list_names(fd)
        for name in names:
            try:
                with closing(reader.open_file(fd, name)) as file:
                    found.append(_found(directory / name, file, fd, now))
            except READ_ERRORS as problem:
                bad.append((name, reason(problem)))
    return Listing(tuple(found), tuple(bad), left_out)


def newest(found: Iterable[LoadedFlight]) -> tuple[list[LoadedFlight], list[LoadedFlight]]:
    """Return each rank's newest incarnation, by rank, and the earlier ones, oldest first. ``found``: files of one run."""
    every = list(found)
    last = resolve(item.claim for item in every)
    chosen = [item._replace(suffix=last[item.claim.incarnation]) for item in every if item.claim.incarnation in last]
    others = [item for item in every if item.claim.incarnation not in last]
    by_rank = sorted(chosen, key=lambda item: (len(item.claim.rank[2]), item.claim.rank[2], item.suffix))
    return by_rank, sorted(others, key=lambda item: item.header.wall_ns)


def load_reports(
    paths: Sequence[Path], limit: int | None = None, *, evidence: bool = True
) -> tuple[list[RankView], list[tuple[str, str]]]:
    """Read flight files; ``limit``: most step records per file, ``evidence``: with their artifacts.

    Returns the reports, and the unreadable files with reasons. Ranks that may just have died are read again together, half a
    second later, when their death is certain.
    """
    left = {directory: _left(directory) for directory in {path.parent for path in paths if evidence}}
    found = [_look(path, limit) for path in paths]
    if any(isinstance(one, _Look) and one.fading for one in found):
        time.sleep(rank_state.FADED_AFTER_S)
        found = [
            _look(path, limit) if isinstance(one, _Look) and one.fading else one for path, one in zip(paths, found, strict=True)
        ]
    told = list(zip(paths, found, strict=True))
    looks = [(path.parent, one.report) for path, one in told if isinstance(one, _Look)]
    reports = [_with(report, directory, left[directory]) if evidence else report for directory, report in looks]
    return rank_state.with_patience(reports, lambda view: view.phase), [
        (path.name, one) for path, one in told if isinstance(one, str)
    ]


def limit_of(count: int) -> int | None:
    """Return how many step records to read per file: the last thousand if there are more than 16 files."""
    return _STEPS_OF_MANY if count > _FEW else None


class _Look(NamedTuple):
    report: RankView
    fading: bool
    """True if probably dead, to be confirmed by another read"""


def _look(path: Path, limit: int | None) -> _Look | str:
    """Return the file's report, or why it is unreadable."""
    try:
        return _look_at(path, limit)
    except READ_ERRORS as problem:
        return reason(problem)


def _look_at(path: Path, limit: int | None) -> _Look:
    """Read one flight file alone.

    A copy, a truncated file or one behind a link is read as far as possible, and ``problems`` lists what is missing.
    Raises ``OSError`` or ``layout.BadFlightFileError`` when nothing is readable.
    """
    now = system_clock()
    with opened(path.parent, link=True) as fd:
        try:
            tracked = open_tracked(fd, path.name, None, now)
        except READ_ERRORS:
            return _Look(_salvage(path, limit, now), fading=False)
        with closing(tracked.file):
            tracked.observe(fd, now, None)
            report = _view(tracked, path.name, limit, now)
            if report.same_boot and not path.with_name(lock_name(path.name)).exists():  # of `cp`, which keeps its name
                report = replace(report, copied=True)
            return _Look(report, tracked.fading)


def reason(problem: BaseException) -> str:
    """Return what is wrong with a file, for people."""
    if isinstance(problem, OSError):
        return text_format.clean(problem.strerror or problem)
    return text_format.clean(problem) or type(problem).__name__


def _salvage(path: Path, limit: int | None, now: Now) -> RankView:
    """Read a private copy, padded with zeros to the size in its header."""
    with path.open("rb") as given:
        raw, there = given.read(HEADER_SIZE), os.fstat(given.fileno()).st_size
        header = decode_header(raw, int.from_bytes(raw[_SIZE_AT], "little"))
        raw += given.read(header.file_size - HEADER_SIZE)
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
    recorded = Recorded(steps_of(records, header), pace(records, share), events_of(tracked.file.events(), header))
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
        memory_use=last_memory(tracked.view),
        details=tracked.file.details(),
        history=tracked.file.history(),
        partial=bool(problems),
        end_known=end_known,
    )


def _damage(view: View, readings: Readings, records: Sequence[StepRecord], limit: int | None) -> tuple[str, ...]:
    """Return what a dead rank wrote and is missing or damaged. A rank writes the first two at its start."""
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
        for one in artifacts.names(fd):
            with suppress(OSError):
                artifacts.look(fd, one, None)
                left.setdefault(one.flight, []).append(one)
    return left


def _with(report: RankView, directory: Path, left: Mapping[str, Sequence[ArtifactName]]) -> RankView:
    own = sorted(left.get(file_name(report.header), ()), key=lambda one: (one.kind, one.number))
    dump, crashed = _stacks(directory, own, report), _crash(directory, report)
    silent = report.reason in _SILENT and not report.events_named(catalog.EVENT_RUN_END)
    # where the file lies now, perhaps a copy, tells only if its header does not
    unwritten = silent and not (in_memory(directory) if report.header.in_memory is None else report.header.in_memory)
    return replace(report, left=tuple(own), frames=main_frames(dump), crash=crashed, unwritten=unwritten)


def _crash(directory: Path, report: RankView) -> tuple[str, ...]:
    """Return the frames in which a rank crashed."""
    if report.reason == "crashed":
        with suppress(OSError), opened(directory, link=True) as fd:  # it is gone by now
            return crash_frames(endings.crash_stack(fd, lock_name(file_name(report.header))))
    return ()


def _stacks(directory: Path, left: Sequence[ArtifactName], report: RankView) -> str:
    """Return the latest stacks written after the rank's last step; empty if there are none."""
    since_ms = 1e3 * report.progress_s
    dumps = [one for one in left if one.kind != PROFILE and (not one.number or one.number >= since_ms)]
    with suppress(OSError):  # artifacts are optional
        if dumps:
            newest = max(dumps, key=lambda one: one.number or inf)
            with opened(directory, link=True) as directory_fd:
                fd, size = artifacts.open_checked(directory_fd, newest, None)
            with os.fdopen(fd, "rb") as file:
                return file.read(size).decode(errors="replace")
    return ""


def _found(path: Path, file: FlightFile, directory_fd: int, now: Now) -> LoadedFlight:
    header, claim = file.header, look_at(file, directory_fd, path.name, now).candidate
    last_ns = header.wall_ns + (claim.heartbeat_ns or header.monotonic_ns) - header.monotonic_ns
    return LoadedFlight(path, header, claim, last_ns)


class NoRunError(ValueError):
    """There is no such run; the message says what there is."""


class Chosen(NamedTuple):
    """A run's ranks, unreadable files, launchers, and notes on other runs."""

    ranks: list[RankView]
    bad: list[tuple[str, str]]
    notes: list[str]
    launchers: list[RankView]
    """processes that only started the ranks"""


class RunFiles(NamedTuple):
    """Readable flight files of one run, of all its ranks and attempts."""

    job_name: str
    run_id: str
    files: tuple[LoadedFlight, ...]

    @property
    def last_ns(self) -> int:
        """Its last sign of life, Unix time in ns."""
        return max(item.last_ns for item in self.files)


def runs_of(found: Iterable[LoadedFlight]) -> list[RunFiles]:
    """Group the files by run, the latest first."""
    ordered = sorted(found, key=lambda item: item.claim.rank[:2])
    made = [
        RunFiles(job_name, run_id, tuple(items))
        for (job_name, run_id), items in groupby(ordered, key=lambda item: item.claim.rank[:2])
    ]
    return sorted(made, key=lambda run: -run.last_ns)


def choose(paths: Sequence[Path], run: str | None) -> Chosen:
    """Read the files; of a directory with several runs the requested one, by default the latest.

    ``run``: a run_id, a job's name, or the beginning of a run_id; of several that match the latest is read.
    Raises :class:`NoRunError`, or ``OSError`` for a directory that cannot be read.
    """
    ranks, bad = load_reports([path for path in paths if not path.is_dir()])
    notes: list[str] = []
    launchers: list[RankView] = []
    others: list[RunFiles] = []
    for path in paths:
        if path.is_dir():
            listed = listing(path)
            bad += listed.bad
            every = runs_of(listed.found)
            wanted = next(iter(every if run is None else _named(every, run)), None)
            others = [one for one in reversed(every) if one is not wanted]
            more = read(wanted.files if wanted else ())
            ranks, bad, launchers = ranks + more.ranks, bad + more.bad, launchers + more.launchers
            names = ", ".join(text_format.clean(other.run_id, 60) for other in others[-3:])
            aside = [f"{text_format.plural(len(others), 'other run')} in this directory: --run {names}"] if others else []
            notes += [*more.notes, *aside, *listed.notes]
    if not ranks:
        raise NoRunError(_nothing(paths, bad, run, others))
    return Chosen(ranks, bad, notes, launchers)


def read(found: Sequence[LoadedFlight]) -> Chosen:
    """Read the newest attempt of a run's ranks."""
    launchers = _launchers(found)
    apart = {report.header.incarnation for report in launchers}
    chosen, earlier = newest(item for item in found if item.header.incarnation not in apart)
    ranks, bad = load_reports([item.path for item in chosen], limit_of(len(chosen)))
    suffixes = {item.header.incarnation: item.suffix for item in chosen}
    ranks = [replace(report, suffix=suffixes.get(report.header.incarnation, "")) for report in ranks]
    names = ", ".join(item.path.name for item in earlier[-3:])
    notes = [f"{text_format.plural(len(earlier), 'earlier attempt')} of these ranks: inspect {names}"] if earlier else []
    return Chosen(ranks, bad, notes, launchers)


def find(wanted: str | None, directory: Path | None = None) -> Chosen:
    """Read the run that a person named: a flight file, a directory, or what :func:`choose` takes. ``None``: the latest run.

    ``directory``: where named runs are looked for, by default where this user's trainings write.
    Raises :class:`NoRunError` when no run matches; ``OSError`` for a directory that cannot be read.
    """
    if wanted is not None and (path := Path(wanted)).exists():
        return choose([path], None)
    if wanted is not None and ("/" in wanted or wanted.endswith(".flight")):
        raise NoRunError(f"no such file or directory: {text_format.clean(wanted)}")
    return choose([directory or default_directory()], wanted)


def _named(every: Sequence[RunFiles], wanted: str) -> list[RunFiles]:
    """Return the runs of that id, or else of a job of that name, or else those whose ids begin so."""
    tests = (
        [run for run in every if run.run_id == wanted],
        [run for run in every if run.job_name == wanted],
        [run for run in every if run.run_id.startswith(wanted)],
    )
    return next((some for some in tests if some), [])


def _listed(runs: Sequence[RunFiles]) -> str:
    lines = [
        "  ".join(
            ("", *map(text_format.clean, (run.run_id, run.job_name)), f"last seen {text_format.moment(run.last_ns / 1e9)}")
        )
        for run in runs[:_MOST_LISTED]
    ]
    return "\n".join(
        [*lines, *([f"  and {len(runs) - _MOST_LISTED:,} more: torchobs runs"] if len(runs) > _MOST_LISTED else [])]
    )


def default_directory() -> Path:
    """Return the directory that this user's trainings write to. Raises :class:`NoRunError` when there is none."""
    chosen, _ = settings.resolve({})
    path = find_existing(str(chosen.flight_dir) if chosen.flight_dir else None, settings.environment().get("XDG_RUNTIME_DIR"))
    if path is None:
        raise NoRunError("there is no flight directory yet: `torchobs run train.py` creates one, `torchobs doctor` shows where")
    return Path(path)


def _launchers(found: Sequence[LoadedFlight]) -> list[RankView]:
    """Return the reports of processes that started ranks of this run and made no step themselves."""
    incarnations = {item.header.resource.get(LAUNCHED_BY) for item in found}
    reports, _ = load_reports([item.path for item in found if item.header.incarnation.hex() in incarnations])
    return [one for one in reports if not one.last_step and not one.partial]


def _nothing(paths: Sequence[Path], bad: Sequence[tuple[str, str]], run: str | None, others: Sequence[RunFiles]) -> str:
    if bad:
        return f"nothing readable: {'; '.join(f'{text_format.clean(name)}: {why}' for name, why in bad[:5])}"
    where = text_format.joined([text_format.clean(path) for path in paths])
    if run is not None:
        there = f"; these are there:\n{_listed(others[::-1])}" if others else ""
        return f"no run {text_format.clean(run)!r} in {where}{there}"
    return f"no flight files in {where}: a training writes them with torchobs.init() or `torchobs run train.py`"


def main_frames(dump: str) -> tuple[str, ...]:
    """Return the main thread's frames as ``file:line in function``, the innermost first; at most 64.

    Without the header, as in stacks of a rank that held the GIL, the main thread is the one that ``faulthandler`` writes last.
    """
    threads = [(int(found[1], 16), found[2]) for found in _THREAD.finditer(dump)]
    if not threads:
        return ()
    named = _MAIN.search(dump)
    main = next((body for number, body in threads if named and number == int(named[1], 16)), threads[-1][1])
    return _frames(main)


def crash_frames(dump: str) -> tuple[str, ...]:
    """Return the frames of the thread that crashed, the innermost first; empty if it ran no Python code."""
    return _frames(dump.partition(_STACK)[2])


def _frames(body: str) -> tuple[str, ...]:
    return tuple(f"{found[1]}:{found[2]} in {found[3]}" for found in list(_FRAME.finditer(body))[:_MOST])
