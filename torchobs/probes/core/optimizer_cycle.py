"""Which optimizers make up one training step, and how often each of them steps in it: learned from the order of their steps.

A cycle is what was seen before one of its optimizers stepped again. An optimizer that steps along now and then (a generator, a
delayed actor) is a part of the next step of the others; one that does so several times in a row shows only when the others come
back, unless it does so more often than they did before: then it has taken over (another stage, the next fold).

Hundreds of optimizers that step within the backward pass, one for each parameter, would pay for hooks hundreds of times: once
they are known, each is only crossed off (``waiting``), and the last one ends the step.
"""

from __future__ import annotations

from typing import Any

_MOST_BESIDE = 8
"""Updates in a row that wait for the others to come back: delayed actors make two or so"""


class Members:
    """The cycle of optimizers, each by its id. In the training thread; ``forget`` from any."""

    __slots__ = ("_along", "_aside", "_run_from", "expected", "is_nested", "seen", "waiting", "within_backward")

    def __init__(self) -> None:
        self.expected: dict[int, int] = {}
        """How often each steps in a cycle"""
        self.seen: dict[int, int] = {}
        """How often each has in this one"""
        self.waiting: set[int] = set()
        """Those yet to step in this one, where all others need no hook; empty where each is seen in full"""
        self.within_backward = False
        """Whether the last one stepped within a backward pass"""
        self.is_nested = False
        """Whether one's step has called another's: not to be crossed off by"""
        self._along: set[int] = set()
        self._aside: set[int] = set()
        self._run_from = 0

    def begin(self) -> int:
        """Begin the next cycle; return the id of its one optimizer, if it is one that steps once, else 0."""
        self.seen.clear()
        self._aside.clear()
        self.waiting.clear()
        expected = self.expected
        if len(expected) > 1 and self.within_backward and not self.is_nested and sum(expected.values()) == len(expected):
            self.waiting.update(expected)
        return next(iter(expected)) if list(expected.values()) == [1] else 0

    def note(self, key: int) -> None:
        """It has stepped."""
        self.seen[key] = self.seen.get(key, 0) + 1

    def catch_up(self) -> bool:
        """Count those that were only crossed off; return True if there are any."""
        waiting, expected = self.waiting, self.expected
        if not waiting:
            return False
        crossed_off = len(waiting) < len(expected)
        if crossed_off:
            self.seen.update(expected)
            for key in waiting:
                self.seen.pop(key, None)
        waiting.clear()
        return crossed_off

    def are_complete(self) -> bool:
        """Return True if all that are expected have stepped."""
        seen, expected = self.seen, self.expected
        if not expected or len(seen) < len(expected):
            return False
        return seen == expected or all(seen.get(key, 0) >= times for key, times in tuple(expected.items()))

    def learn(self, step: int) -> None:
        """Those seen, after that step, are the cycle."""
        self.expected, self._run_from = dict(self.seen), step
        self._along.clear()

    def expect_more(self, key: int) -> None:
        """It steps once more in each cycle than it was known to."""
        self.expected[key] = self.expected.get(key, 0) + 1

    def note_along(self, step: int) -> None:
        """The cycle after that step is complete: what else has stepped in it steps along."""
        if len(self.seen) > len(self.expected):
            self._along |= self.seen.keys() - self.expected.keys()
            self._run_from = step

    def are_along(self) -> bool:
        """Return True if only such have stepped as step along."""
        return bool(self.seen) and self.seen.keys() <= self._along

    def may_be_beside(self, step: int, waiting: int) -> bool:
        """Return True if those seen, of which one steps again, may be stepping along with the others.

        As many times as the others have stepped without them up to ``step``; ``waiting`` times have they done so before.
        """
        others = self.expected.keys()
        return bool(others) and others.isdisjoint(self.seen) and waiting + 2 <= min(step - self._run_from, _MOST_BESIDE)

    def set_aside(self) -> None:
        """Those seen may be stepping along: they begin again."""
        self._aside |= self.seen.keys()
        self.seen.clear()

    def is_new_beside(self, key: int) -> bool:
        """Return True if some are set aside, and that optimizer is neither one of them nor of the cycle."""
        return bool(self._aside) and key not in self.expected and key not in self._aside

    def forget(self, key: int) -> None:
        """It is no more."""
        self.seen.pop(key, None)
        self.expected.pop(key, None)
        self.waiting.discard(key)
        self._along.discard(key)
        self._aside.discard(key)


def first_gradient(optimizer: Any) -> tuple[int, int, int] | None:
    """Return which its first parameter is, which gradient that has, and how often that was changed."""
    parameter = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    gradient = getattr(parameter, "grad", None)
    return None if gradient is None else (id(parameter), id(gradient), gradient._version)
