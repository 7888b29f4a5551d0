"""Where a run stands still: stalls of a rank, the ranks that the others wait for, and the calls in torch's flight recorder.

Pure. The ranks that a function is given are those of one replica group: each has a default group of its own, of the same name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import NamedTuple

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.catalog.findings import (
    ABSENT,
    ASIDE,
    CALLED_DIFFERENTLY,
    INSTEAD,
    PLACE,
    SURPLUS,
    WAITING,
    Finding,
    finding,
    sentence,
)
from torchobs.detect import hangs
from torchobs.detect.hangs import LEAST_S, PATIENT_PHASES, USUAL_FACTOR, Absence, Blamed, Position, Surplus
from torchobs.flight.artifacts import PROFILE, STUCK
from torchobs.flight.events import Event
from torchobs.ranks import state
from torchobs.ranks.rank_view import RankView
from torchobs.support import text

_MOST_NAMED = 4
_MOST_GROUPS = 3
_RECENT = re.compile(r"(.{1,200}) #(\d{1,18}) (\w+ at .+)")
"""Group, number, kind and line of ``probes.collectives``"""
_LAUNCHER = re.compile(r"/torchobs/(?:cli/|__main__\.py)|/bin/torchobs:|^<frozen runpy>")
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.[0-9]+/|/torchobs/(?:probes|runtime|cli)/|^<frozen ")
RECENT_STEPS = 200


def place(frames: Sequence[str]) -> str:
    """Return the innermost frame, and the innermost one of the user's code if that is another; ``frames``: one or more."""
    user_frame = next((frame for frame in frames if not _LIBRARIES.search(frame)), frames[0])
    called = f", called at {shown(user_frame)}" if user_frame != frames[0] else ""
    return f"{shown(frames[0])}{called}"


def without_launcher(frames: Sequence[str]) -> Sequence[str]:
    """Leave out the outermost frames, of ``torchobs run`` and ``python -m``."""
    end = len(frames)
    while end and _LAUNCHER.search(frames[end - 1]):
        end -= 1
    return frames[:end] or frames


def shown(frame: str) -> str:
    """Return a frame as one sanitised line, shortened for installed packages."""
    return text.source_location(text.clean(frame))


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
    """names of stack dumps taken meanwhile, and ids of those that are gone"""
    frames: tuple[str, ...]
    """the main thread's frames in the last of them, the innermost first; empty if none is here"""
    long: bool
    """False if it was long enough to write stacks, and nothing more"""


def stall(report: RankView) -> Stall | None:
    """Return the time without a step at the end; ``None`` if it is shorter than 20 usual steps, or than 10 s.

    For a living rank the exporter's rule decides (``detect.hangs``), unless the rank evaluates, saves or compiles.

    The factor is the exporter's, which calls no rank hung before a minute, as that may page a person. If the GIL was held, the
    stall looks short, because the heartbeat stopped with it. A stall that ended the run is returned however short it was, if
    the rank has written its stacks.
    """
    if not report.newest_is_here or not report.end_known:
        return None
    timed = [step.duration_s for step in report.steps[-RECENT_STEPS:] if step.duration_s is not None]
    usual_s = report.standstill.usual_step if report.standstill else median(timed) if timed else None
    quiet_s = max(0.0, report.last_s - report.progress_s)
    timeout_s = state.hang_timeout_s(report.readings.distribution(catalog.STEP_DURATION), catalog.SECONDS_BOUNDS)
    least_s = timeout_s if usual_s is None else max(LEAST_S, USUAL_FACTOR * usual_s)
    unheard = report.reason in {"", "lost", "out_of_memory"}
    lock_held = unheard and any(left.kind == STUCK and not left.number for left in report.left)
    patient = report.phase in PATIENT_PHASES
    long = quiet_s >= least_s and (patient or not report.up or usual_s is None)
    long = long or lock_held or report.state == "hung" or report.standstill is not None
    wrote_early = not report.up and any(fact.text("cause") == "stalled" for fact in _dumps(report))  # after its last step
    if report.reason == "finished" or not (long or wrote_early):
        return None
    begun_s = report.phase_begun_s
    return Stall(
        seconds=quiet_s,
        usual_step=usual_s,
        phase=report.phase,
        phase_seconds=None if begun_s is None else min(quiet_s, max(0.0, report.last_s - begun_s)),
        hung=report.state == "hung" or (not report.up and quiet_s > timeout_s and not patient),
        lock_held=lock_held,
        stacks=_stacks(report),
        frames=report.frames,
        long=long,
    )


