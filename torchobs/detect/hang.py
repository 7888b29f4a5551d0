"""Detect the ranks that the others of a hung run wait for.

Ranks that exchange tensors wait in a collective for the one that has not called it. All of them are without a step, so that the
age of the last step does not distinguish them; where they are does. The evidence, the strongest first:

1. A rank that has ended never calls the next collective; one that does not respond (stopped, or Python's lock held in native
   code) does not either; nor does one that evaluates, saves, compiles, or has left its training loop.
2. Torch's flight recorder: a rank that has not called the collective in which others wait (:mod:`torchobs.detect.collectives`).
3. Stacks: a rank whose innermost frame is in torch.distributed or in the autograd engine's wait is in a collective. Of ranks in
   the same place some that are not are to blame. Stacks of waits on a GPU end in the user's own line, and decide nothing.
4. A rank that fetches data, if others do not: no loader waits for a peer.
5. Steps and phases: where most ranks are at the same place, the rest is to blame. Otherwise, as for two ranks, it is those in
   forward or between two phases if others are in backward or in the optimizer, where gradients are exchanged; else the least
   advanced. A collective in forward (FSDP's gathers, SyncBatchNorm) is waited for by ranks in forward, and met by rule 5.

Without any difference nobody is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torchobs.detect import collectives
from torchobs.detect.collectives import GroupProgress

LEAST_RANKS = 2
ASIDE = frozenset({"evaluation", "checkpoint", "compile", "idle"})
"""Phases in which a rank takes no part in training."""
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

    @property
    def step(self) -> int | None:
        """Number of the step that it is in; ``None``: unknown."""
        return None if self.position.steps is None else self.position.steps + 1


def blamed(ranks: Mapping[str, Position]) -> dict[str, Blamed]:
    """Return the ranks that the others wait for, by name.

    Empty if no living rank hangs, for a single rank, and if nothing distinguishes them.
    """
    if len(ranks) < LEAST_RANKS or not any(one.state == "hung" for one in ranks.values()):
        return {}
    for why, rule in _RULES:
        names = rule(ranks)
        if 0 < len(names) < len(ranks):
            return {name: Blamed(why, ranks[name]) for name in ranks if name in names}
    return {}


def alone(position: Position) -> Blamed:
    """Return what a rank does of which it is known otherwise that the others wait for it."""
    if position.state in {"finished", "failed", "lost"}:
        return Blamed(ENDED, position)
    if position.phase in ASIDE:
        return Blamed(ASIDE_OF_TRAINING, position)
    if position.frames and not waits(position.frames):
        return Blamed(NOT_IN_COLLECTIVE, position)
    return Blamed(FETCHING if position.phase == "data" else ELSEWHERE, position)


def place(steps: int, phase: str) -> float:
    """Return how far a rank is, in steps: those done, and a fifth for each phase of the next that is behind it."""
    return steps + _ORDER.get(phase, 0) / 5


def waits(frames: Sequence[str]) -> bool:
    """Return True if these frames, the innermost first, are of a thread in a collective."""
    if not frames:
        return False
    return any(sign in frames[0] for sign in _WAITS) or any(_COLLECTIVES in frame for frame in frames)


def _ended(ranks: Mapping[str, Position]) -> set[str]:
    return {name for name, one in ranks.items() if one.state in {"finished", "failed", "lost"}}


def _silent(ranks: Mapping[str, Position]) -> set[str]:
    return {name for name, one in ranks.items() if one.state == "unresponsive"}


def _not_arrived(ranks: Mapping[str, Position]) -> set[str]:
    """Return those that did not come; but for what waits in an operation that is not recorded, by its stack."""
    found = collectives.absent({name: one.collectives for name, one in ranks.items()})
    return {name for name in found if not waits(ranks[name].frames)}


def _aside(ranks: Mapping[str, Position]) -> set[str]:
    return {name for name, one in ranks.items() if one.phase in ASIDE}


def _out_of_collective(ranks: Mapping[str, Position]) -> set[str]:
    known = all(one.frames for one in ranks.values())
    return {name for name, one in ranks.items() if not waits(one.frames)} if known else set()


def _fetching(ranks: Mapping[str, Position]) -> set[str]:
    return {name for name, one in ranks.items() if one.phase == "data"}


def _elsewhere(ranks: Mapping[str, Position]) -> set[str]:
    places = {name: place(one.steps, one.phase) for name, one in ranks.items() if one.phase and one.steps is not None}
    counts = Counter(places.values())
    if len(counts) < 2 or len(places) < len(ranks):  # noqa: PLR2004  # all at one place
        return set()
    most, number = counts.most_common(1)[0]
    if 2 * number > len(places):
        return {name for name, place in places.items() if place != most}
    return _not_exchanging(ranks) or {name for name, place in places.items() if place == min(counts)}


def _not_exchanging(ranks: Mapping[str, Position]) -> set[str]:
    others = {name for name, one in ranks.items() if one.phase not in EXCHANGING}
    return others if len(others) < len(ranks) else set()


_RULES = (
    (ENDED, _ended), (SILENT, _silent), (NOT_ARRIVED, _not_arrived), (ASIDE_OF_TRAINING, _aside),
    (NOT_IN_COLLECTIVE, _out_of_collective), (FETCHING, _fetching), (ELSEWHERE, _elsewhere),
)  # fmt: skip
