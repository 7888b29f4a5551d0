"""Learn which optimizers make up one training step, and how often each steps in it, from the order of their steps.

A cycle is the set of optimizers that step before one of them steps again. An optimizer that steps only occasionally (a
generator, a delayed actor) belongs to the next step of the others. Whether several such updates in a row are part of a step is
known once the others step again; if there are more of them than the others had steps, they are a new cycle (another stage, the
next fold).

Where hundreds of optimizers step within the backward pass, one for each parameter, full hooks would cost too much: once the
cycle is learned, each is only removed from ``pending``, and the last one ends the step.
"""

from __future__ import annotations

from typing import Any

MOST_WITHOUT = 256
"""Optimizer steps without a new backward that continue the same step: one for each parameter group (DeepSpeed's ZeRO). An
optimizer that makes more gets its gradients in another way, and each is a step"""
_MOST_BESIDE = 8
"""Longest run of updates that may belong to the next step of the others: delayed actors make about two"""


class OptimizerCycle:
    """The learned cycle, optimizers by id, and its progress. For the training thread; ``forget`` for any."""

    __slots__ = (
        "_deferred", "_firsts", "_occasional", "_replaced", "_run_from", "expected", "in_one_pass", "is_nested", "pending",
        "seen", "within_backward",
    )  # fmt: skip

    def __init__(self) -> None:
        self.expected: dict[int, int] = {}
        """How often each optimizer steps in a cycle"""
        self.seen: dict[int, int] = {}
        """How often each has stepped in the current cycle"""
        self.pending: set[int] = set()
        """Optimizers yet to step in this cycle, if the fast path within the backward pass is in use; else empty"""
        self.within_backward = False
        """Whether the last optimizer stepped within a backward pass"""
        self.in_one_pass = False
        """Whether the last complete cycle was a single backward pass; a GAN's has two"""
        self.is_nested = False
        """Whether an optimizer's step has called another's, which rules the fast path out"""
        self._occasional: set[int] = set()
        self._deferred: set[int] = set()
        self._run_from = 0
        self._firsts: dict[int, int] = {}
        """id of the first parameter of each living optimizer"""
        self._replaced: set[int] = set()
        """The same of those that have stepped in the current cycle and were deleted since"""

    def begin(self) -> int:
        """Begin the next cycle; return the id of its only optimizer if that steps once, else 0."""
        self.seen.clear()
        self._deferred.clear()
        self._replaced.clear()
        self.pending.clear()
        expected = self.expected
        if len(expected) > 1 and self.within_backward and not self.is_nested and sum(expected.values()) == len(expected):
            self.pending.update(expected)
        return next(iter(expected)) if list(expected.values()) == [1] else 0

    def note(self, key: int) -> None:
        """Count a step of that optimizer."""
        self.seen[key] = self.seen.get(key, 0) + 1

    def is_begun(self) -> bool:
        """Return True if some of the optimizers have stepped on the fast path, but not all."""
        return 0 < len(self.pending) < len(self.expected)

    def catch_up(self) -> bool:
        """Count the steps that took the fast path; return True if there were any."""
        pending, expected = self.pending, self.expected
        if not pending:
            return False
        crossed_off = len(pending) < len(expected)
        if crossed_off:
            self.seen.update(expected)
            for key in pending:
                self.seen.pop(key, None)
        pending.clear()
        return crossed_off

    def are_complete(self) -> bool:
        """Return True if all expected optimizers have stepped."""
        seen, expected = self.seen, self.expected
        if not expected or len(seen) < len(expected):
            return False
        return seen == expected or all(seen.get(key, 0) >= times for key, times in tuple(expected.items()))

    def is_within(self) -> bool:
        """Return True if only optimizers that are expected have stepped, and others of those have yet to."""
        return bool(self.seen) and self.seen.keys() <= self.expected.keys() and not self.are_complete()

    def learn(self, step: int) -> None:
        """Take the optimizers that have stepped since ``step`` ended as the cycle."""
        self.expected, self._run_from = dict(self.seen), step
        self._occasional.clear()

    def expect_more(self, key: int) -> None:
        """Expect one more step of that optimizer in each cycle."""
        self.expected[key] = self.expected.get(key, 0) + 1

    def note_occasional(self, step: int) -> None:
        """Note, once the cycle after ``step`` is complete, which other optimizers have stepped in it."""
        if len(self.seen) > len(self.expected):
            self._occasional |= self.seen.keys() - self.expected.keys()
            self._run_from = step

    def are_occasional(self) -> bool:
        """Return True if only occasional optimizers have stepped."""
        return bool(self.seen) and self.seen.keys() <= self._occasional

    def may_be_occasional(self, step: int, deferred: int) -> bool:
        """Return True if the optimizers seen, one of which steps again, may belong to the next step of the others.

        That holds for at most as many updates in a row as the others had steps without them up to ``step``; ``deferred`` such
        updates came before.
        """
        others = self.expected.keys()
        return bool(others) and others.isdisjoint(self.seen) and deferred + 2 <= min(step - self._run_from, _MOST_BESIDE)

    def defer(self) -> None:
        """Leave open to which step the optimizers seen belong, and begin to count anew."""
        self._deferred |= self.seen.keys()
        self.seen.clear()

    def begins_another(self, key: int) -> bool:
        """Return True if some optimizers are deferred, and this one is neither among them nor in the cycle."""
        return bool(self._deferred) and key not in self.expected and key not in self._deferred

    def note_first(self, key: int, optimizer: Any) -> None:
        """Note the first parameter of an optimizer."""
        self._firsts[key] = id(_first_parameter(optimizer))

    def replaces(self, optimizer: Any) -> bool:
        """Return True if it goes on for one that has stepped in this cycle and was deleted: it is made anew for each step."""
        return bool(self._replaced) and id(_first_parameter(optimizer)) in self._replaced

    def forget(self, key: int) -> None:
        """Remove an optimizer that was deleted."""
        first = self._firsts.pop(key, None)
        if self.seen.pop(key, None) and first is not None:
            self._replaced.add(first)
        self.expected.pop(key, None)
        self.pending.discard(key)
        self._occasional.discard(key)
        self._deferred.discard(key)


def first_gradient(optimizer: Any) -> tuple[int, int, int] | None:
    """Return the ids of the first parameter and of its gradient, and the gradient's version; ``None`` without a gradient."""
    parameter = _first_parameter(optimizer)
    gradient = getattr(parameter, "grad", None)
    return None if gradient is None else (id(parameter), id(gradient), gradient._version)


def _first_parameter(optimizer: Any) -> Any:
    return next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
