"""Whether a rank hangs, after how long, and for whom the others wait.

Ranks that exchange tensors wait in a collective for the one that has not called it. All of them are without a step, so that the
age of the last step does not distinguish them; where they are does. The evidence, the strongest first:

1. A rank that has ended never calls the next collective; one that does not respond (stopped, or Python's lock held in native
   code) does not either; nor does one that evaluates, saves, compiles, or has left its training loop.
2. Torch's flight recorder: a rank that has not called the collective in which others wait (:func:`absent`).
3. Stacks: a rank with its innermost frame in torch.distributed or in the autograd engine's wait is in a collective. Of ranks in
   the same place some that are not are to blame. Stacks of waits on a GPU end in the user's own line, and decide nothing.
4. A rank that fetches data, if others do not: no loader waits for a peer.
5. Steps and phases: where most ranks are at the same place, the rest is to blame. Otherwise, as for two ranks, it is those in
   forward or between two phases if others are in backward or in the optimizer, where gradients are exchanged; else the least
   advanced. A collective in forward (FSDP's gathers, SyncBatchNorm) is waited for by ranks in forward, and met by rule 5.

Without any difference no rank is named.
"""

from __future__ import annotations

import dis
import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import inf
from types import CodeType, MappingProxyType
from typing import NamedTuple

from torchobs import catalog
from torchobs.detect.speed import FACTOR

_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


def loop_lines(code: CodeType, offset: int) -> tuple[int, int] | None:
    """Return the first and the last line of the outermost loop around that instruction; ``None`` if there is none.

    A loop ends in a jump back. Exception handlers, which CPython has placed after all other code since 3.12, jump back across
    code that follows the loop, so their jumps are ignored. A handler within a loop is found by its line numbers.
    """
    bytecode = dis.Bytecode(code)
    handlers = getattr(bytecode, "exception_entries", ()) if sys.version_info >= (3, 12) else ()
    end = min((entry.target for entry in handlers), default=len(code.co_code))
    jumps = [(jump.argval, jump.offset) for jump in bytecode if jump.opcode in _JUMPS and jump.offset < end]
    around = [(target, at) for target, at in jumps if target <= offset <= at]
    if not around:
        return None
    begin, end = min(target for target, _ in around), max(jump for _, jump in around)
    lines = [line for first, last, line in code.co_lines() if line is not None and first <= end and last > begin]
    return min(lines), max(lines)


COLLECTIVE, BARRIER, RENDEZVOUS = catalog.COLLECTIVE_TIMEOUTS
"""A collective operation; ``monitored_barrier``, which knows who is absent; the store by which ranks find each other."""

_LONGEST = 4096
"""Characters that are read: a message begins with what has happened."""
_MOST_RANKS = 64
_MS = 1e-3
# the first that is found: a barrier's message goes on with that of the operation that it is made of
_PATTERNS = (
    (BARRIER, re.compile(r"Ranks? ([\d, ]{1,1000}) failed to pass monitoredBarrier in (\d{1,12}) ms"), _MS),
    (COLLECTIVE, re.compile(r"Timed out waiting (\d{1,12})ms for (?:recv|send) operation"), _MS),
    (COLLECTIVE, re.compile(r"[Cc]aught collective operation timeout:.{0,400}?Timeout\(ms\)=(\d{1,12})", re.DOTALL), _MS),
    (COLLECTIVE, re.compile(r"[Cc]aught collective operation timeout"), 0.0),
    (COLLECTIVE, re.compile(r"Application timeout caused pair closure"), 0.0),
    (RENDEZVOUS, re.compile(r"Timed out after (\d{1,9}) seconds waiting for clients"), 1.0),
    (RENDEZVOUS, re.compile(r"wait timeout after (\d{1,12})ms, keys:"), _MS),
    (RENDEZVOUS, re.compile(r"Timed out initializing process group in store based barrier"), 0.0),
)  # fmt: skip
_RECEIVED_ERRORS = re.compile(r"successfully reached monitoredBarrier, but received errors")
"""Of the ranks that came, when one did not"""


