"""State of a rank and how it ended, by pure functions: no file, no clock.

*alive*: recent heartbeat, by the exporter's clock; *unresponsive*: the lock is held and the heartbeat stopped (hung with the
GIL held, stopped, still tearing down); *hung*: alive without a step, or a sign of one, for longer than the learned timeout,
while no peer is in a phase that the others may wait for. Ended ranks are *finished*, *failed*, or *lost*: gone
without an exit record (SIGKILL, the OOM killer, os._exit).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torchobs import catalog
from torchobs.detect import hangs
from torchobs.detect.hangs import PATIENT_PHASES, Standstill
from torchobs.flight.events import Event, Late, Span
from torchobs.flight.layout import FADED_AFTER_S as FADED_AFTER_S  # noqa: PLC0414  # for the modules that judge by it
from torchobs.flight.layout import Exit
from torchobs.flight.reader import Distribution
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchobs.flight.reader import View


BEAT_S = 0.5
"""Interval of the heartbeat: a rank that vanished died up to that long after its last one."""

UNRESPONSIVE_AFTER_S = 2.0
"""Four heartbeats missed, with the lock held."""

UNRESPONSIVE_S = 120.0
"""How long it is before that is a hang. A process that is being torn down is unresponsive, too: measured 29 ms per GiB of its
memory, 11 s with a core dump. And so is one that loads a model with Python's lock held."""

LEAST_HANG_S = 60.0
"""Shortest hang timeout: a step behind a cold page cache or a slow collective takes seconds, hardly a minute."""

HANG_FACTOR = 20.0
"""Factor on the 99th percentile of step times, which the power-of-two buckets overestimate by up to 2."""

FIRST_STEP_S = 1800.0
"""Timeout before the first step: the default timeout of a gloo process group in torch.distributed. Also how long a rank may
wait for a peer that evaluates, saves or compiles alone."""

LIVING = frozenset({"alive", "unresponsive", "hung"})
"""States in which the process exists."""


FULL_CGROUP = 0.95
"""Share of the cgroup's limit from which a vanished rank was likely OOM-killed: usage is sampled every 100 ms, in which one
thread touches some 200 MB."""

FULL_MACHINE = 0.98
"""The same for the machine's memory, where 5 % can be 100 GB."""

OOM_KILL_LATELY_S = 60.0
"""An OOM kill in the same cgroup within this time before a rank's last heartbeat is taken as the cause of its end, too: the
kernel kills one process, the launcher or the container runtime the others."""


TERMINATED_CODES = frozenset({143, -15})
"""Exit codes of a program that ended itself on SIGTERM: the shell's, and multiprocessing's."""


_FAILED = {
    Exit.EXCEPTION: "exception",
    Exit.INTERRUPTED: "interrupted",  # failed, as the exit status says; Ctrl-C shall not raise an alert
    Exit.TERMINATED: "terminated",  # nor shall preemption, scancel or a launcher that ends the siblings
    Exit.CRASHED: "crashed",
}


class MemoryUse(NamedTuple):
    """A rank's last known memory use: shares of its limits (0: unknown), and seconds since the last OOM kill it saw."""

    cgroup: float = 0.0
    machine: float = 0.0
    kill_age_s: float | None = None


class Observation(NamedTuple):
    """Observed state of one rank. Ages in seconds, by the exporter's clock."""

    same_boot: bool
    lock_held: bool
    beat_age_s: float
    exit_reason: int | None
    exit_code: int
    phase: str | None
    quiet_s: float | None
    """since the last step or phase boundary, or the start; ``None``: steps are not recorded"""
    hang_timeout_s: float
    ends: bool = False
    """True for the first process of a container after a SIGTERM, which it survives until the grace is over"""


def judge(observed: Observation) -> str:
    """Return one of ``catalog.RANK_STATES``."""
    if _gone(observed):
        return ending(observed.exit_reason, observed.exit_code)[0]
    if observed.ends:
        return ending(observed.exit_reason, observed.exit_code)[0]
    if observed.lock_held and observed.beat_age_s > UNRESPONSIVE_AFTER_S:
        # exit recorded and lock still held: it is tearing down
        return "unresponsive" if observed.exit_reason is None else ending(observed.exit_reason, observed.exit_code)[0]
    if observed.quiet_s is not None and observed.quiet_s > observed.hang_timeout_s and observed.phase not in PATIENT_PHASES:
        return "hung"
    return "alive"


def trains(state: str, phase: str | None, still: Standstill | None, *, recorded: bool) -> bool:
    """Return whether a rank makes steps that are recorded, so that it has a speed."""
    return state == "alive" and phase != "idle" and still is None and recorded