def stalled(report: RankView) -> Iterator[Finding]:
    """Yield the stall, if there was one."""
    stop = stall(report)
    if stop is None:
        return
    patient = stop.phase in PATIENT_PHASES
    habitual = report.standstill is not None and report.standstill.habitual
    severity = Severity.ERROR if stop.hung else Severity.INFO if patient or habitual or not stop.long else Severity.WARNING
    kind = "lock_held" if stop.lock_held else "left_loop" if stop.phase == "idle" else "stalled"
    yield finding(
        kind,
        rank=report.rank,
        severity=severity if kind == "stalled" else None,
        quiet=stop.seconds,
        usual=stop.usual_step,
        phase=stop.phase,
        phase_s=stop.phase_seconds,
        place=place(stop.frames) if stop.frames else None,
        stacks=stop.stacks,
        worker=_awaited(report) if stop.phase == "data" else None,
        command="`torchobs stacks`" if report.up and not stop.stacks else None,
    )


def _awaited(report: RankView) -> str | None:
    """Return the worker of a data loader that the next batch must come from, and where it is, if that is known."""
    dumps = [fact for fact in _dumps(report) if fact.text("awaited")]
    if not dumps:
        return None
    name = dumps[-1].text("awaited")
    doing = next((words.removeprefix(name) for words in dumps[-1].texts("workers") if words.startswith(f"{name}: ")), "")
    return f"{name}{doing.replace(': ', ', then ', 1)}"


def _stacks(report: RankView) -> tuple[str, ...]:
    files = [left for left in report.left if left.kind != PROFILE]
    # 1 s for clock adjustments
    late = [left.name for left in files if not left.number or left.number / 1e3 >= report.progress_s - 1]
    ids = {"", *(left.id for left in files)}
    return tuple(sorted(late) or [f"evidence {name}" for fact in _dumps(report) if (name := fact.text("evidence")) not in ids])


def _dumps(report: RankView) -> list[Event]:
    """Return the events of stacks that were written after the last step."""
    return [fact for fact in report.events_named(catalog.EVENT_STACKS) if fact.time_s >= report.progress_s]


def _absences(ranks: Sequence[RankView], named: Collection[str]) -> Iterator[str]:
    """Yield the collectives to which the ``named`` ranks, for which the others wait, did not come."""
    by_absence: dict[Absence, list[str]] = {}
    for rank, absence in hangs.absent({rank.rank: rank.collectives for rank in ranks}).items():
        if rank in named:
            by_absence.setdefault(absence, []).append(rank)
    for absence, names in by_absence.items():
        operation = "a collective" if absence.operation == "none" else absence.operation
        yield sentence(ABSENT, {**absence._asdict(), "operation": operation, **_who(names)})


def _who(names: Sequence[str]) -> dict[str, object]:
    return {"who": text.capital(text.ranks(names, _MOST_NAMED)), "count": len(names)}


def surpluses(ranks: Sequence[RankView]) -> list[Surplus]:
    """Return the groups in which ranks have called different numbers of collectives."""
    return list(hangs.surplus({rank.rank: rank.called for rank in ranks}))