class CollectiveTimeout(NamedTuple):
    """A rank gave up waiting for another."""

    kind: str
    """one of ``catalog.COLLECTIVE_TIMEOUTS``"""
    seconds: float | None
    """the timeout; ``None``: not in the message"""
    absent: tuple[int, ...]
    """ranks that did not come; empty: not in the message"""


def parse_timeout(message: str) -> CollectiveTimeout | None:
    """Return the timeout of a collective in the message of a ``RuntimeError``; ``None`` if it is about something else.

    The messages are those of torch 2.0 to 2.13 (``ProcessGroupGloo.cpp``, ``ProcessGroupNCCL.cpp``, ``TCPStore.cpp``,
    ``distributed_c10d.py``) and of gloo (``transport/tcp``). Only numbers are taken.
    """
    message = message[:_LONGEST]
    for kind, pattern, unit_s in _PATTERNS:
        match = pattern.search(message)
        if match is not None:
            *ranks, number = match.groups() or ("0",)
            absent = [int(rank) for rank in re.findall(r"\d{1,9}", ranks[0])] if ranks else []
            return CollectiveTimeout(kind, int(number) * unit_s if unit_s else None, tuple(absent[:_MOST_RANKS]))
    return CollectiveTimeout(BARRIER, None, ()) if _RECEIVED_ERRORS.search(message) else None


SAME_SIZE = frozenset({"all_reduce", "reduce", "broadcast"})
"""Operations with inputs of the same size on all ranks; others may be uneven."""


class GroupProgress(NamedTuple):
    """How far a rank is in one process group, while it makes no step."""

    enqueued: int
    """number of the last collective that it has called"""
    completed: int
    """number of the last one that has come back"""
    waits_s: float
    """since it called what it waits for; 0: it waits for nothing in this group"""
    operation: str = "none"
    """what it waits for; one of ``catalog.COLLECTIVE_OPERATIONS``"""
    size: float | None = None
    """bytes of that operation's input here; ``None``: unknown"""

    @property
    def waiting(self) -> bool:
        """Return whether it waits in this group."""
        return self.waits_s > 0 or self.enqueued > self.completed


class Absence(NamedTuple):
    """A collective to which a rank did not come."""

    group: str
    number: int
    operation: str
    """as those call it who wait; none: unknown"""
    enqueued: int
    """number of the last collective of the group that the rank has called"""
    waiting: int
    """number of ranks seen to wait for it"""


class Surplus(NamedTuple):
    """Ranks of a group that have called different numbers of collectives."""

    group: str
    ranks: Mapping[int, tuple[str, ...]]
    """by the number of collectives, the highest first; two or more"""


class Mismatch(NamedTuple):
    """Ranks of a group that wait in different operations, each in its next one."""

    group: str
    number: int
    kinds: Mapping[tuple[str, float | None], tuple[str, ...]]
    """ranks by operation, and by its size where that is what differs"""


def absent(ranks: Mapping[str, Mapping[str, GroupProgress]]) -> dict[str, Absence]:
    """Return the ranks that did not come to a collective in which others wait, by name.

    The ranks of a process group number its collectives alike. If one waits in number n and another, which waits nowhere, has
    called fewer than n, that one did not come: this is the comparison of torch's own analyzer of dumps
    (``torch/distributed/flight_recorder``), by numbers instead of all entries. A rank that is missing in one group because it
    waits in another is not to blame; the rank that it waits for is.

    ``ranks``: of each rank, its progress by group. Groups are compared among the ranks that have them here.
    """
    busy = {rank for rank, groups in ranks.items() if any(progress.waiting for progress in groups.values())}
    absences: dict[str, Absence] = {}
    for group in _groups(ranks):
        members = {rank: groups[group] for rank, groups in ranks.items() if group in groups}
        there = {rank: progress for rank, progress in members.items() if progress.enqueued > progress.completed}
        if not there:
            continue
        number = min(progress.completed for progress in there.values()) + 1
        waiting = [progress for progress in there.values() if progress.completed + 1 == number]
        kinds = {progress.operation for progress in waiting}
        kind = kinds.pop() if len(kinds) == 1 else "none"
        for rank, progress in members.items():
            if progress.enqueued < number and rank not in busy:
                absences.setdefault(rank, Absence(group, number, kind, progress.enqueued, len(there)))
    return absences


