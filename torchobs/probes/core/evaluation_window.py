"""States of the timeline around an evaluation. A part of :mod:`torchobs.probes.core.timeline`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchobs.probes.data.fetch_times import Undecided


class EvaluationStart(NamedTuple):
    """The state at ``eval()``, restored if an evaluation followed."""

    owner: int
    begun_ns: int
    spent_ns: list[int]
    undecided: Undecided


class EvaluationEnd(NamedTuple):
    """The state at a fetch from another loader after ``eval()``, where the evaluation may have ended."""

    at_ns: int
    spent_ns: list[int]
    undecided: Undecided
