"""Stall at the end of a run: how long no step ended, in which phase, and where the stacks are. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from torchobs import catalog
from torchobs.catalog.findings import Finding
from torchobs.detect.hangs import LEAST_S, PATIENT_PHASES, USUAL_FACTOR
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import ERROR, INFO, WARNING, stated
from torchobs.diagnosis.rank_report import Fact, RankReport
from torchobs.flight.files.artifacts import PROFILE, STUCK
from torchobs.flight.reader.reader import Distribution
from torchobs.ranks import labels, state

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\(most recent call first\):\n((?:  [^\n]*\n?)*)")
_FRAME = re.compile(r'  File "([^"\n]*)", line ([0-9]+|\?\?\?) in ([^\n]*)')
_MAIN = re.compile(r"^# Thread 0x([0-9a-f]+) is 'MainThread'$", re.MULTILINE)
_STACK = "Stack (most recent call first):\n"
_MOST = 64
_LAUNCHER = re.compile(r"/torchobs/(?:cli/|__main__\.py)|/bin/torchobs:|^<frozen runpy>")
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.[0-9]+/|/torchobs/(?:probes|runtime|cli)/|^<frozen ")
_RECENT = 200
_ALL_OF_IT = 0.95


def main_frames(text: str) -> tuple[str, ...]:
    """Return the main thread's frames as ``file:line in function``, the innermost first; at most 64.

    Without the header, as in stacks of a rank that held the GIL, the main thread is the one that ``faulthandler`` writes last.
    """
    threads = [(int(found[1], 16), found[2]) for found in _THREAD.finditer(text)]
    if not threads:
        return ()
    named = _MAIN.search(text)
    main = next((body for number, body in threads if named and number == int(named[1], 16)), threads[-1][1])
    return _frames(main)


def crash_frames(text: str) -> tuple[str, ...]:
    """Return the frames of the thread that crashed, the innermost first; empty if it ran no Python code."""
    return _frames(text.partition(_STACK)[2])


def _frames(body: str) -> tuple[str, ...]:
    return tuple(f"{found[1]}:{found[2]} in {found[3]}" for found in list(_FRAME.finditer(body))[:_MOST])


def place(frames: Sequence[str]) -> str:
    """Return the innermost frame, and the innermost of the user's own code if that is another; ``frames``: one or more."""
    own = next((frame for frame in frames if not _LIBRARIES.search(frame)), frames[0])
    called = f", called at {shown(own)}" if own != frames[0] else ""
    return f"{shown(frames[0])}{called}"


def without_launcher(frames: Sequence[str]) -> Sequence[str]:
    """Leave out the outermost frames, of ``torchobs run`` and ``python -m``."""
    end = len(frames)
    while end and _LAUNCHER.search(frames[end - 1]):
        end -= 1
    return frames[:end] or frames


def shown(frame: str) -> str:
    """Return a frame as one sanitised line, shortened for installed packages."""
    return text_format.source_location(text_format.clean(frame))


class Stall(NamedTuple):
    """A time without steps at the end, much longer than a step. Seconds."""

    seconds: float
    """from the last step, or the start, to the last sign of life"""
    usual_step: float | None
    """median of the last 200 steps; ``None`` before the first"""
    phase: str | None
    phase_seconds: float | None
    """how much of that in the last phase"""
    hung: bool
    """True if the exporter calls a living rank hung after this time"""
    lock_held: bool
    """True if the GIL was held at the end: no thread of torchobs could run, so that it may have lasted longer"""
    stacks: tuple[str, ...]
    """names of stack dumps taken meanwhile, and ids of those that no longer exist"""
    frames: tuple[str, ...]
    """the main thread's frames in the last of them, the innermost first; empty if none is here"""
    long: bool
    """False if it was long enough to write stacks, and nothing more"""


def stall(report: RankReport) -> Stall | None:
    """Return the time without a step at the end; ``None`` if it was no longer than 20 usual steps and 10 s.

    Of a living rank the exporter's rule decides (``detect.hangs``), and of none that evaluates, saves or compiles.

    The factor is the exporter's, which calls no rank hung before a minute, as that may page a person. If the GIL was held, the
    known stall is short, because the heartbeat stopped with it. One that ended the run, and of which the rank has written its
    stacks, is returned however short it was.
    """
    if not report.newest_is_here or not report.end_known:
        return None
    timed = [step.duration_s for step in report.steps[-_RECENT:] if step.duration_s is not None]
    usual_s = report.standstill.usual_step if report.standstill else median(timed) if timed else None
    quiet_s, timeout_s = max(0.0, report.last_s - report.progress_s), _timeout_s(report)
    least_s = timeout_s if usual_s is None else max(LEAST_S, USUAL_FACTOR * usual_s)
    unheard = report.reason in {"", "lost", "out_of_memory"}
    held = unheard and any(left.kind == STUCK and not left.number for left in report.left)
    patient = report.phase in PATIENT_PHASES
    long = quiet_s >= least_s and (patient or not report.up or usual_s is None)
    long = long or held or report.state == "hung" or report.standstill is not None
    if report.reason == "finished" or not (long or _written_early(report)):
        return None
    begun_s = report.phase_begun_s
    return Stall(
        seconds=quiet_s,
        usual_step=usual_s,
        phase=report.phase,
        phase_seconds=None if begun_s is None else min(quiet_s, max(0.0, report.last_s - begun_s)),
        hung=report.state == "hung" or (not report.up and quiet_s > timeout_s and not patient),
        lock_held=held,
        stacks=_stacks(report),
        frames=report.frames,
        long=long,
    )