def surplus(called: Mapping[str, Mapping[str, int]]) -> list[Surplus]:
    """Return the groups in which ranks have called different numbers of collectives. ``called``: of each rank, by group."""
    surpluses = []
    for group in sorted({group for counts in called.values() for group in counts}):
        by_number: dict[int, list[str]] = {}
        for rank, counts in called.items():
            if group in counts:
                by_number.setdefault(counts[group], []).append(rank)
        if len(by_number) > 1:
            numbers = {number: tuple(ranks) for number, ranks in sorted(by_number.items(), reverse=True)}
            surpluses.append(Surplus(group, numbers))
    return surpluses


def inserted(longer: Mapping[int, str], shorter: Mapping[int, str]) -> tuple[str, ...]:
    """Return the calls that one rank has made more than another; empty if their calls do not show that.

    ``longer``, ``shorter``: the last calls of each in one group, by number. They show it where they are the same up to some
    number, and from there on the same again when the additional ones are left out.
    """
    more = max(longer, default=0) - max(shorter, default=0)
    common = [number for number in sorted(shorter) if number in longer]
    first = next((number for number in common if longer[number] != shorter[number]), max(shorter, default=0) + 1)
    same_before = bool(common) and common[0] < first
    same_behind = all(longer.get(number + more) == text for number, text in shorter.items() if number >= first)
    calls = tuple(longer[number] for number in range(first, first + more) if number in longer)
    return calls if same_before and same_behind and 0 < len(calls) == more else ()


def mismatched(ranks: Mapping[str, Mapping[str, GroupProgress]]) -> list[Mismatch]:
    """Return the groups in which ranks wait in the same number, but in different operations or with different sizes."""
    mismatches = []
    for group in _groups(ranks):
        there = {
            rank: groups[group]
            for rank, groups in ranks.items()
            if group in groups and groups[group].enqueued > groups[group].completed and groups[group].operation != "none"
        }
        numbers = {progress.completed + 1 for progress in there.values()}
        if len(numbers) != 1:
            continue
        operations = {progress.operation for progress in there.values()}
        are_sized = operations <= SAME_SIZE and all(progress.size is not None for progress in there.values())
        kinds: dict[tuple[str, float | None], tuple[str, ...]] = {}
        for rank, progress in there.items():
            key = progress.operation, progress.size if are_sized and len(operations) == 1 else None
            kinds[key] = (*kinds.get(key, ()), rank)
        if len(kinds) > 1:
            mismatches.append(Mismatch(group, numbers.pop(), kinds))
    return mismatches


def _groups(ranks: Mapping[str, Mapping[str, GroupProgress]]) -> list[str]:
    return sorted({group for groups in ranks.values() for group in groups})


PATIENT_PHASES = frozenset({"evaluation", "checkpoint", "compile", "idle"})
"""Phases in which a rank takes no part in training, and that may last arbitrarily long; an idle rank has left its loop."""
EXCHANGING = frozenset({"backward", "optimizer"})
"""Phases in which gradients are exchanged."""
_ORDER = {"data": 1, "forward": 2, "backward": 3, "optimizer": 4}
"""Order within a step; all others come first, as the time between two steps."""
_WAITS = ("torch/distributed/", "torch/nn/parallel/distributed.py", "_engine_run_backward")
"""Signs of a collective in the innermost frame."""
_COLLECTIVES = "distributed_c10d.py"
"""Sign of one in any frame: it is wrapped by a few lines of logging."""

ENDED, SILENT, NOT_ARRIVED, ASIDE_OF_TRAINING, NOT_IN_COLLECTIVE, FETCHING, ELSEWHERE = (
    "ended", "silent", "not_arrived", "aside", "not_in_collective", "fetching", "elsewhere",
)  # fmt: skip
"""Reasons for which a rank is named, in the order of the evidence."""


class Position(NamedTuple):
    """Where a rank of a run is."""

    state: str
    """one of ``catalog.RANK_STATES``"""
    steps: int | None
    """number of steps done; ``None``: not all were recorded"""
    phase: str | None
    """phase in progress; ``None``: unknown"""
    frames: Sequence[str] = ()
    """frames of the training thread as ``file:line in function``, the innermost first; empty: unknown"""
    collectives: Mapping[str, GroupProgress] = MappingProxyType({})
    """by process group; empty: unknown"""


