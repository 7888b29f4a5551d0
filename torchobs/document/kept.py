"""Runs that have ended, kept beyond a reboot: a file of compressed JSON for each.

A file has two lines: the row for a list of runs, and the rest: the report's blocks, and the plain data of ``inspect --json``. A
reader trusts nothing: data without the form that is declared here is refused in words.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from torchobs import catalog
from torchobs.config import settings
from torchobs.document.blocks import Document, Table
from torchobs.document.compare import Side, side_of
from torchobs.document.run import DEFAULT, Options, document, run_document, start_details
from torchobs.flight.layout import nonfinite_name
from torchobs.node.launch import in_kubernetes
from torchobs.ranks import runs
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.ranks.rank_view import RankView
from torchobs.ranks.runs import Chosen, NoRunError, RunFiles
from torchobs.support import text as text_format

SUFFIX = ".run.gz"
_KIND, VERSION = "a run of torchobs", 1
MOST_BYTES = 200 * 1024**2
"""All kept runs together"""
_SPARE, _ENOUGH = 0.05, 1024**3
"""A file system with this share of it left, or so many bytes, is not nearly full."""
_STALE_S = 3600.0
_STEPS, _EVENTS = 4096, 200
"""Of all ranks together, as plain data; each has some"""
_LONGEST_HEAD, _LONGEST = 1024**2, 256 * 1024**2
_ERRORS = (*READ_ERRORS, EOFError, zlib.error)
_ROUNDED = {function.__name__: function for function in (text_format.number, text_format.duration, text_format.size)}
_WORST_FIRST = ("failed", "lost", "hung", "unresponsive", "alive", "finished")
_NONFINITE = ("NaN", "Infinity", "-Infinity")


class NotKeptError(Exception):
    """A run is not kept; the message says why."""


class RunSummary(NamedTuple):
    """One run. Times in Unix seconds; ``state`` is the worst of its ranks', ``ended_by`` that rank's reason."""

    job_name: str
    run_id: str
    ranks: int
    world_size: int | None
    attempt: int
    state: str
    ended_by: str
    started: float
    last_seen: float
    steps: int
    loss: float | None
    best_loss: float | None
    """least loss of the last steps, and of the points before them"""
    commit: str = ""
    tag: str = ""

    @property
    def last_s(self) -> float:
        """The same, under the name that a run's files have it."""
        return self.last_seen


def summary_of(ranks: Sequence[RankView], started_s: float) -> RunSummary:
    """Return the line of a run of one rank or more; its losses are the first rank's."""
    worst = min(ranks, key=lambda rank: _WORST_FIRST.index(rank.state) if rank.state in _WORST_FIRST else 0)
    world, losses = worst.header.resource.get("world_size"), [*ranks[0].losses.values()]
    read = [loss for _, loss in ranks[0].history.curves(catalog.LOSS.name).get("", ())]
    details = start_details(ranks, ranks[0])
    git, options = (part if isinstance(part := details.get(name), dict) else {} for name in ("git", "settings"))
    return RunSummary(
        job_name=worst.names[0], run_id=worst.names[1], ranks=len(ranks),
        world_size=world if isinstance(world, int) else None,
        attempt=max(rank.restart for rank in ranks) + 1, state=worst.state, ended_by=worst.reason,
        started=started_s, last_seen=max(rank.last_s for rank in ranks), steps=max(rank.last_step for rank in ranks),
        loss=losses[-1] if losses else None, best_loss=min(filter(isfinite, [*read, *losses]), default=None),
        commit=text_format.clean(git.get("commit") or ""), tag=text_format.clean(options.get("tag") or ""),
    )  # fmt: skip


class Kept(NamedTuple):
    """A kept run."""

    report: Document
    data: dict[str, Any]
    """as of ``inspect --json``"""
    side: Side
    notes: tuple[str, ...]


def directory() -> Path | None:
    """Return where runs are kept; ``None``: nowhere, as in a pod without ``TORCHOBS_KEEP_DIR``.

    A relative path in a variable of XDG's is ignored, as its specification asks.
    """
    environ = settings.environment()
    if keep_dir := settings.resolve({})[0].keep_dir:
        return keep_dir
    state, home = Path(environ.get("XDG_STATE_HOME", "")), Path(environ.get("HOME", ""))
    state = state if state.is_absolute() else home / ".local" / "state"
    return state / "torchobs" / "runs" if state.is_absolute() and not in_kubernetes(environ) else None


def name_of(job_name: str, run_id: str, boot: bytes) -> str:
    """Return the name of a run's file: the same for all attempts that one boot of the machine has seen."""
    return blake2b(f"{job_name}\0{run_id}\0".encode(errors="replace") + boot, digest_size=8).hexdigest() + SUFFIX