def with_patience(reports: Sequence[RankReport]) -> list[RankReport]:
    """Return the reports, with *hung* ranks alive that only wait for a peer that evaluates, saves or compiles.

    As the exporter has them (``ranks.state.waits``): a report of one file cannot know it.
    """
    phases: dict[tuple[str, str, str], set[str | None]] = {}
    for report in reports:
        if report.state == "alive":
            phases.setdefault(_team(report), set()).add(report.phase)
    ages = [max(0.0, report.last_s - report.progress_s) for report in reports]
    return [
        replace(report, state="alive") if state.waits(report.state, age_s, phases.get(_team(report), ())) else report
        for report, age_s in zip(reports, ages, strict=True)
    ]


def _team(report: RankReport) -> tuple[str, str, str]:
    job_name, run_id, rank = report.identity
    return job_name, run_id, labels.team(rank)


def stalled(report: RankReport) -> Iterator[Finding]:
    """Yield the stall, if there was one."""
    found = stall(report)
    if found is None:
        return
    patient = found.phase in PATIENT_PHASES and not found.lock_held
    habitual = report.standstill is not None and report.standstill.habitual
    severity = ERROR if found.hung or found.lock_held else INFO if patient or habitual or not found.long else WARNING
    text = _held(found, report) if found.lock_held else _quiet(found, report)
    awaited = _awaited(report) if found.phase == "data" else ""
    yield stated(severity, "stalled", f"{text} {_where(found, report)}{awaited}")


def _quiet(found: Stall, report: RankReport) -> str:
    usual = f", where one usually took {text_format.duration(found.usual_step)}" if found.usual_step is not None else ""
    begin = "It likely hung: no" if found.hung and not report.up else "No"
    head = f"{begin} step ended in the last {text_format.duration(found.seconds)}{usual}"
    if found.phase == "idle":
        return f"{head}: it had left its training loop, and did something else."
    if found.phase is None or found.phase_seconds is None:
        return f"{head}."
    whole = found.phase_seconds >= _ALL_OF_IT * found.seconds
    part = "all" if whole else f"the last {text_format.duration(found.phase_seconds)} of"
    return f"{head}; it was {_within(found.phase)} {part} that time."


def _within(phase: str) -> str:
    return "outside of all phases" if phase == "other" else f"in the phase {phase}"


def _held(found: Stall, report: RankReport) -> str:
    when = "It holds Python's lock in native code" if report.up else "It ended with Python's lock held in native code"
    phase = f", {_within(found.phase)}" if found.phase else ""
    usual = f", where a step usually took {text_format.duration(found.usual_step)}" if found.usual_step is not None else ""
    return f"{when}{phase}: for seconds at least{usual}, and how long cannot be told, for the heartbeat stops with it."


def _where(found: Stall, report: RankReport) -> str:
    if found.stacks:
        written = f"is written in {text_format.joined(found.stacks)}, beside the flight file."
        if not found.frames:
            return f"Where its threads were then {written}"
        return f"Its main thread was at {place(found.frames)}; where all were {written}"
    if report.up:
        return "`torchobs stacks` shows where its threads are."
    if found.phase == "idle":
        return "That is no hang."
    return "No stacks of that time are here: `torchobs stacks` asks for them while it lasts, and an exporter once a rank hangs."


def _awaited(report: RankReport) -> str:
    """Return a sentence on the worker of a data loader that the next batch is expected of; empty if it is unknown."""
    dumps = [fact for fact in _dumps(report) if fact.text("awaited")]
    if not dumps:
        return ""
    name = dumps[-1].text("awaited")
    state = next((text.removeprefix(name) for text in dumps[-1].texts("workers") if text.startswith(f"{name}: ")), "")
    return f" The next batch was to come from the loader's {name}{state.replace(': ', ', then ', 1)}."


def _stacks(report: RankReport) -> tuple[str, ...]:
    files = [left for left in report.left if left.kind != PROFILE]
    late = [
        left.name for left in files if not left.number or left.number / 1e3 >= report.progress_s - 1
    ]  # 1 s for clock adjustments
    known = {"", *(left.id for left in files)}
    return tuple(
        sorted(late) or [f"evidence {name}" for fact in _dumps(report) if (name := fact.text("evidence")) not in known]
    )


def _written_early(report: RankReport) -> bool:
    """Return True if the rank wrote its stacks by itself after its last step, and ended before the next."""
    return not report.up and any(fact.text("cause") == "stalled" for fact in _dumps(report))


def _dumps(report: RankReport) -> list[Fact]:
    """Return the events of stacks that were written after the last step."""
    return [fact for fact in report.events_named(catalog.EVENT_STACKS) if fact.time_s >= report.progress_s]


def _timeout_s(report: RankReport) -> float:
    durations = report.values.get((catalog.STEP_DURATION.name,))
    return state.hang_timeout_s(durations if isinstance(durations, Distribution) else None, catalog.SECONDS_BOUNDS)