class Blamed(NamedTuple):
    """A rank that the others wait for."""

    why: str
    """one of the reasons above"""
    position: Position


def blamed(ranks: Mapping[str, Position]) -> dict[str, Blamed]:
    """Return the ranks that the others wait for, by name.

    Empty if no living rank hangs, for a single rank, and if nothing distinguishes them.
    """
    if not any(position.state == "hung" for position in ranks.values()):
        return {}
    for why, rule in _RULES:
        names = rule(ranks)
        if 0 < len(names) < len(ranks):
            return {name: Blamed(why, ranks[name]) for name in ranks if name in names}
    return {}


def alone(position: Position) -> Blamed:
    """Return the activity of a rank that the others are already known to wait for."""
    by_itself = (ENDED, ASIDE_OF_TRAINING, NOT_IN_COLLECTIVE, FETCHING)
    return Blamed(next((why for why, rule in _RULES if why in by_itself and rule({"": position})), ELSEWHERE), position)


def place(steps: int, phase: str) -> float:
    """Return the progress of a rank in steps: those done, and a fifth for each finished phase of the next."""
    return steps + _ORDER.get(phase, 0) / 5


def waits(frames: Sequence[str]) -> bool:
    """Return whether these frames, the innermost first, are of a thread in a collective."""
    innermost = frames[0] if frames else ""
    return any(sign in innermost for sign in _WAITS) or any(_COLLECTIVES in frame for frame in frames)


def _not_arrived(ranks: Mapping[str, Position]) -> set[str]:
    """Return the ranks that did not come, without those that wait in an unrecorded operation, by their stacks."""
    missing = absent({name: position.collectives for name, position in ranks.items()})
    return {name for name in missing if not waits(ranks[name].frames)}


def _out_of_collective(ranks: Mapping[str, Position]) -> set[str]:
    are_known = all(position.frames for position in ranks.values())
    return {name for name, position in ranks.items() if not waits(position.frames)} if are_known else set()


def _elsewhere(ranks: Mapping[str, Position]) -> set[str]:
    placed = [(name, rank.steps, rank.phase) for name, rank in ranks.items() if rank.phase]
    places = {name: place(steps, phase) for name, steps, phase in placed if steps is not None}
    counts = Counter(places.values())
    if len(counts) < 2 or len(places) < len(ranks):  # noqa: PLR2004  # all at one place
        return set()
    most, number = counts.most_common(1)[0]
    if 2 * number > len(places):
        return {name for name, place in places.items() if place != most}
    return _not_exchanging(ranks) or {name for name, place in places.items() if place == min(counts)}


def _not_exchanging(ranks: Mapping[str, Position]) -> set[str]:
    others = {name for name, position in ranks.items() if position.phase not in EXCHANGING}
    return others if len(others) < len(ranks) else set()


def _where(holds: Callable[[Position], bool]) -> Callable[[Mapping[str, Position]], set[str]]:
    return lambda ranks: {name for name, position in ranks.items() if holds(position)}


_RULES = (
    (ENDED, _where(lambda position: position.state in {"finished", "failed", "lost"})),
    (SILENT, _where(lambda position: position.state == "unresponsive")),
    (NOT_ARRIVED, _not_arrived),
    (ASIDE_OF_TRAINING, _where(lambda position: position.phase in PATIENT_PHASES)),
    (NOT_IN_COLLECTIVE, _out_of_collective),
    (FETCHING, _where(lambda position: position.phase == "data")),
    (ELSEWHERE, _elsewhere),
)


LEAST_IDLE_S = 10.0
"""A pause between two steps (a plot, a message, a garbage collection) is part of training up to here."""


def idle_from(longest_s: float) -> float:
    """Return the idle threshold in seconds, three times the longest step so far; infinity before the first (not positive)."""
    return max(FACTOR * longest_s, LEAST_IDLE_S) if longest_s > 0 else inf


LEAST_S = 10.0
"""Shortest stall: people wait about that long before Ctrl-C. Shorter ones may be a slow batch or an unobserved save."""

LONG_FACTOR = 2.0
"""Factor on the second longest step: if one in hundreds takes minutes (the first minibatch after a rollout), the 99th
percentile does not show it; and a single one, behind a cold cache, is no measure of the next."""