def is_wanted(chosen: Chosen) -> bool:
    """Return whether a run is to be kept: not if its settings forbid it, or are not in its file."""
    options = start_details(chosen.ranks, chosen.ranks[0]).get("settings")
    return isinstance(options, dict) and options.get("keep_runs") != "0"


def keep(chosen: Chosen, place: Path, most: int) -> Path:
    """Keep a run that has ended, and remove the oldest ones beyond ``most``, and beyond 200 MiB. Return its file.

    Raises :class:`NotKeptError`, and ``OSError`` where it cannot be written.
    """
    first, number, begun_s = chosen.ranks[0], len(chosen.ranks), min(rank.begun_s for rank in chosen.ranks)
    if any(rank.up for rank in (*chosen.ranks, *chosen.launchers)):
        raise NotKeptError(f"{first.names[1]} still runs: it is kept when it has ended")
    summary, path = summary_of(chosen.ranks, begun_s), place / name_of(first.job_name, first.run_id, first.header.boot_id)
    with suppress(*_ERRORS):
        if _encoded(summary_in(path)) == _encoded(summary):  # a NaN equals nothing
            return path
    much = Options(max(10, _STEPS // number), max(20, _EVENTS // number), whole=True)
    head = {"kept": _KIND, "version": VERSION, "summary": _encoded(summary)}
    body = {"report": _encoded(run_document(chosen)), "data": document(chosen.ranks, chosen.launchers, chosen.bad, much)}
    text = "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in (head, body))
    _write(path, gzip.compress(text.encode(errors="replace"), 6))
    with suppress(OSError):  # another writer removes them
        _prune(place, most, path)
    return path


def _write(path: Path, content: bytes) -> None:
    """Write a file that has its name once it is complete and on the disk. Raises ``OSError`` and :class:`NotKeptError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    usage = os.statvfs(path.parent)
    left = usage.f_bavail * usage.f_frsize - len(content)
    if left < min(_ENOUGH, _SPARE * usage.f_blocks * usage.f_frsize):
        raise NotKeptError(f"the disk of {text_format.clean(path.parent)} is nearly full")
    fd, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)  # 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _prune(place: Path, most: int, newest: Path) -> None:
    """Remove the files that were written first until the limits hold, and what a killed writer has left; never the newest."""
    files = {path: path.stat() for path in (*_files(place), *place.glob(".*.tmp"))}
    left, number = MOST_BYTES, 0
    for path in sorted(files, key=lambda file: (file != newest, -files[file].st_mtime)):
        if path.suffix == ".tmp":
            is_over = time.time() - files[path].st_mtime > _STALE_S
        else:
            left, number = left - files[path].st_size, number + 1
            is_over = path != newest and (number > most or left < 0)
        if is_over:
            path.unlink()


def _files(place: Path) -> list[Path]:
    """Return the files of kept runs, nothing else: no pipe is ever opened."""
    return [path for path in place.glob(f"*{SUFFIX}") if path.is_file()]


def listed(place: Path | None) -> tuple[dict[RunSummary, Path], list[tuple[str, str]]]:
    """Return the kept runs, and the files that are none, each with the reason."""
    kept, bad = {}, []
    for path in _files(place) if place is not None else ():
        try:
            kept[summary_in(path)] = path
        except _ERRORS as problem:
            bad.append((path.name, runs.reason(problem)))
    return kept, bad


def load(path: Path) -> Kept:
    """Read a kept run. Raises :class:`NoRunError` for a damaged file, and for another kind of file."""
    try:
        with gzip.open(path) as file:
            _head(file.readline(_LONGEST_HEAD))
            rest = _json(file.read(_LONGEST))
        return Kept(_decoded(Document, rest["report"]), rest["data"], side_of(rest["data"]), (f"kept in {path}",))
    except _ERRORS as problem:
        raise NoRunError(f"{text_format.clean(path)} cannot be read: {runs.reason(problem)}") from None


def find(wanted: str | None, flight_dir: Path | None = None) -> Chosen | Kept:
    """Read the run that a person named: a file, a directory of flight files, or what :func:`.runs.choose` takes, also kept.

    ``None``: the latest run of the directory, of the kept ones where it has none. ``flight_dir``: that directory, where named
    runs are looked for, too; by default where this user's trainings write.
    Raises :class:`NoRunError` when no run matches; ``OSError`` for a directory that cannot be read.
    """
    if wanted is not None and (path := Path(wanted)).exists():
        return load(path) if wanted.endswith(SUFFIX) else runs.choose([path], None)
    if wanted is not None and ("/" in wanted or wanted.endswith((".flight", SUFFIX))):
        raise NoRunError(f"no such file or directory: {text_format.clean(wanted)}")
    live: list[RunFiles] = []
    with suppress(NoRunError, OSError):
        live = runs.listing(flight_dir or runs.default_directory()).runs
    here = {name_of(run.job_name, run.run_id, file.header.boot_id) for run in live for file in run.files}
    kept = {run: path for run, path in listed(directory())[0].items() if path.name not in here}
    other = () if wanted is None and live else kept
    every: list[RunFiles | RunSummary] = sorted([*live, *other], key=lambda run: -run.last_s)
    at = runs.named([(run.job_name, run.run_id) for run in every], wanted)
    if at is not None and isinstance(summary := every[at], RunSummary):
        return load(kept[summary])
    try:
        return runs.choose([flight_dir or runs.default_directory()], wanted)
    except NoRunError as problem:
        also = f"; {text_format.plural(len(kept), 'kept run')}: torchobs runs" if kept else ""
        raise NoRunError(f"{problem}{also}") from None


def side_for(run: Chosen | Kept) -> Side:
    """Return a run's side in a comparison."""
    if isinstance(run, Kept):
        return run.side
    return side_of(document(run.ranks, run.launchers, run.bad, Options(0, 0, whole=True)))


def report_on(run: Chosen | Kept, options: Options = DEFAULT) -> Document:
    """Return the report on a run; a kept run has only the kept steps and events."""
    if isinstance(run, Chosen):
        return run_document(run, options)
    most = {"steps": options.steps, "events": options.events}

    def shown(name: str, block: Any) -> Any:
        is_cut = isinstance(block, Table) and name in most
        return block._replace(rows=block.rows[max(0, len(block.rows) - most[name]) :]) if is_cut else block

    sections = (part._replace(blocks=tuple(shown(part.name, block) for block in part.blocks)) for part in run.report.sections)
    return run.report._replace(sections=tuple(sections))


# -- JSON --------------------------------------------------------------------------------------------------------------------


def summary_in(path: Path) -> RunSummary:
    """Return the first line of a kept run. Raises one of many errors for another kind of file."""
    with gzip.open(path) as file:
        return _head(file.readline(_LONGEST_HEAD))


def _head(line: bytes) -> RunSummary:
    head = _json(line)
    if not isinstance(head, dict) or head.get("kept") != _KIND:
        raise ValueError("no run that torchobs kept")
    if head.get("version") != VERSION:
        raise ValueError(f"kept by another version of torchobs: its form is {head.get('version')!r}, not {VERSION}")
    summary: RunSummary = _decoded(RunSummary, head["summary"])
    return summary


def _json(text: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def _encoded(value: object) -> Any:
    """Return plain JSON types for a block or a tuple; a named tuple has its kind's name in ``is``."""
    if isinstance(value, float) and not isfinite(value):
        return nonfinite_name(value)
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return {"is": type(value).__name__, **{name: _encoded(part) for name, part in zip(names, value, strict=True)}}
    if isinstance(value, (tuple, list, frozenset)):
        return [_encoded(part) for part in value]
    if isinstance(value, Mapping):
        return {str(name): _encoded(part) for name, part in value.items()}
    return getattr(value, "__name__", value)  # of a function of ``_ROUNDED``


_hints = cache(get_type_hints)


def _decoded(kind: Any, value: Any) -> Any:
    """Return the value of this declared type. Raises ``ValueError``, or ``TypeError``, for anything else."""
    origin, parts = get_origin(kind), get_args(kind)
    result: Any = ...
    if origin in {Union, UnionType}:
        name = value.get("is") if isinstance(value, dict) else None
        fit = [arm for arm in parts if (value is None) == (arm is NoneType) and name in {None, getattr(arm, "__name__", "")}]
        result = _decoded(fit[0], value) if len(fit) == 1 else ...
    elif kind is float and (type(value) in {int, float} or (isinstance(value, str) and value in _NONFINITE)):
        result = float(value) if isinstance(value, str) else value
    elif kind is str and isinstance(value, str):  # for a terminal, too: no escape sequence of somebody else's file
        result = "\n".join(text_format.clean(line, len(line)) for line in value.split("\n"))
    elif kind in {int, bool, NoneType}:
        result = value if type(value) is kind else ...
    elif hasattr(kind, "_fields") and isinstance(value, dict):
        result = kind(**{name: _decoded(hint, value[name]) for name, hint in _hints(kind).items() if name in value})
    elif origin is Mapping and isinstance(value, dict):
        result = {name: _decoded(parts[1], part) for name, part in value.items()}
    elif origin is Callable:
        result = _ROUNDED[value]
    elif isinstance(value, list):
        kinds = parts if origin is tuple and parts[-1] is not ... else (parts[0],) * len(value)
        result = [_decoded(part, element) for part, element in zip(kinds, value, strict=True)]
        result = frozenset(result) if origin is frozenset else tuple(result)
    if result is ...:
        raise ValueError(f"{str(value)[:40]!r} where {getattr(kind, '__name__', kind)} was to be")
    return result
