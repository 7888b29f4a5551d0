"""The state of a rank, from numbers alone: no file, no clock.

*alive* = the heartbeat moved lately, by the exporter's own clock; *unresponsive* = the lock is held and the heartbeat stopped
(hung with the GIL, stopped, still tearing down); *hung* = alive without a step, or a sign of one, for longer than the learned
timeout, and no peer is at what the others may wait for; and three ways to have ended: *finished*, *failed*, or *lost*, which is
to be gone without a word (SIGKILL, the OOM killer, os._exit).
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from torchobs.flight.format.layout import Exit

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torchobs.flight.reader.decode import Distribution

FADED_AFTER_S = 0.6
"""A rank whose lock is free is dead after this long without a heartbeat, which is due every 0.5 s. A free lock alone is no
proof: a process that closes descriptors it does not know, as daemons do, loses its lock and lives on."""

UNRESPONSIVE_AFTER_S = 2.0
"""Four heartbeats missed, with the lock held."""

LEAST_HANG_S = 60.0
"""No rank is called hung before: a step behind a cold page cache or a slow collective takes seconds, hardly a minute."""

HANG_FACTOR = 20.0
"""Times the step time's 99th percentile, which the power-of-two buckets overestimate by up to 2."""

LONG_FACTOR = 2.0
"""Times the longest step but one: where one in hundreds takes minutes (the first minibatch after a rollout), the 99th
percentile knows nothing of it; and a single one, behind a cold cache, says nothing of the next."""

FIRST_STEP_S = 1800.0
"""Before the first step nothing is learned yet; this is the default timeout of a gloo process group in torch.distributed.
So long a rank may wait for a peer, too, that evaluates, saves or compiles alone."""

PATIENT_PHASES = frozenset({"evaluation", "checkpoint", "compile", "idle"})
"""Phases that may take any time without a step; who is idle has left its training loop."""

LIVING = frozenset({"alive", "unresponsive", "hung"})
"""The states in which the process is there."""


FULL_CGROUP = 0.95
"""Share of its cgroup's limit from which on a rank that vanished was likely killed for it: it was asked ten times a second,
in which one thread touches some 200 MB."""

FULL_MACHINE = 0.98
"""The same share of a machine's memory: there 5 % can be 100 GB."""

OOM_KILL_LATELY_S = 60.0
"""An OOM kill in the same cgroup that long before a rank's last heartbeat is taken for the cause of its end, too: the kernel
takes one process, the launcher or the container's runtime all others."""


class MemoryUse(NamedTuple):
    """What a rank said last of its memory: shares of its limits (0: unknown), seconds since the last OOM kill it saw."""

    cgroup: float = 0.0
    machine: float = 0.0
    kill_age_s: float | None = None


class Observation(NamedTuple):
    """What was seen of one rank. Ages in seconds, by the exporter's clock."""

    same_boot: bool
    lock_held: bool
    beat_age_s: float
    exit_reason: int | None
    exit_code: int
    phase: str | None
    quiet_s: float | None
    """since the last step or boundary of one, or the start before the first; ``None``: nobody records its steps"""
    hang_timeout_s: float


def judge(seen: Observation) -> str:
    """Return one of ``catalog.RANK_STATES``."""
    if _gone(seen):
        return ending(seen.exit_reason, seen.exit_code)[0]
    if seen.lock_held and seen.beat_age_s > UNRESPONSIVE_AFTER_S:
        # one that has said how it ends and holds its lock still is being torn down
        return "unresponsive" if seen.exit_reason is None else ending(seen.exit_reason, seen.exit_code)[0]
    if seen.quiet_s is not None and seen.quiet_s > seen.hang_timeout_s and seen.phase not in PATIENT_PHASES:
        return "hung"
    return "alive"


def waits(state: str, progress_age_s: float | None, peers: Collection[str | None]) -> bool:
    """Return True if a rank only seems to have hung. ``peers``: the phases that the others of its run are in, if alive."""
    return state == "hung" and (progress_age_s or 0.0) < FIRST_STEP_S and not PATIENT_PHASES.isdisjoint(peers)


def fading(seen: Observation) -> bool:
    """Return True if the rank is probably dead, and another look in ``FADED_AFTER_S`` will tell."""
    return seen.same_boot and not seen.lock_held and not _gone(seen)


def ending(exit_reason: int | None, exit_code: int, memory: MemoryUse | None = None) -> tuple[str, str]:
    """Return the state and the exit reason (``catalog.EXIT_REASONS``) of a rank that is gone.

    ``memory`` is what it said last of its memory: who went without a word near the limit was likely killed for it.
    """
    if exit_reason == Exit.EXCEPTION:
        return "failed", "exception"
    if exit_reason == Exit.INTERRUPTED:
        return "failed", "interrupted"  # as its exit status says; whoever pressed Ctrl-C is not to be called by an alert
    if exit_reason == Exit.EXIT_CODE and exit_code:
        return "failed", "exit_code"
    if exit_reason in {Exit.FINISHED, Exit.EXIT_CODE}:
        return "finished", "finished"
    return "lost", "out_of_memory" if memory is not None and ran_out(memory) else "lost"


def ran_out(memory: MemoryUse) -> bool:
    """Return True if the kernel likely killed for memory: at the cgroup's limit, at the machine's, or just before another."""
    if memory.kill_age_s is not None and memory.kill_age_s <= OOM_KILL_LATELY_S:
        return True
    return memory.cgroup >= FULL_CGROUP or memory.machine >= FULL_MACHINE


def hang_timeout_s(durations: Distribution | None, bounds: Sequence[float]) -> float:
    """Return how long a rank may be without a step: 20 times its step time's 99th percentile, at least 60 s.

    And at least twice the longest but one. ``durations`` is the histogram of step times, in seconds, over ``bounds``;
    evaluation and checkpoints are not in it.
    """
    total = sum(durations.counts) if durations else 0
    if not durations or not total:
        return FIRST_STEP_S
    below, most_s = list(accumulate(durations.counts)), durations.greatest or bounds[-1]
    usual_s, long_s = ([*bounds, most_s][bisect_left(below, rank)] for rank in (0.99 * total, total - 1))
    return max(LEAST_HANG_S, HANG_FACTOR * usual_s, LONG_FACTOR * long_s)


def _gone(seen: Observation) -> bool:
    if not seen.same_boot:
        return True
    return not seen.lock_held and (seen.beat_age_s > FADED_AFTER_S or seen.exit_reason is not None)
