"""Choice of a run among flight files: by file, by directory, by name, or the latest; and the list of all runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from torchobs.config import settings
from torchobs.diagnosis import load, text_format
from torchobs.diagnosis.load import LoadedFlight
from torchobs.diagnosis.rank_report import RankReport
from torchobs.flight.files.location import find_existing
from torchobs.identity.launchers import LAUNCHED_BY

_MOST_LISTED = 12


class NoRunError(ValueError):
    """There is no such run, or more than one; the message says what there is."""


class Chosen(NamedTuple):
    """A run's ranks, unreadable files, launchers, and notes on other runs."""

    ranks: list[RankReport]
    bad: list[tuple[str, str]]
    notes: list[str]
    launchers: list[RankReport]
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
    """Read files, and of directories the run ``run`` (its id or the beginning of it, or a job's name), by default the latest.

    Raises :class:`NoRunError`, or ``OSError`` for a directory that cannot be read.
    """
    ranks, bad = load.load_reports([path for path in paths if not path.is_dir()])
    notes: list[str] = []
    launchers: list[RankReport] = []
    others: list[RunFiles] = []
    for path in paths:
        if path.is_dir():
            listed = load.listing(path)
            bad += listed.bad
            found, others = _run(listed.found, run)
            more = read(found)
            ranks, bad, launchers = ranks + more.ranks, bad + more.bad, launchers + more.launchers
            notes += [*more.notes, *_other_runs(others), *listed.notes]
    if not ranks:
        raise NoRunError(_nothing(paths, bad, run, others))
    return Chosen(ranks, bad, notes, launchers)


def read(found: Sequence[LoadedFlight]) -> Chosen:
    """Read the newest attempt of a run's ranks."""
    launchers = _launchers(found)
    apart = {report.header.incarnation for report in launchers}
    chosen, earlier = load.newest(item for item in found if item.header.incarnation not in apart)
    ranks, bad = load.load_reports([item.path for item in chosen], load.limit_of(len(chosen)))
    suffixes = {item.header.incarnation: item.suffix for item in chosen}
    ranks = [replace(report, suffix=suffixes.get(report.header.incarnation, "")) for report in ranks]
    return Chosen(ranks, bad, _earlier_attempts(earlier), launchers)


def find(wanted: str | None, directory: Path | None = None) -> Chosen:
    """Read the run that a person named: a flight file, a directory, a run_id or its beginning, or a job's name.

    ``None``: the latest run. ``directory``: where named runs are looked for, by default where this user's trainings write.
    Raises :class:`NoRunError` when no run matches, or several do; ``OSError`` for a directory that cannot be read.
    """
    if wanted is not None and (path := Path(wanted)).exists():
        return choose([path], None)
    if wanted is not None and ("/" in wanted or wanted.endswith(".flight")):
        raise NoRunError(f"no such file or directory: {text_format.clean(wanted)}")
    directory = directory or default_directory()
    if wanted is None:
        return choose([directory], None)
    every = runs_of(load.listing(directory).found)
    return read(_matching(every, wanted, directory).files)


def _named(every: Sequence[RunFiles], wanted: str) -> list[RunFiles]:
    """Return the runs of that id, or else of a job of that name, or else those whose ids begin so."""
    tests = (
        [run for run in every if run.run_id == wanted],
        [run for run in every if run.job_name == wanted],
        [run for run in every if run.run_id.startswith(wanted)],
    )
    return next((some for some in tests if some), [])


def _matching(every: Sequence[RunFiles], wanted: str, directory: Path) -> RunFiles:
    found = _named(every, wanted)
    if len(found) == 1:
        return found[0]
    name = text_format.clean(repr(wanted))
    if found:
        raise NoRunError(f"{name} is {len(found)} runs; say which by its run_id:\n{_listed(found)}")
    where = text_format.clean(directory)
    there = (
        f"these are there:\n{_listed(every)}"
        if every
        else "there are no flight files; a training writes them with torchobs.init()"
    )
    raise NoRunError(f"no run {name} in {where}; {there}")


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


def _launchers(found: Sequence[LoadedFlight]) -> list[RankReport]:
    """Return the reports of processes that started ranks of this run and made no step themselves."""
    incarnations = {item.header.resource.get(LAUNCHED_BY) for item in found}
    reports, _ = load.load_reports([item.path for item in found if item.header.incarnation.hex() in incarnations])
    return [one for one in reports if not one.last_step and not one.partial]


def _run(found: Sequence[LoadedFlight], run: str | None) -> tuple[Sequence[LoadedFlight], list[RunFiles]]:
    """Return the files of the requested run, by default the one that lived last, and the other runs, oldest first."""
    every = runs_of(found)
    wanted = next(iter(every if run is None else _named(every, run)), None)
    return wanted.files if wanted else (), [one for one in reversed(every) if one is not wanted]


def _earlier_attempts(earlier: Sequence[LoadedFlight]) -> list[str]:
    names = ", ".join(item.path.name for item in earlier[-3:])
    return [f"{text_format.plural(len(earlier), 'earlier attempt')} of these ranks: inspect {names}"] if earlier else []


def _other_runs(others: Sequence[RunFiles]) -> list[str]:
    names = ", ".join(text_format.clean(run.run_id, 60) for run in others[-3:])
    return [f"{text_format.plural(len(others), 'other run')} in this directory: --run {names}"] if others else []


def _nothing(paths: Sequence[Path], bad: Sequence[tuple[str, str]], run: str | None, others: Sequence[RunFiles]) -> str:
    if bad:
        return f"nothing readable: {'; '.join(f'{text_format.clean(name)}: {why}' for name, why in bad[:5])}"
    where = text_format.joined([text_format.clean(path) for path in paths])
    if run is not None:
        there = f"; these are there:\n{_listed(others[::-1])}" if others else ""
        return f"no run {text_format.clean(run)!r} in {where}{there}"
    return f"no flight files in {where}: a training writes them with torchobs.init() or `torchobs run train.py`"