def surplus(ranks: Sequence[RankView], reports: Sequence[RankView] = ()) -> Iterator[str]:
    """Yield which ranks called more collectives of a group than others; with ``reports`` also which collectives, if known."""
    calls = {report.rank: recent_calls(report) for report in reports}
    for excess in surpluses(ranks):
        if len(excess.ranks) > 2:  # noqa: PLR2004  # two are compared in words
            numbers = [f"{number:,} on {text.ranks(names, _MOST_NAMED)}" for number, names in excess.ranks.items()]
            yield sentence(CALLED_DIFFERENTLY, {"group": excess.group, "numbers": text.joined(numbers)})
            continue
        (most, ahead), (least, behind) = excess.ranks.items()
        extra = hangs.inserted(*(calls.get(names[0], {}).get(excess.group, {}) for names in (ahead, behind)))
        calls_more = text.joined([shown(call) for call in extra], _MOST_NAMED)
        counts = {"more": most - least, "most": most, "least": least, "group": excess.group, "calls": calls_more}
        yield sentence(SURPLUS, {**_who(ahead), **counts, "others": text.ranks(behind, _MOST_NAMED)})


def recent_calls(report: RankView) -> dict[str, dict[int, str]]:
    """Return a rank's last collectives by group and number, as it recorded them when it stood still or timed out."""
    facts = [fact for fact in report.events if fact.time_s >= report.progress_s and "collectives" in fact.attributes]
    calls: dict[str, dict[int, str]] = {}
    for words in facts[-1].texts("collectives") if facts else ():
        if (parsed := _RECENT.fullmatch(words)) is not None:
            calls.setdefault(parsed[1], {})[int(parsed[2])] = parsed[3]
    return calls


def mismatches(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield the different collectives in which ranks of one group wait."""
    for mismatch in hangs.mismatched({rank.rank: rank.collectives for rank in ranks}):
        sizes = {kind: "" if kind[1] is None else f" of {text.size(kind[1])}" for kind in mismatch.kinds}
        kinds = [f"{kind[0]}{sizes[kind]} on {text.ranks(names, _MOST_NAMED)}" for kind, names in mismatch.kinds.items()]
        operations = text.joined(kinds, _MOST_NAMED)
        yield finding("collectives_differ", number=mismatch.number, group=mismatch.group, operations=operations)


def blamed(ranks: Sequence[RankView]) -> dict[str, Blamed]:
    """Return the ranks that the others wait for, by name."""
    return hangs.blamed({rank.rank: position(rank) for rank in ranks})


def sentences(ranks: Sequence[RankView], blames: Mapping[str, Blamed]) -> str:
    """Return who waits for whom, without figures that change; ``blames``: from :func:`blamed`, not empty."""
    others = Counter(where(position(rank)) for rank in ranks if rank.rank not in blames)
    (there, number), *more = others.most_common()
    kinds = groupby(sorted(blames, key=lambda name: _instead(blames[name])), key=lambda name: _instead(blames[name]))
    culprits = text.joined([f"{text.ranks(list(names), _MOST_NAMED)} {what}" for what, names in kinds], _MOST_GROUPS)
    values = {"waiting": number, "others": number if number > 1 else None, "most": bool(more), "place": there}
    waiting = sentence(WAITING, {"culprits": text.capital(culprits), **values})
    return " ".join([waiting, *(list(_absences(ranks, blames)) or surplus(ranks, ranks))])


def _instead(blame: Blamed) -> str:
    """Return the activity of a rank that the others wait for."""
    why, at = blame.why, blame.position
    if why == hangs.NOT_ARRIVED:
        why = hangs.alone(at).why
        why = hangs.ELSEWHERE if why == hangs.ENDED else why
    return sentence(
        INSTEAD[why],
        {
            "in_order": at.state == "finished",
            "place": where(at),
            "aside": ASIDE[at.phase if at.phase in ASIDE else "idle"],
            "frame": at.frames[0] if at.frames else None,
            "step": _step(at),
        },
    )


def where(position: Position) -> str:
    """Return the step and the phase that a rank is in."""
    phase = position.phase
    if phase == "idle":
        return sentence(PLACE, {"idle": True})
    between = phase in {None, "other"}
    return sentence(PLACE, {"between": between, "phase": None if between else phase, "step": _step(position)})


def _step(position: Position) -> int | None:
    return None if position.steps is None else position.steps + 1


def position(rank: RankView) -> Position:
    """Return where a rank is, for :mod:`torchobs.detect.hangs`."""
    return Position(rank.state, rank.done if rank.recorded else None, rank.phase, rank.frames, rank.collectives)