class _HasState(Protocol):
    @property
    def job_name(self) -> str: ...
    @property
    def run_id(self) -> str: ...
    @property
    def rank(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def progress_age_s(self) -> float | None: ...


Judged = TypeVar("Judged", bound=_HasState)


def with_patience(ranks: Sequence[Judged], phase: Callable[[Judged], str | None]) -> list[Judged]:
    """Return the ranks, with *hung* ones alive if they only wait for a peer that evaluates, saves or compiles alone."""
    patient = {_team(rank) for rank in ranks if rank.state == "alive" and phase(rank) in PATIENT_PHASES}
    return [
        replace(rank, state="alive")  # type: ignore[type-var]  # both kinds are dataclasses
        if rank.state == "hung" and (rank.progress_age_s or 0.0) < FIRST_STEP_S and _team(rank) in patient
        else rank
        for rank in ranks
    ]


def _team(rank: _HasState) -> tuple[str, str, str]:
    return rank.job_name, rank.run_id, labels.team(rank.rank)


def fading(observed: Observation) -> bool:
    """Return whether the rank is probably dead, to be confirmed after ``FADED_AFTER_S``."""
    return observed.same_boot and not observed.lock_held and not _gone(observed)


def ending(exit_reason: int | None, exit_code: int, memory: MemoryUse | None = None) -> tuple[str, str]:
    """Return the state and the exit reason (``catalog.EXIT_REASONS``) of a dead rank.

    ``memory``: its last known memory use; a rank lost near the limit was likely OOM-killed.
    """
    if exit_reason in _FAILED:
        return "failed", _FAILED[exit_reason]
    if exit_reason == Exit.EXIT_CODE and exit_code:
        return "failed", "terminated" if exit_code in TERMINATED_CODES else "exit_code"
    if exit_reason in {Exit.FINISHED, Exit.EXIT_CODE}:
        return "finished", "finished"
    return "lost", "out_of_memory" if memory is not None and ran_out(memory) else "lost"


def ran_out(memory: MemoryUse) -> bool:
    """Return whether the rank was likely OOM-killed: near the cgroup's or the machine's limit, or after another OOM kill."""
    if memory.kill_age_s is not None and memory.kill_age_s <= OOM_KILL_LATELY_S:
        return True
    return memory.cgroup >= FULL_CGROUP or memory.machine >= FULL_MACHINE


def last_memory(view: View) -> MemoryUse:
    """Return the rank's last known memory use relative to its limits, which distinguishes an OOM kill from other kills."""
    shares, kill_age_s = {"cgroup": 0.0, "machine": 0.0}, None
    last_s = view.header.wall_s(view.live.heartbeat_ns or view.header.monotonic_ns)
    for series, value in view.points:
        if isinstance(value, Distribution):
            continue
        if series.name == catalog.MEMORY_HOST_UTILIZATION.name:
            shares.update({str(of): value for name, of in series.attributes if name == catalog.LIMIT.name})
        elif series.name == catalog.CGROUP_MEMORY_LAST_OOM_KILL.name:
            kill_age_s = last_s - value
    return MemoryUse(shares["cgroup"], shares["machine"], kill_age_s)


def hang_timeout_s(durations: Distribution | None, bounds: Sequence[float]) -> float:
    """Return how long a rank may be without a step, in seconds.

    20 times the 99th percentile of its step times, at least 60, and at least twice the second longest step (``detect.hangs``).
    ``durations``: histogram of step times over ``bounds``, without evaluation and checkpoints.
    """
    if not durations or not sum(durations.counts):
        return FIRST_STEP_S
    usual_s, long_s = hangs.usual_and_long_s(durations.counts, bounds, durations.greatest or bounds[-1])
    return max(LEAST_HANG_S, HANG_FACTOR * usual_s, hangs.LONG_FACTOR * long_s)


def _gone(observed: Observation) -> bool:
    if not observed.same_boot:
        return True
    return not observed.lock_held and (observed.beat_age_s > FADED_AFTER_S or observed.exit_reason is not None)


_BARE = re.compile(r"\A(?:builtins|__main__)\.")
"""Modules that Python's own tracebacks leave out"""
_LINE = re.compile(r"[^/]+:\d+(?=\Z| in )")
"""The name of a file, and a line of it"""
_MAX_MESSAGE = 100
_MAX_TEXT = 256
"""Characters of a class' name, and of a place"""


def newest_exception(events: Sequence[Event | Span | Late]) -> Mapping[str, str]:
    """Return the newest exception of the main thread as attributes of ``catalog.RANK_EXCEPTION``; empty if there is none."""
    for event in reversed(events):
        if isinstance(event, Event) and event.name == catalog.EVENT_EXCEPTION.name and not event.attributes.get("thread"):
            return exception_attributes(event.attributes)
    return {}


def exception_in_words(exception: Mapping[str, str]) -> str:
    """Return class and line, ``ValueError at train.py:12``; ``exception``: from :func:`exception_attributes`."""
    kind, place = exception.get("exception.type", ""), _LINE.search(exception.get("location", ""))
    return f"{kind} at {place[0]}" if kind and place else kind


def exception_attributes(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Return the attributes of ``catalog.RANK_EXCEPTION`` from those of its event."""
    return {
        "exception.type": _BARE.sub("", _text(attributes.get("exception.type"), _MAX_TEXT)),
        "message": _text(attributes.get("exception.message"), _MAX_MESSAGE),
        "location": _text(attributes.get("caller") or attributes.get("location"), _MAX_TEXT),
    }


def _text(value: object, longest: int) -> str:
    plain = labels.text(value) if isinstance(value, str) else ""
    return "".join(char for char in plain[:longest] if char.isprintable())