EARLY_FACTOR = 5.0
"""Factor on the 99th percentile of step times from which stacks are written: a quarter of the one from which a rank is called
hung (``ranks.state.HANG_FACTOR``), for it raises no alert. The percentile itself is overestimated by up to 2."""

EARLY_FIRST_S = 300.0
"""The same before the steps are known: half the shortest default timeout of a collective (NCCL's, ten minutes), after which
nothing shows where the ranks stood."""

USUAL_FACTOR = 20.0
"""Factor on the usual step from which a rank stands still, if its stacks are not written before"""

LEAST_STEPS = 2
"""Least number of steps that show what is usual: one alone may be that of a cold cache"""

_FEW_STEPS = 100
"""Below it the 99th percentile is the longest step"""


class Durations(NamedTuple):
    """Histogram of the durations of all of a run's steps in seconds, without evaluations and checkpoints."""

    counts: Sequence[int] = ()
    bounds: Sequence[float] = ()
    longest_s: float = 0.0


class Standstill(NamedTuple):
    """A living rank makes no step, and nothing else that may take long. Seconds."""

    seconds: float
    """since its last step"""
    usual_step: float
    """median of its latest steps"""
    habitual: bool = False
    """it has paused about as long before: between two rollouts, in an evaluation of its own"""


def usual_and_long_s(counts: Sequence[int], bounds: Sequence[float], longest_s: float) -> tuple[float, float]:
    """Return the 99th percentile and the second longest of at least one duration, as the upper bounds of their buckets.

    Of fewer than 100 the percentile would be the longest, which is often the first step (lazy imports, cold caches): it is
    left out of the percentile, and the long one is then the longest.
    """
    total, below = sum(counts), list(accumulate(counts))
    few = 1 < total < _FEW_STEPS
    ranks = min(0.99 * total, total - 1) if few else 0.99 * total, total if few else total - 1
    usual_s, long_s = ([*bounds, longest_s][bisect_left(below, rank)] for rank in ranks)
    return usual_s, long_s


def standstill_limit_s(usual_s: float, durations: Durations) -> float:
    """Return after how many seconds without a sign of a step people read that a rank stands still.

    20 usual steps, and no later than the stacks of a first stall are written. ``usual_s``: median of the latest steps.
    """
    return max(LEAST_S, min(USUAL_FACTOR * usual_s, early_limit_s(*durations, 0)))


def standstill(
    progress_age_s: float, quiet_s: float, phase: str | None, usual_s: float | None, durations: Durations
) -> Standstill | None:
    """Return the standstill of a living rank, by one rule for page, commands, API and notebook; ``None`` without one.

    ``progress_age_s``: seconds since its last step. ``quiet_s``: since the last sign of a step or its phases, which is shorter
    after an evaluation. ``usual_s``: median of its latest steps, ``None`` before the first.
    """
    if usual_s is None or quiet_s < standstill_limit_s(usual_s, durations) or phase in PATIENT_PHASES:
        return None
    return Standstill(progress_age_s, usual_s, progress_age_s <= _habitual_pause_s(durations))


def _habitual_pause_s(durations: Durations) -> float:
    """Return the longest usual pause of a run: twice its second longest step; 0 if it has no two."""
    below = list(accumulate(durations.counts))
    if not below or below[-1] < LEAST_STEPS:
        return 0.0
    return LONG_FACTOR * [*durations.bounds, durations.longest_s][bisect_left(below, below[-1] - 1)]


def early_limit_s(counts: Sequence[int], bounds: Sequence[float], longest_s: float, survived: int) -> float:
    """Return after how many seconds without a sign of a step a rank's stacks are written, in case that it is killed there.

    It doubles with each such time that the run ``survived``: whatever it does for so long (an evaluation in code of its own, a
    slow file system) is its habit, and a run of any length writes a few at most.
    """
    if sum(counts) < LEAST_STEPS:
        return EARLY_FIRST_S * (1 << survived)
    usual_s, long_s = usual_and_long_s(counts, bounds, longest_s)
    return max(LEAST_S, EARLY_FACTOR * usual_s, LONG_FACTOR * long_s) * (1 << survived)
